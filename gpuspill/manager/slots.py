"""The table of values: what the manager keeps of each proxy besides the core's entry."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from sys import getrefcount
from typing import Any

from gpuspill.classes import ClassTable, attribute_of
from gpuspill.core.ledger import FEW_KEYS, Entry, Rare
from gpuspill.manager.knots import Knots
from gpuspill.manager.ports import Custody, Encoded
from gpuspill.storage.base import Receipt

__all__ = ["Restore", "Slot", "Slots"]

#: After so many refusals it is looked into who holds a value.
_PATIENCE = 3
#: After so many tries a value is evicted even so, if it may be referenced by itself alone.
_LAST_PATIENCE = 20
#: Then it is written so often, as long as it is another one after each write than before.
_WRITTEN_IN_VAIN = 5


class Restore(Future[Any]):
    """A restore, or a decoding, that was begun: what those who want the value wait for.

    It is done by the first thread that claims it, be that a restore thread for which it is in line
    or one that needs the value and would have to wait. Guarded by the metadata lock.

    Attributes
    ----------
    reader
        Identifier of the thread that has claimed it.
    urgency
        On whose behalf it is in line; a lower number is sooner. None while it is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader: int | None = None
        self.urgency: int | None = None

    def claim(self) -> bool:
        """Whether the caller, who is the first to ask, has to do it."""
        if self.reader is not None:
            return False
        self.reader = threading.get_ident()
        return True


class Slot(Entry):
    """One value, wherever it is: what the core keeps of it, and what the manager does.

    Attributes
    ----------
    value
        The value while it is in memory, else None. An :class:`~gpuspill.manager.ports.Encoded` that
        has not been needed yet is in memory too, but has to be decoded before it can be handed out.
    sizeof
        Its size as the caller gave it, in bytes, uncorrected; negative until it has entered.
    device_nbytes
        Bytes that a value which came as bytes will take on a device, while it is not decoded.
    receipt
        Its record, if there is one.
    restoring
        The restore or decoding in flight: single flight.
    ghost, ghost_id
        Gives a value that was evicted while it was referenced, as long as it is alive, and its
        identity.
    found_held
        How often it was found held when it should have been evicted.
    fixed
        Whether it is not changed by values that look at the same memory, only by the array itself.
    knots
        References to it that come from inside it, as far as that was looked into; None if it was
        not.
    loss
        Why it is lost, if it is.
    """

    __slots__ = ("receipt", "sizeof", "value")

    device_nbytes = Rare(0)
    fixed = Rare(False)
    found_held = Rare(0)
    ghost = Rare[Callable[[], Any] | None](None)
    ghost_id = Rare(0)
    knots = Rare[Knots | None](None)
    loss = Rare[str | None](None)
    restoring = Rare[Restore | None](None)

    def __init__(self, pid: int, nbytes: int) -> None:
        super().__init__(pid, nbytes)
        self.value: Any = None
        self.sizeof = -1
        self.receipt: Receipt | None = None

    @property
    def kind(self) -> type:
        """The type of its value, which has to be in memory."""
        return type(self.value)


