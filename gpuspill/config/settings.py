"""Every option of gpuspill: its name, default, unit, meaning and parser.

An option comes from a keyword (``gpuspill.data(host_limit="2 GiB")``), else from dask's
configuration (``gpuspill.host-limit`` in YAML, ``DASK_GPUSPILL__HOST_LIMIT`` in the environment),
else from the default below. ``None``, ``0`` and ``False`` all mean *no limit* for a limit and *off*
for a feature.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import dask.config
from dask.utils import parse_bytes, parse_timedelta

from gpuspill.errors import ConfigError

__all__ = ["CODECS", "Settings", "codec_names", "is_on", "simulated_options"]

#: The codecs there may be, by distributed's names, and the package that each needs beside Python.
CODECS: Mapping[str, str | None] = {"lz4": "lz4", "snappy": "python-snappy", "zlib": None, "zstd": "zstandard"}

#: Words, in any case, for no limit or for a feature that is off, and for one that is on.
_OFF = frozenset({"", "0", "0.0", "none", "false", "off", "no"})
_ON = frozenset({"1", "1.0", "true", "on", "yes"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective options of one store.

    Attributes
    ----------
    host_limit
        Bytes of values to keep in host memory. ``"auto"``: the worker's memory limit times
        ``distributed.worker.memory.target`` (or ``spill``, if only that is set). None: no limit.
    max_spill
        Bytes of records to keep on disk. ``"auto"``: ``distributed.worker.memory.max-spill``. None:
        no limit.
    spill_directory
        Parent of the spill directory. None: the worker's local directory.
    compression
        ``"auto"``: as ``distributed.worker.memory.spill-compression`` says. A codec's name, or None
        for no compression.
    spill_threads, restore_threads
        Threads that write and read in the background; a task's own thread reads its inputs itself.
    prefetch
        How many of the next tasks have their inputs read ahead. 0: none.
    admission
        Whether tasks and transfers wait until their inputs and outputs fit.
    clean_copies
        Keep the record of a restored value so that evicting it again needs no write. The value must
        then not be changed in place after it was stored, as dask demands of tasks anyway.
    buffer_pool
        Bytes of unused read buffers to keep for reuse.
    device
        Which device gets a tier of its own. ``"auto"``: a CUDA device if there is one, with the
        libraries for it. ``"cuda"``: the same, and it is an error if it cannot be. ``"simulated"``:
        that of :mod:`gpuspill.simulated`. None: none.
    device_memory_limit
        Bytes of values to keep on the device, or a fraction of its memory (``0.5``). ``"auto"``:
        0.8. None: no limit; values leave it when it is full.
    device_fence
        How computations on a device are waited for before a copy. ``"stream"``: its default stream,
        with all that wait for that, and the streams that arrays say they are used on. Copies go in
        both directions at the same time. ``"device"``: the whole device, with copies to it that are
        under way. That is for tasks that return, unfinished, what they compute on streams that do
        not wait for the default one (``cudaStreamNonBlocking``; so are PyTorch's other than its
        default one) and that arrays do not name.
    pinned_memory
        Bytes of host memory to pin at most for what has left the device, or a fraction of the host
        limit (``0.25``). Copies to pinned memory are done at the speed of the link. 0: none.
    gds
        Whether what leaves the device when host memory is full goes to disk by GPUDirect Storage
        (KvikIO), past host memory, and so past the checksum. None: it does not. ``"auto"``: where
        there is a driver. ``"on"``: the same, and it is an error if there is none.
    follow_process_memory
        Whether process memory that is not managed counts against the limit, as
        ``distributed.worker.memory.spill`` does.
    spill_timeout
        Seconds after which a task no longer waits for a spill that has not ended, as where a disk
        hangs. Closing the store waits as long for I/O. 0: no limit.
    storage_delay
        Seconds to add to every file operation: shows how a job behaves on a slow disk.
    store
        Where records go instead of files below the spill directory. A function, where to import it
        from (``"package.module:function"``), or its name among the entry points in
        ``gpuspill.stores``. It is called in the worker's process with the path of the spill
        directory, and returns a :class:`~gpuspill.storage.base.Store` or any ``MutableMapping[str,
        bytes]``, such as a ``zict.File`` or an ``fsspec.get_mapper("s3://...")``. None: files.
    eviction_policy
        In which order values leave memory. A subclass of
        :class:`~gpuspill.core.policy.EvictionPolicy` or a function that returns one, where to
        import it from, or its name among the entry points in ``gpuspill.policies``. It is called
        once for each tier of memory, with the table of values. None: by last use and next known use
        (:class:`~gpuspill.core.policy.NextUsePolicy`).
    """

    host_limit: int | Literal["auto"] | None = "auto"
    max_spill: int | Literal["auto"] | None = "auto"
    spill_directory: str | None = None
    compression: str | None = "auto"
    spill_threads: int = 2
    restore_threads: int = 2
    prefetch: int = 4
    admission: bool = True
    clean_copies: bool = True
    buffer_pool: int = 128 * 2**20
    device: str | None = "auto"
    device_memory_limit: int | float | Literal["auto"] | None = "auto"
    device_fence: Literal["device", "stream"] = "stream"
    pinned_memory: int | float = 0.25
    gds: str | None = None
    follow_process_memory: bool = True
    spill_timeout: float = 60.0
    storage_delay: float = 0.0
    store: Callable[[str], Any] | None = None
    eviction_policy: Callable[[Mapping[int, Any]], Any] | None = None

    @classmethod
    def load(cls, **options: object) -> Settings:
        """Combine keywords, dask's configuration and defaults.

        Parameters
        ----------
        **options
            As the attributes of this class, in any form that a configuration file may have (``"2
            GiB"``, ``"250 ms"``, ``"false"``).

        Raises
        ------
        ConfigError
            An option is unknown or its value cannot be used; the message names both. Those of the
            simulated device (``gpuspill.simulated``) are checked too.
        """
        configured = dask.config.get("gpuspill", None) or {}
        if not isinstance(configured, Mapping):
            raise ConfigError(f"gpuspill: expected a mapping of options, found {configured!r}")
        raw = {str(name).replace("-", "_"): value for name, value in configured.items()}
        simulated_options(
            raw.pop("simulated", None)
        )  # read by the device itself, see gpuspill.simulated.arrays.current
        raw.update(options)
        known = {field.name: field.default for field in fields(cls)}
        for name in raw:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"gpuspill.{name.replace('_', '-')}: no such option.{hint} There are: {', '.join(sorted(known))}."
                )
        return cls(**{name: _PARSERS[name](name, value) for name, value in raw.items()})


