"""One walk over a value: what is inside lists, tuples, dictionaries and dataclasses is replaced.

What is looked into: lists, tuples and dictionaries (their values), their subclasses (named tuples,
ordered and default dictionaries), and instances of dataclasses (their fields), frozen and slotted
ones included. Everything else is offered to the one who replaces and otherwise left alone: sets
too, since what is in them has been hashed.

Most values have nothing that is of interest, and some have a great many parts. So :func:`kinds`
looks at types only, a level at a time, and :func:`replace` looks at the rest one by one.

A container is rebuilt only if something below it was replaced, and keeps its type. What shares a
container before shares one afterwards, and a value may contain itself. The depth does not matter:
nothing here recurses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any, Final

from gpuspill.classes import attribute_of, identities, named

__all__ = ["is_container", "kinds", "replace"]

#: Never of interest, and most of what large lists consist of.
_PLAIN: Final = identities(bool, bytearray, bytes, complex, float, int, str, type(None))
_MISSING: Final = object()
#: What the decorator ``dataclass`` leaves in a class: its fields, by name.
_FIELDS: Final = "__dataclass_fields__"


#: How to get at the parts of the containers that most values are made of, without a step of
#: Python's for each.
_FAST: Final[dict[int, Callable[[Any], Iterable[Any]]]] = {
    id(list): list.__iter__,
    id(tuple): tuple.__iter__,
    id(dict): dict.values,
}


def kinds(value: Any) -> dict[int, type]:
    """Return the types in a value, by identity, but for containers and plain scalars.

    Parameters
    ----------
    value
        Anything. It is looked into as :func:`replace` does.

    Notes
    -----
    Runs no code of the value's types but that of dataclasses' attributes. Takes some hundredths of
    a microsecond for a part that is no container.
    """
    found: dict[int, type] = {}
    seen: set[int] = set()
    made: list[list[Any]] = []  # some containers make their parts when asked; identities are of what is alive
    level = [value]
    while level:
        inside: list[Any] = []
        idents = set(map(id, map(type, level)))
        for ident in idents:
            if ident in _PLAIN or ident in found:
                continue
            first = next(part for part in level if id(type(part)) == ident)
            if ident not in _FAST and not is_container(first):
                found[ident] = type(first)
                continue
            same = level if len(idents) == 1 else [part for part in level if id(type(part)) == ident]
            # Each once: what is shared, or contains itself, would be looked into without end.
            new = set(map(id, same))
            if len(new) < len(same) or not seen.isdisjoint(new):
                same = list({id(part): part for part in same if id(part) not in seen}.values())
            # The smaller one into the larger: a value may be deep, or wide.
            small, seen = (new, seen) if len(new) < len(seen) else (seen, new)
            seen |= small
            parts = _FAST.get(ident)
            if parts is not None:
                inside += chain.from_iterable(map(parts, same))
            else:
                inside += [part for container in same for _, part in _parts(container)]
                made.append(inside)
        level = inside
    return found


def replace(value: Any, replacement: Callable[[Any], Any], boring: Container[int] = ()) -> Any:
    """Return `value` with everything replaced that `replace` replaces; else itself.

    Parameters
    ----------
    value
        Anything. It is not changed.
    replacement
        ``replacement(item)`` is called once for each object in it that is neither a container nor a
        plain scalar, and returns the object itself, to leave it alone, or what takes its place.
    boring
        Identities of types whose objects are never offered; of those that :func:`kinds` returned
        for this value.

    Raises
    ------
    TypeError
        A container that would have to be rebuilt cannot be: its type does not let itself be copied.
    """
    if not is_container(value):
        return value if id(type(value)) in _PLAIN or id(type(value)) in boring else replacement(value)
    found = _Findings(value, replacement, boring)
    return found.rebuild(value) if found.replaced else value


def is_container(item: Any) -> bool:
    """Whether an object is looked into."""
    # By the type and not by what the object says of itself: stand-ins for containers, such as
    # mocks, are none.
    cls = type(item)
    return issubclass(cls, list | tuple | dict) or attribute_of(cls, _FIELDS) is not None


def _parts(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where each part is, and the part."""
    # By the types' own methods: a subclass may show something else.
    cls = type(container)
    if issubclass(cls, list):
        yield from enumerate(list.__iter__(container))
    elif issubclass(cls, tuple):
        yield from enumerate(tuple.__iter__(container))
    elif issubclass(cls, dict):
        yield from dict.items(container)
    else:
        for field in dataclasses.fields(cls):
            part = getattr(container, field.name, _MISSING)
            if part is not _MISSING:
                yield field.name, part