class Slots(dict[int, Slot]):
    """Slots by proxy, and proxies by the identity of values. Guarded by the metadata lock.

    It is the core's table of entries, too: there is one a value.

    Parameters
    ----------
    custody
        Says which values are held, if references to them do not.

    Attributes
    ----------
    undecoded
        Number of values in memory that came as bytes and are not decoded.
    in_use
        ``in_use(keys)`` tells whether a running task has the value of one of these keys in hand;
        None if that is not known. Called with the metadata lock held, from any thread: must be
        fast, take no lock and not raise.
    by_id
        Proxies by the identity of their values.
    doubtful
        Proxies that look held for ever. A look has to tell outside references from those of a value
        to itself.
    looped_nbytes
        Bytes of values that were evicted although something refers to them. Only a collection lets
        go of what refers to itself. The caller that runs a collection resets it.
    """

    def __init__(self, custody: Custody | None = None) -> None:
        super().__init__()
        self._custody = custody
        self.undecoded = 0
        self.in_use: Callable[[Collection[Hashable]], bool] | None = None
        self.by_id: dict[int, int] = {}
        self.doubtful: dict[int, None] = {}
        self.looped_nbytes = 0
        self._looping: ClassTable[bool] = ClassTable()
        self._ghosts: dict[int, int] = {}
        # What CPython reports for a value to which only its slot refers; measured, because it
        # differs between releases.
        slot = Slot(0, 0)
        slot.value = object()
        self._unheld = getrefcount(slot.value)

    def enter(self, entry: Entry, key: Hashable, value: object, nbytes: int) -> None:
        """Put a new value of `nbytes` bytes in its slot, which the core has made."""
        assert type(entry) is Slot
        entry.key, entry.value, entry.sizeof = key, value, nbytes
        if type(value) is Encoded:
            entry.device_nbytes = value.device_nbytes
            self.undecoded += 1
        self.by_id[id(value)] = entry.pid

    def enter_below(self, entry: Entry, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """The same for a value of `nbytes` bytes that is on disk already."""
        assert type(entry) is Slot
        entry.key, entry.sizeof, entry.receipt = key, nbytes, receipt

    def ready(self, pid: int) -> bool:
        """Whether the value, given that it is in memory, can be handed out at once."""
        slot = self.get(pid)
        return slot is not None and type(slot.value) is not Encoded and slot.sizeof >= 0

    def find(self, value: object) -> int | None:
        """Return the proxy of an object that is in memory, or was evicted while referenced."""
        pid = self.by_id.get(id(value))
        if pid is None:
            pid = self._ghosts.get(id(value))
            if pid is not None:
                ghost = self[pid].ghost
                if ghost is None or ghost() is not value:  # that one has died, its address was used again
                    return None
        return pid

    def forget_ghost(self, slot: Slot) -> None:
        """The value is in memory again, or the proxy exists no longer."""
        if slot.ghost is not None:
            if self._ghosts.get(slot.ghost_id) == slot.pid:
                del self._ghosts[slot.ghost_id]
            slot.ghost, slot.ghost_id = None, 0

    def attach(self, pid: int, value: object) -> None:
        """Put a value that was restored or decoded in its slot."""
        slot = self[pid]
        self._unlist(pid, slot.value)
        self.forget_ghost(slot)
        self.undecoded += (type(value) is Encoded) - (type(slot.value) is Encoded)
        slot.device_nbytes = 0
        slot.value, slot.restoring = value, None
        self.trust(slot)
        self.by_id[id(value)] = pid

    def detach(self, slot: Slot) -> object:
        """Take the value out of its slot, which may be that of a proxy that exists no longer."""
        pid = slot.pid
        if self._custody is not None:
            slot.ghost = self._custody.leave(slot.value)
        # Not of bytes: a reader would be given them in the place of the value.
        kept = self._custody is None and slot.found_held and pid in self and type(slot.value) is not Encoded
        if kept and _weakly_referable(slot.value):
            slot.ghost, slot.ghost_id = weakref.ref(slot.value), id(slot.value)
            self._ghosts[slot.ghost_id] = pid
        if slot.found_held and pid in self and getrefcount(slot.value) > self._unheld:
            self.looped_nbytes += slot.nbytes
        self._unlist(pid, slot.value)
        value, slot.value = slot.value, None
        self.undecoded -= type(value) is Encoded
        return value

    def _unlist(self, pid: int, value: object) -> None:
        # Reading a record can yield an object that another proxy holds already: None, True, a small
        # number, an interned string. The last one to come is listed; the other just cannot be found
        # by identity.
        if self.by_id.get(id(value)) == pid:
            del self.by_id[id(value)]

    def held(self, pid: int) -> bool:
        """Whether something else refers to a value, so that evicting it would free nothing.

        Works for every type, also those that cannot be weakly referenced, and for views: they refer
        to what they view. A value that refers to itself looks held for ever. So after a few
        refusals it is looked into who holds it. Where that cannot be told for sure it is evicted in
        the end, though not as long as a running task has it in hand.
        """
        slot = self[pid]
        if slot.sizeof < 0:
            return False
        if self._custody is not None:
            return self._custody.held(slot.value)
        inside = 0 if slot.knots is None else slot.knots.references
        if getrefcount(slot.value) <= self._unheld + inside:
            return (self.shares(slot) or inside > 0) and self.in_hand(slot)
        if slot.found_held >= _PATIENCE and self.in_hand(slot):
            return True
        slot.found_held += 1
        if slot.found_held <= _PATIENCE and slot.kind not in self._looping:
            return True
        if slot.knots is None:
            self.doubtful[pid] = None
            return True
        return slot.knots.sure or slot.found_held <= _LAST_PATIENCE

    @staticmethod
    def trust(slot: Slot) -> None:
        """Start afresh: a caller has the value, so earlier findings about references are void."""
        slot.found_held, slot.knots = 0, None

    def take_doubtful(self) -> list[tuple[int, object]]:
        """Return proxies that look held for ever, and their values, to be examined unlocked."""
        found = [(pid, self[pid].value) for pid in self.doubtful if pid in self]
        self.doubtful.clear()
        return found

    def untie(self, pid: int, value: object, found: Knots) -> None:
        """Note what was found of references to a value from inside it, if it is still there."""
        slot = self.get(pid)
        if slot is not None and slot.value is value:
            slot.knots = found
            if found.references:
                self._looping[slot.kind] = True

    @staticmethod
    def perhaps_held(slot: Slot) -> bool:
        """Whether a value that was let go may still be referenced, by code that may change it."""
        return _LAST_PATIENCE < slot.found_held <= _LAST_PATIENCE + _WRITTEN_IN_VAIN

    @property
    def elsewhere(self) -> bool:
        """Whether the values stand for memory elsewhere."""
        return self._custody is not None

    def in_hand(self, slot: Slot) -> bool:
        """Whether a running task has a value in hand, or one that shares memory with it."""
        in_use = self.in_use
        if in_use is None:
            return False
        # What has more keys is None, a number or a string, which do not change.
        return any(
            len(each.keys) <= FEW_KEYS and in_use(each.keys) for each in (slot, *map(self.__getitem__, slot.parts))
        )

    def shares(self, slot: Slot) -> bool:
        """Whether other values share memory with a value and can change it by that."""
        return any(part.keys or (part.owners > 1 and not slot.fixed) for part in map(self.__getitem__, slot.parts))


def _weakly_referable(value: object) -> bool:
    return bool(attribute_of(type(value), "__weakrefoffset__"))