def _fail(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"gpuspill.{name.replace('_', '-')}: expected {expected}, found {value!r}")


def _number(value: object) -> bool:
    """Whether it is a number of any library; True is none."""
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def _word(value: object) -> str | None:
    """Return a text without blanks around it and in lower case; None for anything else."""
    return value.strip().lower() if isinstance(value, str) else None


def _off(value: Any) -> bool:
    return value is None or value is False or _word(value) in _OFF or (_number(value) and value == 0)


def _nbytes(name: str, value: Any) -> int | None:
    if _off(value):
        return None
    try:
        if isinstance(value, str):
            nbytes = int(parse_bytes(value))
            if nbytes == 0 and not set(value) & set("123456789"):
                return None  # "0 GiB"
        elif _number(value):
            nbytes = int(value)
        else:
            raise TypeError(value)
    except (ValueError, TypeError, OverflowError):
        raise _fail(name, value, "a size such as '2 GiB', or 0 or None for no limit") from None
    if nbytes < 1:
        # A fraction is most likely meant as one of all memory; taken as bytes it would be a limit
        # of 0.
        raise _fail(name, value, "a size of at least 1 byte such as '2 GiB', or 0 or None for no limit")
    return nbytes


def _limit(name: str, value: Any) -> int | Literal["auto"] | None:
    return "auto" if _word(value) == "auto" else _nbytes(name, value)


