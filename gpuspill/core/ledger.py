"""Which keys hold which proxies, and what every proxy is charged in every tier.

A key is a name, a proxy is a value. Several keys may hold one proxy (the same object stored twice);
its bytes are charged once, to the proxy, in each tier that holds a copy. What was charged is
recorded and exactly that is subtracted again, so the totals cannot drift when a size estimate
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Generic, TypeVar, overload

from gpuspill.core.residency import Residency, Tier

__all__ = ["FEW_KEYS", "Entry", "Ledger", "Rare"]

T = TypeVar("T")

#: So many keys of a value may be looked through whenever one comes or goes. What has more is None,
#: a number or a string that thousands of tasks return: that would be quadratic in their number.
FEW_KEYS = 32

#: With no more than that left, a dictionary that takes more bytes than this has had many times as
#: many.
_SPARSE_NBYTES = 8192


class Rare(Generic[T]):
    """An attribute of an entry that takes no memory while it is what it is for most values.

    There may be a million values, and each of these attributes would take eight bytes of every one.

    Parameters
    ----------
    default
        What it is for most, and what it has to be set to for its memory to be given back: that very
        object.
    """

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, entry: None, owner: type) -> Rare[T]: ...
    @overload
    def __get__(self, entry: Entry, owner: type) -> T: ...
    def __get__(self, entry: Entry | None, owner: type) -> Rare[T] | T:
        if entry is None:
            return self
        rare = entry.rare
        return self._default if rare is None else rare.get(self._name, self._default)

    def __set__(self, entry: Entry, value: T) -> None:
        rare = entry.rare
        if value is not self._default:
            if rare is None:
                rare = entry.rare = {}
            rare[self._name] = value
        elif rare is not None:
            rare.pop(self._name, None)
            if not rare:
                entry.rare = None


@dataclass(slots=True, eq=False)
class Entry(Residency):
    """One proxy: where its value is, and what is known of it.

    One object, and not one for each of these: the garbage collector visits all there are, and there
    is one a value.

    Attributes
    ----------
    pid
        Number of the proxy, never reused.
    nbytes
        Bytes its value takes in memory (an estimate until it was serialised once).
    disk_nbytes
        Bytes of its record; 0 without one.
    key
        One of the keys that hold it, or the last that did.
    unspillable
        It cannot be serialised and stays in memory for good.
    had_use
        A use of it was expected at some time (see the policy's first rule).
    turns, small
        The eviction queue's.
    rare
        What is not as it is for most values, by name; see :class:`Rare`.
    parts
        Proxies of memory that the value keeps alive while it is in memory. That is charged to them,
        once, whatever the number of values that have it.
    apart_nbytes
        Bytes that the value takes when it comes back from disk, with memory of its own. Only with
        parts.
    owners
        How many values have it as a part. While one has, evicting it would free nothing.
    leaving
        Bytes that its spill in flight is going to free besides its own.
    stalled
        Its spill in flight takes too long, and is not counted on any more.
    loose
        The last of them was let go, but is perhaps not gone yet.
    need
        Bytes that its record would have taken when that last failed; 0 if it never got that far.
    refusals
        How often in a row it could not be written for a reason that may pass.
    refused
        The last time is now: it is left alone until it is to be tried again, whatever happens to it
        meanwhile.
    invalidated
        The value was stored anew while it moved: the record, or what is being written, may hold
        what it was before.
    taken
        It was used while it was being written, and may have been changed: the record does not
        count.
    """

    pid: int
    nbytes: int
    disk_nbytes: int = 0
    key: Hashable = None
    unspillable: bool = False
    had_use: bool = False
    turns: int = 0
    small: bool = False
    rare: dict[str, Any] | None = None
    # None if just `key` holds it, as for most values. Else a dictionary, because the garbage
    # collector does not look at one of names and None, as it does at a set.
    _names: dict[Hashable, None] | tuple[()] | None = ()

    invalidated = Rare(False)
    stalled = Rare(False)
    taken = Rare(False)
    need = Rare(0)
    refusals = Rare(0)
    refused = Rare(False)
    parts = Rare[tuple[int, ...]](())
    apart_nbytes = Rare(0)
    owners = Rare(0)
    leaving = Rare(0)
    loose = Rare(False)

    @property
    def whole_nbytes(self) -> int:
        """Bytes that the value takes with memory of its own: as on disk, and when it comes back."""
        return self.nbytes if self.rare is None or not self.parts else self.apart_nbytes

    @property
    def keys(self) -> Collection[Hashable]:
        """The keys that hold it, in the order in which they came.

        Empty once all were deleted while it was pinned or moving.
        """
        return (self.key,) if self._names is None else self._names

    def add_key(self, key: Hashable) -> None:
        """`key`, which did not, holds it from now on."""
        names = self._names
        if names is None:
            self._names = {self.key: None, key: None}
        elif names:
            names[key] = None
        else:
            self.key, self._names = key, None

    def release_key(self, key: Hashable) -> None:
        """`key` does not hold it any more."""
        names = self._names
        if not names:
            self._names = ()
            return
        del names[key]
        if len(names) == 1:
            (self.key,) = names
            self._names = None
        # A dictionary keeps the places of those that have gone, and looks at each one to find those
        # that are left.
        elif len(names) <= FEW_KEYS and getsizeof(names) > _SPARSE_NBYTES:
            self._names = dict.fromkeys(names)

    @property
    def needed(self) -> bool:
        """Whether a key, a pin, a move or another value needs it."""
        if self._names != () or self.pins or self.target is not None:
            return True
        return self.rare is not None and bool(self.owners or self.loose)

    @property
    def evictable(self) -> bool:
        """Whether eviction may consider it, now or later."""
        if not self.resident or self.pins or self.target is not None:
            return False
        if self.rare is not None and (self.owners or self.loose):
            return False
        return not self.unspillable or self.has(Tier.DISK)

    @property
    def charged(self) -> bool:
        """Whether its bytes count as used: it is in memory or on its way there."""
        return self.resident or self.target == self.origin


class Ledger:
    """Keys, proxies and totals. Not thread-safe.

    Parameters
    ----------
    make
        ``make(pid, nbytes)`` makes an entry. A caller that keeps more of each value gives a
        subclass.
    entries
        Where to keep them; by default a dictionary.
    """

    def __init__(
        self, make: Callable[[int, int], Entry] = Entry, entries: MutableMapping[int, Any] | None = None
    ) -> None:
        self._make = make
        self.keys: dict[Hashable, Entry] = {}
        self.entries: MutableMapping[int, Entry] = {} if entries is None else entries
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
        entry.add_key(key)
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
        """Raise AssertionError unless the indices agree with each other and with the budgets.

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
