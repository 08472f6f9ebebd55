"""The pure core: what is where, what it costs, who goes next. Standard library only.

No threads, clock, files or dask in here, so a test can drive a million steps a minute. The one
object the rest of gpuspill talks to is :class:`~gpuspill.core.state.SpillState`; the other modules
are its parts:

=========================================  ==========================================================
:mod:`~gpuspill.core.residency`            one proxy: its copies, its move in flight, its pins
:mod:`~gpuspill.core.ledger`               key <-> proxy, bytes a tier holds
:mod:`~gpuspill.core.budget`               limits, reservations, the queue of those who wait for
room
:mod:`~gpuspill.core.policy`               eviction order: recency and next use
:mod:`~gpuspill.core.sizes`                what serialising teaches about ``sizeof``
:mod:`~gpuspill.core.state`                all of them together: events in, decisions out
=========================================  ==========================================================
"""