def _fence(name: str, value: Any) -> str:
    if _word(value) not in ("device", "stream"):
        raise _fail(name, value, "'device' or 'stream'")
    return str(_word(value))


def _pinned(name: str, value: Any) -> int | float:
    found = _device_limit(name, value)
    if found == "auto":
        raise _fail(name, value, "a size in bytes, a fraction of the host limit of at most 1, or 0 for none")
    return found or 0


def _device_limit(name: str, value: Any) -> int | float | Literal["auto"] | None:
    fraction = value if isinstance(value, float) else None
    if isinstance(value, str):
        try:
            fraction = float(value) if "." in value else None
        except ValueError:
            fraction = None  # a size with a unit
    if fraction is not None and 0 < fraction <= 1:
        return fraction
    if fraction is not None and not fraction.is_integer():
        raise _fail(name, value, "a size in bytes, or a fraction of at most 1")
    return _limit(name, value)


def _device(name: str, value: Any) -> str | None:
    if _off(value):
        return None
    if _word(value) not in ("auto", "cuda", "simulated"):
        raise _fail(name, value, "'auto', 'cuda', 'simulated', or None for no device")
    return str(_word(value))


def _gds(name: str, value: Any) -> str | None:
    if _word(value) == "auto":
        return "auto"
    on = is_on(value)
    if on is None:
        raise _fail(name, value, "'auto', true or false")
    return "on" if on else None


def _size(name: str, value: Any) -> int:
    return _nbytes(name, value) or 0


def _count(minimum: int) -> Any:
    def parse(name: str, value: Any) -> int:
        if minimum == 0 and _off(value):
            return 0
        try:
            count = int(value)
            good = (isinstance(value, str) or (_number(value) and count == value)) and count >= minimum
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good:
            raise _fail(name, value, f"a whole number of at least {minimum}")
        return count

    return parse


def is_on(value: object) -> bool | None:
    """Return what a configured value says of a feature; None if neither on nor off."""
    if _off(value):
        return False
    if value is True or _word(value) in _ON or (_number(value) and value == 1):
        return True
    return None


def _switch(name: str, value: Any) -> bool:
    on = is_on(value)
    if on is None:
        raise _fail(name, value, "true or false")
    return on


def codec_names() -> set[str]:
    """Return the names of codecs: of :data:`CODECS`, and those registered by distributed."""
    # It may not be imported: then nothing can be registered.
    registry = getattr(sys.modules.get("distributed.protocol.compression"), "compressions", {})
    return CODECS.keys() | {name for name in registry if isinstance(name, str) and name != "auto"}


def _codec(name: str, value: Any) -> str | None:
    if _off(value):
        return None
    word = _word(value)
    if word != "auto" and word not in codec_names():
        names = ", ".join(map(repr, sorted(codec_names())))
        raise _fail(name, value, f"'auto', one of {names}, or None for no compression")
    return word


def _directory(name: str, value: Any) -> str | None:
    if _off(value):
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise _fail(name, value, "a path")
    return os.path.expanduser(path)


def _seconds(name: str, value: Any) -> float:
    if _off(value):
        return 0.0
    try:
        if not (_number(value) or isinstance(value, str | timedelta)):
            raise TypeError(value)
        seconds = float(value) if _number(value) else float(parse_timedelta(value))
    except (ValueError, TypeError, KeyError, OverflowError):
        raise _fail(name, value, "a time such as '250 ms'") from None
    if not 0 <= seconds < math.inf:
        raise _fail(name, value, "a time that is neither negative nor infinite")
    return seconds


