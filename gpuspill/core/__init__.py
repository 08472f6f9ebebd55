"""The pure core: what is where, what it costs, who goes next. Standard library only.

No threads, clock, files or dask in here, so a test can drive a million steps a minute. The one
object the rest of gpuspill talks to is :class:`~gpuspill.core.state.SpillState`; the other modules
are its parts; each knows only those below it:

=========================================  ==========================================================
:mod:`~gpuspill.core.state`                all of them together: events in, decisions out
:mod:`~gpuspill.core.spills`               moves down: what is written next, how that ends
:mod:`~gpuspill.core.restores`             moves up, on demand and ahead of use
:mod:`~gpuspill.core.admission`            who may add bytes now, who waits; eviction without a write
:mod:`~gpuspill.core.lifetimes`            how values leave memory and the books; what they kept alive
:mod:`~gpuspill.core.records`              the quota of the disk; records that are redundant
:mod:`~gpuspill.core.candidates`           what may be evicted, and what is set aside for a while
:mod:`~gpuspill.core.accounting`           what is charged in memory, and sums for statistics
:mod:`~gpuspill.core.effects`              what has to be done outside after an event
:mod:`~gpuspill.core.readahead`            how much may be read ahead of its use
:mod:`~gpuspill.core.eviction_queue`       what may be evicted now: a policy's values, small ones after them
:mod:`~gpuspill.core.uses`                 which tasks are going to read a key, and when
:mod:`~gpuspill.core.policy`               the port for eviction policies; the order by recency and next use
:mod:`~gpuspill.core.policy_guard`         what becomes of the order if a policy of others fails
:mod:`~gpuspill.core.recency`              a line of values by their last use
:mod:`~gpuspill.core.budget`               limits, reservations, the line of those who wait for room
:mod:`~gpuspill.core.ledger`               key <-> proxy, bytes a tier holds
:mod:`~gpuspill.core.residency`            one proxy: its copies, its move in flight, its pins
=========================================  ==========================================================

Two are used beside it: :mod:`~gpuspill.core.sizes`, what serialising teaches about ``sizeof``, and
:mod:`~gpuspill.core.backoff`, how long to wait before something is tried again.
"""
