"""Questions about classes that no code of the class answers.

A metaclass may define ``__eq__``, ``__hash__``, ``__getattribute__`` and more: ``Class == x``
builds an expression in some libraries, which leaves the class without a hash. So ``type(x) in
(list, tuple)``, a dictionary keyed by classes, ``getattr(type(x), name)`` and, by ``x.__class__``,
``isinstance(x, list)`` run code of others, which may raise, lie or take its time. Values come from
users; what is asked here works for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

__all__ = ["ClassTable", "attribute_of", "identities", "is_instance", "is_plain", "named"]

_T = TypeVar("_T")

#: How Python itself reads what every class has.
_OF_TYPE: Final = type.__dict__
#: What a metaclass must leave as it is for others to use its classes as keys and to read their
#: attributes.
_ASKED: Final = {name: getattr(type, name) for name in ("__eq__", "__hash__", "__getattribute__")}


def identities(*classes: type) -> frozenset[int]:
    """Return the identities of classes that live as long as the program."""
    return frozenset(map(id, classes))


def is_instance(value: object, *classes: type) -> bool:
    """Whether `value` really is an instance of one of `classes`, whatever it says of itself."""
    cls = type(value)
    return any(type.__subclasscheck__(wanted, cls) for wanted in classes)


def is_plain(cls: type) -> bool:
    """Whether a class can be compared, hashed and inspected without its metaclass's code."""
    meta = type(cls)
    if meta is type:
        return True
    return all(type.__getattribute__(meta, name) is known for name, known in _ASKED.items())


def attribute_of(cls: type, name: str, default: Any = None) -> Any:
    """Return an attribute of a class as defined there, past what its metaclass makes up."""
    if type(cls) is type:
        return getattr(cls, name, default)
    if name in _OF_TYPE:
        return _OF_TYPE[name].__get__(cls)
    for base in _OF_TYPE["__mro__"].__get__(cls):
        members = _OF_TYPE["__dict__"].__get__(base)
        if name in members:
            return members[name]
    return default


def named(cls: type) -> str:
    """Return module and qualified name of a class."""
    return f"{attribute_of(cls, '__module__')}.{attribute_of(cls, '__qualname__')}"


class ClassTable(Generic[_T]):
    """Something by class, told by identity. Keeps no class alive, and forgets those that are gone.

    Notes
    -----
    Thread-safe: each operation is one that Python makes atomic. May be used in a finaliser.
    """

    __slots__ = ("__weakref__", "_entries")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[type], _T]] = {}

    def get(self, cls: type, default: _T | None = None) -> _T | None:
        """Return what is noted for `cls`, or `default`."""
        entry = self._entries.get(id(cls))
        return default if entry is None else entry[1]

    def __setitem__(self, cls: type, noted: _T) -> None:
        ident = id(cls)
        self._entries[ident] = weakref.ref(cls, _forgetting(weakref.ref(self), ident)), noted

    def __contains__(self, cls: type) -> bool:
        return id(cls) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, ident: int) -> None:
        """Forget the class of an identity, before its memory can be used for another one."""
        self._entries.pop(ident, None)


def _forgetting(table: weakref.ref[ClassTable[Any]], ident: int) -> Callable[[object], None]:
    # By a weak reference: a table goes with its owner, not with the next garbage collection.
    def forget(_: object) -> None:
        found = table()
        if found is not None:
            found.forget(ident)

    return forget
