"""Which keys hold which proxies, and what every proxy is charged in every tier.

A key is a name, a proxy is a value. Several keys may hold one proxy (the same object stored twice);
its bytes are charged once, to the proxy, in each tier that holds a copy. What was charged is
recorded and exactly that is subtracted again, so the totals cannot drift when a size estimate
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from sys import getsizeof

from gpuspill.core.residency import Residency, Tier

__all__ = ["FEW_KEYS", "Entry", "Ledger"]

#: So many keys of a value may be looked through whenever one comes or goes. What has more is None, a number or a string
#: that thousands of tasks return: that would be quadratic in their number.
FEW_KEYS = 32

#: With no more than that left, a dictionary that takes more bytes than this has had many times as many.
_SPARSE_NBYTES = 8192


@dataclass(slots=True, eq=False)
class Entry(Residency):
    """One proxy: where its value is, and what is known of it.

    One object, and not one for each of these: the garbage collector visits all there are, and there is one a value.

    Attributes
    ----------
    pid
        Number of the proxy, never reused.
    nbytes
        Bytes its value takes in memory (an estimate until it was serialised once).
    disk_nbytes
        Bytes of its record; 0 without one.
    keys
        The keys that hold it, in the order in which they came. Empty once all were deleted while it was pinned or
        moving. A dictionary because the garbage collector does not look at one of names and None, as it does at a set.
    unspillable
        It cannot be serialised and stays in memory for good.
    had_use
        A use of it was expected at some time (see the policy's first rule).
    parts
        Proxies of memory that the value keeps alive while it is in memory. That is charged to them, once, whatever the
        number of values that have it.
    apart_nbytes
        Bytes that the value takes when it comes back from disk, with memory of its own. Only with parts.
    owners
        How many values have it as a part. While one has, evicting it would free nothing.
    leaving
        Bytes that its spill in flight is going to free.
    loose
        The last of them was let go, but is perhaps not gone yet.
    need
        Bytes that its record takes, or would have taken when it was last tried; 0 if it never got that far.
    refusals
        How often in a row it could not be written for a reason that may pass.
    refused
        The last time is now: it is left alone until it is to be tried again, whatever happens to it meanwhile.
    renewed
        The value was stored anew while it moved: the record, or what is being written, may hold what it was before.
    """

    pid: int
    nbytes: int
    disk_nbytes: int = 0
    keys: dict[Hashable, None] = field(default_factory=dict)
    unspillable: bool = False
    had_use: bool = False
    renewed: bool = False
    need: int = 0
    refusals: int = 0
    refused: bool = False
    parts: tuple[int, ...] = ()
    apart_nbytes: int = 0
    owners: int = 0
    leaving: int = 0
    loose: bool = False

    def release_key(self, key: Hashable) -> None:
        """`key` does not hold it any more."""
        keys = self.keys
        del keys[key]
        # A dictionary keeps the places of those that have gone, and looks at each one to find those that are left.
        if len(keys) <= FEW_KEYS and getsizeof(keys) > _SPARSE_NBYTES:
            self.keys = dict.fromkeys(keys)

    @property
    def needed(self) -> bool:
        """Whether a key, a pin, a move or another value needs it."""
        return bool(self.keys or self.pins or self.target is not None or self.owners or self.loose)

    @property
    def evictable(self) -> bool:
        """Whether eviction may consider it, now or later."""
        return (
            self.resident
            and not self.pins
            and self.target is None
            and not self.owners
            and not self.loose
            and (not self.unspillable or self.has(Tier.DISK))
        )

    @property
    def charged(self) -> bool:
        """Whether its bytes count as used: it is in memory or on its way there."""
        return self.resident or self.target == self.origin


class Ledger:
    """Keys, proxies and totals. Not thread-safe.

    Parameters
    ----------
    make
        ``make(pid, nbytes)`` makes an entry; whoever keeps more of each value than the core does can give a subclass.
    """

    def __init__(self, make: Callable[[int, int], Entry] = Entry) -> None:
        self._make = make
        self.keys: dict[Hashable, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self._last = 0

    def create(self, nbytes: int) -> Entry:
        """Return a new entry without keys."""
        if nbytes < 0:
            raise ValueError(f"a size must not be negative, got {nbytes} bytes")
        self._last += 1
        entry = self.entries[self._last] = self._make(self._last, nbytes)
        return entry

    def bind(self, key: Hashable, entry: Entry) -> Entry | None:
        """Let `key` hold `entry`; return what it held before, if that was another one."""
        before = self.keys.get(key)
        if before is entry:
            return None
        if before is not None:
            before.release_key(key)
        self.keys[key] = entry
        entry.keys[key] = None
        return before

    def unbind(self, key: Hashable) -> Entry:
        """Forget `key`; return what it held. KeyError if unknown."""
        entry = self.keys.pop(key)
        entry.release_key(key)
        return entry

    def forget(self, entry: Entry) -> None:
        """Remove an entry that no key holds."""
        assert not entry.keys, f"proxy {entry.pid} is still held by {list(entry.keys)}"
        del self.entries[entry.pid]

    def holders(self, pid: int) -> Iterator[Hashable]:
        """Return the keys that hold a proxy."""
        return iter(self.entries[pid].keys)

    def validate(self, used: int, disk_used: int) -> None:
        """Raise AssertionError unless the indices agree with each other and with the budgets' totals.

        Parameters
        ----------
        used, disk_used
            What the budgets hold for memory and for disk, in bytes.
        """
        for key, entry in self.keys.items():
            assert key in entry.keys, (key, entry)
            assert self.entries[entry.pid] is entry, (key, entry)
        total = disk_total = 0
        for pid, entry in self.entries.items():
            assert entry.pid == pid
            for key in entry.keys:
                assert self.keys[key] is entry, (key, entry)
            if entry.charged:
                total += entry.nbytes
            if entry.has(Tier.DISK) or entry.target == Tier.DISK:
                disk_total += entry.disk_nbytes
            else:
                assert entry.disk_nbytes == 0, entry
        assert total == used, f"{total} bytes of values in memory, {used} charged"
        assert disk_total == disk_used, f"{disk_total} bytes of records, {disk_used} charged"