def _factory(group: str) -> Any:
    """Return a parser of functions; entry points of `group` are known by name."""

    def parse(name: str, value: Any) -> Callable[..., Any] | None:
        if _off(value):
            return None
        expected = "a function, or where to import it from such as 'package.module:function'"
        found = value
        if isinstance(value, str):
            word = value.strip()
            registered = {point.name: point for point in importlib.metadata.entry_points(group=group)}
            module, _, attribute = word.partition(":")
            if word not in registered and not (module and attribute):
                names = ", ".join(map(repr, sorted(registered))) or "none"
                raise _fail(name, value, f"{expected}, or the name of an entry point in {group!r} (installed: {names})")
            try:
                if word in registered:
                    found = registered[word].load()
                else:
                    found = getattr(importlib.import_module(module), attribute)
            except Exception as error:  # a module may raise anything
                option = name.replace("_", "-")
                raise ConfigError(
                    f"gpuspill.{option}: {value!r} cannot be imported: {type(error).__name__}: {error}"
                ) from error
        if not callable(found):
            raise _fail(name, value, expected)
        return found  # type: ignore[no-any-return]

    return parse


_PARSERS: Mapping[str, Any] = {
    "host_limit": _limit,
    "max_spill": _limit,
    "spill_directory": _directory,
    "compression": _codec,
    "spill_threads": _count(1),
    "restore_threads": _count(1),
    "prefetch": _count(0),
    "admission": _switch,
    "clean_copies": _switch,
    "buffer_pool": _size,
    "device": _device,
    "device_memory_limit": _device_limit,
    "device_fence": _fence,
    "pinned_memory": _pinned,
    "gds": _gds,
    "follow_process_memory": _switch,
    "spill_timeout": _seconds,
    "storage_delay": _seconds,
    "store": _factory("gpuspill.stores"),
    "eviction_policy": _factory("gpuspill.policies"),
}


# -- the simulated device ------------------------------------------------------------------------


def _memory(value: Any) -> int:
    nbytes = int(parse_bytes(value))
    if nbytes < 0:
        raise ValueError("expected a size such as '1 GiB'")
    return nbytes


def _bandwidth(value: Any) -> float | None:
    rate = None if value in (None, False, "", "none", "None") else float(parse_bytes(value))
    if rate is not None and not rate > 0:
        raise ValueError("expected bytes a second such as '10 GB', or None for no limit")
    return rate


def _latency(value: Any) -> float:
    seconds = float(parse_timedelta(value) or 0.0)
    if not seconds >= 0:
        raise ValueError("expected a time such as '1 ms'")
    return seconds


def _checks(value: Any) -> bool:
    found = str(value).lower()
    if found not in ("1", "true", "yes", "on", "0", "false", "no", "off", "none"):
        raise ValueError("expected true or false")
    return found in ("1", "true", "yes", "on")


_SIMULATED: Mapping[str, Any] = {
    "memory": _memory,
    "bandwidth": _bandwidth,
    "latency": _latency,
    "kernel_latency": _latency,
    "checks": _checks,
}


def simulated_options(options: object, where: str = "gpuspill.simulated.") -> dict[str, Any]:
    """Return the options of the simulated device in the form in which it takes them.

    Parameters
    ----------
    options
        As configured: a mapping, or None for none.
    where
        What stands before their names in messages.

    Raises
    ------
    ConfigError
        An option is unknown or its value cannot be used; the message names both.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where.rstrip('.')}: expected a mapping of options, found {options!r}")
    parsed = {}
    for name, value in options.items():
        known = str(name).replace("-", "_")
        if known not in _SIMULATED:
            close = difflib.get_close_matches(known, _SIMULATED, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}{name}: no such option.{hint} There are: {', '.join(sorted(_SIMULATED))}.")
        try:
            parsed[known] = _SIMULATED[known](value)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise ConfigError(f"{where}{name}: found {value!r}, which cannot be used: {error}") from None
    return parsed
