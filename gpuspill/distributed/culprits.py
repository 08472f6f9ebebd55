"""Which class or function of a value's cannot make it from its pickle."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from gpuspill.errors import cut_loose

__all__ = ["Named", "culprit_of"]

#: Module and qualified name of a class or a function, as pickles have them.
Named: TypeAlias = tuple[str, str]

#: Of Python's own two the one whose steps can be followed.
_Unpickler: Any = pickle._Unpickler


class _Tracing(_Unpickler):  # type: ignore[misc]
    """Python's own unpickler, which notes what it is about to call."""

    doing: Any = None

    def _note(self) -> None:
        self.doing = self.stack[-2] if len(self.stack) > 1 else None

    def load_reduce(self) -> None:
        self._note()
        super().load_reduce()

    def load_newobj(self) -> None:
        self._note()
        super().load_newobj()

    def load_build(self) -> None:
        self._note()
        self.doing = type(self.doing)
        super().load_build()

    dispatch = _Unpickler.dispatch | {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
    }


def culprit_of(frames: Sequence[Any]) -> Named | None:
    """Return which class or function fails in unpickling; None if that is unclear.

    Runs the code of the value's types once more. None for what belongs to Python or to a library
    through which any value goes: it is not to blame.
    """
    tracing = _Tracing(io.BytesIO(frames[0]), buffers=frames[1:])
    try:
        tracing.load()
    except Exception as error:
        cut_loose(error)
    else:
        return None
    found = tracing.doing
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    shared = module.partition(".")[0] in (*sys.stdlib_module_names, "numpy", "pandas", "pyarrow", "dask", "distributed")
    return None if shared else (module, name)
