"""Which host memory a value keeps alive, by NumPy's public API.

A view keeps all of the array alive that it looks at. So does a container with what is in it, and others may have that
as well. Memory is told by the array at the end of the chain of views: an object, which is alive as long as a view is.

What is not told: arrays on memory of something else than an array (bytes, a mapped file, a data frame's blocks), of
subclasses, and of types that hold objects or records. They are charged for what they show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpuspill.classes import identities

__all__ = ["SharedMemory", "shared_memory"]

#: Arrays that keep less alive are not looked after one by one.
SMALL_NBYTES: Final = 4096
#: How many objects in a container are looked at; in larger ones nothing is. It bounds the time that storing takes.
_MANY: Final = 64
_CONTAINERS: Final = identities(list, tuple, dict)


class SharedMemory(NamedTuple):
    """What a value keeps alive.

    Attributes
    ----------
    owners
        The arrays whose memory it is, each once, and their sizes in bytes.
    covered
        Bytes of the value that lie in them, as its size counts them: an array that is in it twice, twice.
    """

    owners: list[tuple[Any, int]]
    covered: int


def shared_memory(value: Any, minimum: int = SMALL_NBYTES) -> SharedMemory | None:
    """Return the memory that a value keeps alive and others may, too; None if it is simply its own.

    Parameters
    ----------
    value
        Anything.
    minimum
        Bytes; smaller memory is not told.

    Notes
    -----
    Never raises, runs no code of the value's, and takes a few microseconds at most, next to nothing for what is neither
    an array nor a list, tuple or dictionary.
    """
    kind = type(value)
    if id(kind) in _CONTAINERS:
        return _in_container(value, minimum) if value else None
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or kind is not getattr(numpy, "ndarray", None):
        return None
    if value.base is None:
        return None
    owner = _owner(value, kind)
    if owner is value or owner.nbytes < minimum or not _plain(value) or not _plain(owner):
        return None
    return SharedMemory([(owner, owner.nbytes)], value.nbytes)


def _plain(array: Any) -> bool:
    dtype = array.dtype
    return not dtype.hasobject and dtype.names is None


def _owner(array: Any, ndarray: type) -> Any:
    while type(array.base) is ndarray:
        array = array.base
    return array


def _in_container(value: Any, minimum: int) -> SharedMemory | None:
    numpy: Any = sys.modules.get("numpy")
    ndarray = getattr(numpy, "ndarray", None)
    if ndarray is None or len(value) > _MANY:
        return None
    owners: dict[int, tuple[Any, int]] = {}
    covered = 0
    for item in _leaves(value):
        if type(item) is not ndarray or not _plain(item):
            continue
        owner = _owner(item, ndarray)
        if owner.nbytes >= minimum and _plain(owner):
            owners[id(owner)] = owner, owner.nbytes
            covered += item.nbytes
    return SharedMemory(list(owners.values()), covered) if owners else None


def _leaves(value: Any) -> Iterator[Any]:
    left = _MANY
    stack = [value]
    seen = {id(value)}
    while stack:
        container = stack.pop()
        for item in container.values() if type(container) is dict else container:
            left -= 1
            if left < 0:
                return
            if id(type(item)) not in _CONTAINERS:
                yield item
            elif id(item) not in seen:
                seen.add(id(item))
                stack.append(item)
