"""What serialising a value teaches about its size.

``sizeof`` can be far off: 8 kB for a frame that holds 10 MB of strings, 56 bytes for an object with
an 8 MB attribute. A value that is taken for small is never evicted and memory runs over. When a
value is serialised its bytes are counted anyway; if they are many more than was charged, the charge
is corrected, and the next values of the same type are charged accordingly from the start. If that
was too much for one of them, its charge is corrected when it is serialised in turn.

A list, a tuple or a dictionary says nothing about the next one: from them nothing is learned for
others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuspill.classes import ClassTable, identities
from gpuspill.errors import contained

__all__ = ["UNKNOWN_NBYTES", "SizeModel", "as_nbytes"]

#: Bytes that no value takes. A size beyond says no more than none, and sums of such sizes would not
#: fit in messages.
_ABSURD = 1 << 48
#: Charged for a value whose size cannot be told: what dask assumes of one whose ``sizeof`` fails.
UNKNOWN_NBYTES = 1_000_000


def as_nbytes(size: object) -> int:
    """Return a size in bytes that a library or a user gave, as a whole number.

    ``sizeof`` may be a user's function. It may return a NumPy scalar (``-1 * size`` of an unsigned
    one overflows), a boolean, NaN, a negative number, or nothing. An answer that is no number
    becomes `UNKNOWN_NBYTES`. Raises nothing but KeyboardInterrupt.
    """
    if type(size) is int:
        nbytes = size
    else:
        nbytes = -1
        with contained:
            nbytes = int(size)  # type: ignore[call-overload]
    return nbytes if 0 <= nbytes < _ABSURD else UNKNOWN_NBYTES


#: What is in one of these has nothing to do with what is in another.
_CONTAINERS = identities(tuple, list, dict, set, frozenset)


@dataclass(slots=True)
class _Observed:
    factor: float
    largest: float


@dataclass(slots=True)
class SizeModel:
    """Learned corrections, one a type.

    Parameters
    ----------
    tolerance
        Serialised bytes / charged bytes above which the charge is held to be wrong. Serialised
        forms are often a little larger than the object (headers) and often much smaller (packed
        integers), so only a clear excess teaches anything.
    weight
        Weight of the newest observation in the moving averages.
    minimum
        Serialised bytes below which nothing is learned: small values are never the problem.
    """

    tolerance: float = 1.5
    weight: float = 0.5
    minimum: int = 4096
    _observed: ClassTable[_Observed] = field(default_factory=ClassTable)

    def estimate(self, kind: type, nbytes: int) -> int:
        """Bytes to charge for a value of type `kind` whose ``sizeof`` is `nbytes`.

        Scaled by the learned factor, but never beyond what was really seen for the type: a type
        with some hidden and some well-sized values must not be charged in terabytes.
        """
        seen = self._observed.get(kind)
        if seen is None:
            return nbytes
        return max(nbytes, int(min(nbytes * seen.factor, seen.largest)))

    def learn(self, kind: type, nbytes: int, serialized: int) -> int:
        """Compare ``sizeof`` with the serialised size.

        Parameters
        ----------
        kind
            Type of the value.
        nbytes
            What ``sizeof`` said, uncorrected, in bytes.
        serialized
            Bytes of the serialised value before compression.

        Returns
        -------
        int
            The bytes to charge: those, or what ``sizeof`` said if that was about right.
        """
        wrong = serialized > self.minimum and serialized > self.tolerance * max(nbytes, 1)
        seen = self._observed.get(kind)
        if id(kind) not in _CONTAINERS and (wrong or seen is not None):
            factor = max(1.0, serialized / max(nbytes, 1))
            if seen is None:
                self._observed[kind] = _Observed(factor, serialized)
            else:
                seen.factor += self.weight * (factor - seen.factor)
                seen.largest = max(serialized, seen.largest + self.weight * (serialized - seen.largest))
        return serialized if wrong else nbytes
