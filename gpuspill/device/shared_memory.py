"""Which host memory a value keeps alive, by NumPy's public API.

A view keeps all of the array alive that it looks at. So does a container with what is in it, and
others may have that as well. Memory is told by the array at the end of the chain of views: an
object, which is alive as long as a view is.

A data frame of pandas is a container of such arrays, its blocks; so is a series.

What is not told: arrays on memory of something else than an array (bytes, a mapped file, Arrow's
strings), of subclasses, and of types that hold objects or records. They are charged for what they
show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpuspill.classes import identities

__all__ = ["SharedMemory", "blocks", "shared_memory"]

#: Arrays that keep less alive are not looked after one by one.
SMALL_NBYTES: Final = 4096
#: How many objects in a container are looked at, and how many blocks of a data frame; nothing is in
#: larger containers. It bounds the time that storing takes.
_MANY: Final = 64
_CONTAINERS: Final = identities(list, tuple, dict)


class SharedMemory(NamedTuple):
    """What a value keeps alive.

    Attributes
    ----------
    owners
        The arrays whose memory it is, each once, and their sizes in bytes.
    covered
        Bytes of the value that lie in them, as its size counts them: an array that is in it twice,
        twice.
    fixed
        Whether no other value that has them can change it: it consists of pandas' frames, which are
        copied on write.
    """

    owners: list[tuple[Any, int]]
    covered: int
    fixed: bool = False


def shared_memory(value: Any, minimum: int = SMALL_NBYTES) -> SharedMemory | None:
    """Return the memory that a value keeps alive and others may, too; None if it is simply its own.

    Parameters
    ----------
    minimum
        Bytes; smaller memory is not told.

    Notes
    -----
    Never raises, runs no code of the value's, and takes a few microseconds at most, next to nothing
    for what is neither an array, a data frame, nor a list, tuple or dictionary.
    """
    kind = type(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    ndarray = getattr(numpy, "ndarray", None)
    if kind is not ndarray:
        return _in_container(value, minimum, ndarray) if id(kind) in _CONTAINERS or _is_frame(kind) else None
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


def _is_frame(kind: type) -> bool:
    pandas: Any = sys.modules.get("pandas")
    if pandas is None:
        return False
    return kind is getattr(pandas, "DataFrame", None) or kind is getattr(pandas, "Series", None)


def blocks(frame: Any) -> list[Any]:
    """Return the arrays that a data frame or a series of pandas is made of, as they are.

    pandas has no public name for them: its methods copy where types differ, or take some
    microseconds a column.
    """
    try:
        return [getattr(array, "asi8", array) for array in frame._mgr.arrays]  # times are numbers
    except AttributeError:
        return []


def _in_container(value: Any, minimum: int, ndarray: Any) -> SharedMemory | None:
    if id(type(value)) in _CONTAINERS and len(value) > _MANY:
        return None
    owners: dict[int, tuple[Any, int]] = {}
    covered = 0
    only_frames = True
    for item, in_frame in _leaves(value):
        if type(item) is not ndarray or not _plain(item):
            continue
        owner = _owner(item, ndarray)
        if owner.nbytes >= minimum and _plain(owner):
            owners[id(owner)] = owner, owner.nbytes
            covered += item.nbytes
            only_frames = only_frames and in_frame
    if not owners:
        return None
    return SharedMemory(list(owners.values()), covered, fixed=only_frames and _copies_on_write())


def _copies_on_write() -> bool:
    """Whether changing a frame never changes another one, as since pandas 3."""
    pandas: Any = sys.modules.get("pandas")
    return int(getattr(pandas, "__version__", "0").partition(".")[0]) >= 3


def _leaves(value: Any) -> Iterator[tuple[Any, bool]]:
    """Yield what is in a container, or a frame, and whether a frame has it."""
    left = _MANY
    stack = [value]
    seen = {id(value)}
    while stack:
        container = stack.pop()
        kind = type(container)
        if id(kind) not in _CONTAINERS:
            yield from ((block, True) for block in blocks(container)[:_MANY])
            continue
        for item in container.values() if kind is dict else container:
            left -= 1
            if left < 0:
                return
            if id(type(item)) not in _CONTAINERS and not _is_frame(type(item)):
                yield item, False
            elif id(item) not in seen:
                seen.add(id(item))
                stack.append(item)