class _Findings:
    """What is in a value: containers, what is replaced, and which are rebuilt."""

    def __init__(self, root: Any, replacement: Callable[[Any], Any], boring: Container[int]) -> None:
        # By identity; the objects are kept alive with it, since some containers make their parts
        # when asked.
        self.items: dict[int, Any] = {id(root): root}
        self.replaced: dict[int, Any] = {}
        self.new: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = {}
        seen_leaves: dict[int, Any] = {}
        stack = [root]
        while stack:
            container = stack.pop()
            for _, part in _parts(container):
                kind = id(type(part))
                if kind in _PLAIN or kind in boring:
                    continue
                ident = id(part)
                if ident in self.items:
                    self._parents.setdefault(ident, []).append(id(container))
                elif is_container(part):
                    self.items[ident] = part
                    self._parents[ident] = [id(container)]
                    stack.append(part)
                else:
                    if ident not in seen_leaves:
                        seen_leaves[ident] = part
                        new = replacement(part)
                        if new is not part:
                            self.replaced[ident] = new
                    if ident in self.replaced:
                        self._parents.setdefault(ident, []).append(id(container))
        self._leaves = seen_leaves

    def _changed(self) -> dict[int, Any]:
        """Return the containers with something replaced below them."""
        changed: dict[int, Any] = {}
        stack = list(self.replaced)
        while stack:
            for parent in self._parents.get(stack.pop(), ()):
                if parent not in changed:
                    changed[parent] = self.items[parent]
                    stack.append(parent)
        return changed

    def rebuild(self, root: Any) -> Any:
        """Return the root anew.

        What can be changed is copied first and filled last, so a value that contains itself is no
        problem: every circle goes through something that can be changed. Tuples are made in
        between, those inside of others first.
        """
        changed = self._changed()
        self.new.update(self.replaced)
        tuples: list[int] = []
        for ident, container in changed.items():
            if issubclass(type(container), tuple):
                tuples.append(ident)
            else:
                shell = copy.copy(container)
                if type(shell) is not type(container) or shell is container:
                    raise TypeError(f"a copy of {named(type(container))} is no new {named(type(container))}")
                self.new[ident] = shell
        while tuples:
            ident = tuples[-1]
            if ident in self.new:
                tuples.pop()
                continue
            container = changed[ident]
            first = [id(part) for _, part in _parts(container) if id(part) in changed and id(part) not in self.new]
            if first:
                tuples.extend(first)
                continue
            tuples.pop()
            self.new[ident] = self._tuple(container)
        for ident, container in changed.items():
            if not issubclass(type(container), tuple):
                self._fill(container, self.new[ident])
        return self.new[id(root)]

    def _tuple(self, container: tuple[Any, ...]) -> tuple[Any, ...]:
        cls = type(container)
        # Not by calling the class: named tuples take their parts one by one, and others whatever
        # they like.
        made: tuple[Any, ...] = tuple.__new__(cls, [self.new.get(id(part), part) for part in tuple.__iter__(container)])
        if hasattr(container, "__dict__"):
            vars(made).update(vars(container))
        return made

    def _fill(self, container: Any, shell: Any) -> None:
        for place, part in _parts(container):
            new = self.new.get(id(part), part)
            if new is part:
                continue
            if issubclass(type(shell), list):
                list.__setitem__(shell, place, new)
            elif issubclass(type(shell), dict):
                dict.__setitem__(shell, place, new)
            else:
                object.__setattr__(shell, place, new)  # also if it is frozen
