"""A stand-in for NVIDIA's driver: real libraries for CUDA run on it in host memory, without a GPU.

``libcuda.c``, beside this file, says what it models. It is built by the system's compiler when it
is asked for, and loaded before any library that looks for ``libcuda.so.1``: these find it by that
name. It moves memory and runs no kernels; CUDA's runtime library, which asks the driver for tables
that are not documented, does not work on it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["CannotBuild", "StandIn", "build", "load"]

_SOURCE: Final = Path(__file__).with_name("libcuda.c")
#: What libraries look for; the stand-in says that this is its name.
_NAME: Final = "libcuda.so.1"
_FLAGS: Final = ("-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", f"-Wl,-soname,{_NAME}")


class CannotBuild(RuntimeError):
    """There is no compiler here, or no header; the message says what is missing."""


def _header() -> Path:
    """Return the directory of ``cuda.h``: of the runtime's wheel, or a toolkit."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    spec = importlib.util.find_spec("nvidia")
    for package in (spec.submodule_search_locations if spec else None) or ():
        places += [Path(package) / part / "include" for part in ("cu13", "cuda_runtime")]
    for place in places:
        if (place / "cuda.h").exists():
            return place
    raise CannotBuild("cuda.h is not installed (it comes with nvidia-cuda-runtime, or nvidia-cuda-runtime-cu12)")


def build(directory: str | os.PathLike[str]) -> Path:
    """Build the stand-in in a directory; return the library's path.

    Raises
    ------
    CannotBuild
        There is no compiler, or no header, or it does not compile.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CannotBuild("there is no C compiler (cc, gcc or clang) on this machine")
    target = Path(directory) / _NAME
    made = subprocess.run(
        [compiler, *_FLAGS, "-I", _header(), _SOURCE, "-o", target, "-lpthread", "-ldl"],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise CannotBuild(f"{compiler} does not compile the stand-in: {made.stderr}")
    return target


def load(path: str | os.PathLike[str]) -> StandIn:
    """Load the stand-in into this process, before libraries; return its control.

    Parameters
    ----------
    path
        What :func:`build` returned. Other processes find it with the directory in
        ``LD_LIBRARY_PATH``.

    Raises
    ------
    RuntimeError
        Another library of this name was loaded before.
    """
    library = ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(ctypes.CDLL(_NAME), "standin_count"):
        raise RuntimeError(f"another {_NAME} was loaded into this process before the stand-in")
    return StandIn(library)


class StandIn:
    """Controls the stand-in of this process.

    Parameters
    ----------
    library
        The library. Its environment variables are read at the first call: ``STANDIN_MEMORY`` (bytes
        of a device), ``STANDIN_DEVICES``, ``STANDIN_VERSION`` (of the driver: 13000),
        ``STANDIN_POOLS`` (0: no stream-ordered allocator), ``STANDIN_INTEGRATED``.

    Notes
    -----
    Thread-safe.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_count.restype = ctypes.c_long
        library.standin_count.argtypes = [ctypes.c_char_p]
        library.standin_text.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]
        library.standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        library.standin_speed.argtypes = [ctypes.c_long, ctypes.c_double]

    def count(self, what: str) -> int:
        """Return a count, such as ``live_bytes`` or ``waits``, or calls of a function.

        0 for a function that was never called.
        """
        return max(0, int(self._library.standin_count(what.encode())))

    @property
    def violation(self) -> str:
        """The first use of memory that was not allowed; empty if there was none."""
        return self._text("violation", 256)

    def fail(self, function: str, result: int, *, skip: int = 0, times: int = 1) -> None:
        """Let calls of a driver's function fail.

        Parameters
        ----------
        function
            Its name in the library (``cuMemAlloc_v2``); ``copy`` lets the doing of a copy fail, and
            the device with it.
        result
            The ``CUresult``.
        skip
            Calls that succeed before.
        times
            Calls that fail; below zero: all.
        """
        self._library.standin_fail(function.encode(), int(result), skip, times)

    def speed(self, *, latency: float = 1e-4, bandwidth: float = 0.0) -> None:
        """Set how late work is done, seconds, and a copy's bytes/s (0: no limit)."""
        self._library.standin_speed(int(latency * 1e9), bandwidth)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do only what a thread waits for, for the length of the block."""
        self._library.standin_hold(1)
        try:
            yield
        finally:
            self._library.standin_hold(0)

    @contextmanager
    def marking(self) -> Iterator[list[str]]:
        """Record which functions this thread calls; the list is filled at the end."""
        names: list[str] = []
        self._library.standin_mark(1)
        try:
            yield names
        finally:
            self._library.standin_mark(0)
            names += self._text("marked", 2**20).split()

    def reset(self) -> None:
        """Wait for all work and forget errors and faults. For the time between two tests."""
        self._library.standin_reset()

    def _text(self, what: str, nbytes: int) -> str:
        buffer = ctypes.create_string_buffer(nbytes)
        self._library.standin_text(what.encode(), buffer, nbytes)
        return buffer.value.decode()
