"""``LocalCUDACluster``: dask-cuda's, with gpuspill; it runs without devices, too."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache, partial
from numbers import Integral
from typing import Any

from distributed import LocalCluster, Nanny, Worker

from gpuspill.config import Settings, is_on
from gpuspill.config.jit_unspill import SHARED_FILESYSTEM, answer_once, jit_unspill
from gpuspill.distributed.attach import data as spilling_data
from gpuspill.distributed.dask_cuda import bind, cluster_class, device_limit_option, switched_off, why_no_devices
from gpuspill.errors import ConfigError

__all__ = ["LocalCUDACluster"]

logger = logging.getLogger("gpuspill")

#: Keywords of dask-cuda's class that only make sense with a device, beside all whose names begin
#: with ``rmm_``.
_ABOUT_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "cudf_spill_stats",
        "enable_cudf_spill",
        "enable_infiniband",
        "enable_nvlink",
        "enable_rdmacm",
        "enable_tcp_over_ucx",
        "log_spilling",
        "pre_import",
    }
)


class LocalCUDACluster(LocalCluster):
    """A ``dask_cuda.LocalCUDACluster`` whose workers spill by gpuspill.

    Takes all that the class of the installed dask-cuda (26.06 or newer) takes, in its meaning; an
    instance is one of that class, too. On a machine without CUDA devices, or without dask-cuda, it
    is an ordinary ``LocalCluster`` with as many workers as ``n_workers`` says, else
    ``CUDA_VISIBLE_DEVICES``, else one; so a script runs where there are no devices. What is about
    devices is then ignored, and named in one message.

    Parameters
    ----------
    *args, **kwargs
        As of ``dask_cuda.LocalCUDACluster``.
    enable_jit_unspill, jit_unspill : bool, optional
        Two names of one switch. On: workers spill by gpuspill. Off: as stock dask-cuda does. By
        default what ``jit-unspill`` (``DASK_JIT_UNSPILL``) says in dask's configuration, else on.
    shared_filesystem : bool, optional
        Known from JIT-unspill; needs no answer here.

    Raises
    ------
    ConfigError
        The switch is no truth value or is said to be on and off; ``data=`` was given although it is
        on; or ``CUDA_VISIBLE_DEVICES`` is a number.
    TypeError
        A keyword is none of this class, dask-cuda's, ``LocalCluster`` or the workers'. (Not raised
        if a worker class of your own takes any.)
    ValueError
        ``n_workers`` is no number of workers; and whatever else dask-cuda's class raises it for.

    Notes
    -----
    ``device_memory_limit`` is handed to gpuspill: ``"default"`` leaves it to
    ``gpuspill.device-memory-limit`` (0.8 of the device), and ``"auto"``, 0 and None mean no limit,
    as in dask-cuda. All other options of gpuspill come from dask's configuration, see
    :class:`~gpuspill.config.Settings`. As any cluster, it is to be used and closed in one thread.

    Examples
    --------
    >>> cluster = gpuspill.LocalCUDACluster(device_memory_limit="20 GB", rmm_pool_size="30 GB")  # doctest: +SKIP
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> LocalCUDACluster:
        """Make an instance of dask-cuda's class as well, where that works."""
        stock = cluster_class()
        if stock is None or issubclass(cls, stock):
            return object.__new__(cls)
        own = {name: value for name, value in kwargs.items() if name not in _OWN}
        if why_no_devices(bind(stock, args, own).get("CUDA_VISIBLE_DEVICES")) is not None:
            return object.__new__(cls)
        both: type[LocalCUDACluster] = _with_devices(cls, stock)  # type: ignore[arg-type]  # hashable in fact
        return object.__new__(both)

    def __init__(
        self,
        *args: Any,
        enable_jit_unspill: bool | None = None,
        jit_unspill: bool | None = None,
        shared_filesystem: bool | None = None,
        **kwargs: Any,
    ) -> None:
        stock = cluster_class()
        with_devices = stock is not None and isinstance(self, stock)
        _refuse_unknown(kwargs, stock, with_devices, _by_name(stock, args, kwargs).get("worker_class"))
        on = _switched_on(enable_jit_unspill, jit_unspill)
        if on and kwargs.get("data") is not None:
            raise ConfigError("data= was given, so gpuspill cannot provide it: leave it out, or jit_unspill=False")
        if on and shared_filesystem:
            answer_once(f"shared_filesystem={shared_filesystem!r} changes nothing: {SHARED_FILESYSTEM}")
        given = _by_name(stock, args, kwargs)
        visible = given.get("CUDA_VISIBLE_DEVICES")
        if isinstance(visible, int) and visible != -1:
            raise ConfigError(
                "CUDA_VISIBLE_DEVICES: expected a list of devices, or their names separated by commas, "
                f"found {visible!r}: write '{visible}'"
            )
        if on:
            limit = device_limit_option(given.get("device_memory_limit", "default"))
            # By default what is configured counts, on each worker.
            options = {} if limit == "auto" else {"device_memory_limit": limit}
            kwargs["data"] = given["data"] = spilling_data(**options)
            if with_devices and switched_off():
                # dask-cuda would ask the device what most limits come to, for a store that it does
                # not make.
                given["device_memory_limit"] = 0
                args, kwargs = (), given
        if with_devices:
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            super().__init__(**_without_devices(given, on, stock))  # type: ignore[no-untyped-call]


#: What :class:`LocalCUDACluster` takes beyond dask-cuda's class.
_OWN = ("enable_jit_unspill", "jit_unspill", "shared_filesystem")


@lru_cache(maxsize=16)
def _with_devices(cls: Any, stock: Any) -> Any:
    """Return a class whose instances are of both; its ``super().__init__`` is dask-cuda's."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, stock), names)


def _refuse_unknown(keywords: Iterable[str], stock: type | None, with_devices: bool, worker_class: object) -> None:
    """Raise TypeError for a keyword that no class takes, as a worker would when it starts.

    Parameters
    ----------
    keywords
        Their names.
    stock
        dask-cuda's class, if there is one.
    with_devices
        Whether it makes the cluster. Else what is about devices is going to be ignored.
    """
    known = {*_OWN, *inspect.signature(LocalCluster.__init__).parameters}
    if not with_devices:
        known |= {*_ABOUT_DEVICES, "device_memory_limit"}
    for cls in (stock, Nanny, Worker, worker_class):
        taken = set() if cls is None else _taken(cls)
        if taken is None:
            return
        known |= taken
    for name in keywords:
        if name in known or (stock is None and name.startswith("rmm_")):  # only dask-cuda knows which there are
            continue
        close = difflib.get_close_matches(name, known - {"self"})
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        if name in {field.name for field in fields(Settings)}:
            option = f"gpuspill.{name.replace('_', '-')}"
            hint = f" It is an option of gpuspill, which the workers read from dask's configuration: {option}."
        raise TypeError(f"LocalCUDACluster got an unexpected keyword argument {name!r}.{hint}")


def _taken(cls: object) -> set[str] | None:
    """Return the keywords that a class takes and hands to its bases; None if unknown."""
    names: set[str] = set()
    if not isinstance(cls, type):
        return None
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names.update(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
        if base.__module__.partition(".")[0] not in ("distributed", "dask_cuda", "gpuspill"):
            return None  # it may take some itself
    return names


def _switched_on(enable_jit_unspill: object, jit_unspill_: object) -> bool:
    said = {}
    for name, value in (("enable_jit_unspill", enable_jit_unspill), ("jit_unspill", jit_unspill_)):
        if value is not None:
            said[name] = is_on(value)
            if said[name] is None:
                raise ConfigError(f"{name}: expected true or false, found {value!r}")
    if len(set(said.values())) > 1:
        raise ConfigError("enable_jit_unspill and jit_unspill are two names of one switch; one says on, the other off")
    found = next(iter(said.values()), None)
    if found is None:
        found = jit_unspill()
    return found is not False


def _by_name(stock: type | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if stock is not None:
        return bind(stock, args, kwargs)
    if args:
        raise ConfigError(
            "dask-cuda is not installed, and only it knows the order of LocalCUDACluster's arguments: name them"
        )
    return dict(kwargs)


def _without_devices(given: Mapping[str, Any], on: bool, stock: type | None) -> dict[str, Any]:
    """Return keywords for ``LocalCluster`` on a machine without devices; log what is lost."""
    keywords = dict(given)
    visible = keywords.get("CUDA_VISIBLE_DEVICES")
    why = why_no_devices(visible) or "no CUDA device was found"
    keywords.pop("device_memory_limit", None)
    dropped = {name for name in keywords if name in _ABOUT_DEVICES or name.startswith("rmm_")}
    if stock is not None:
        # What a later dask-cuda has, and a cluster without devices does not know.
        own = set(inspect.signature(stock.__init__).parameters)  # type: ignore[misc]
        known = {*inspect.signature(LocalCluster.__init__).parameters, "memory_limit", "local_directory"}
        dropped |= set(keywords) & own - known
    if str(keywords.get("protocol") or "").partition(":")[0] in ("ucx", "ucxx"):
        dropped.add("protocol")
    ignored = sorted(name for name in dropped if keywords.pop(name) not in (None, False))
    if keywords.get("n_workers") is None:
        keywords["n_workers"] = _count(visible)
    n_workers = keywords["n_workers"]
    if not isinstance(n_workers, Integral) or n_workers < 0:
        raise ValueError(f"n_workers: expected how many workers to start, found {n_workers!r}")
    keywords.setdefault("threads_per_worker", 1)
    if keywords.get("memory_limit") == "auto":
        del keywords["memory_limit"]  # the default: its part of the machine's memory
    worker_class = keywords.get("worker_class")
    if worker_class is not None and not issubclass(worker_class, Nanny):
        # A process for each worker, as with devices.
        keywords["worker_class"] = partial(Nanny, worker_class=worker_class)
        keywords["processes"] = True
    simulated = on and Settings.load().device == "simulated"
    logger.warning(
        "%s: starting %d worker(s) %s.%s",
        why,
        n_workers,
        "with simulated devices" if simulated else "on the CPU only",
        f" Ignored, because it is about devices: {', '.join(ignored)}." if ignored else "",
    )
    return keywords


def _count(visible: Any) -> int:
    """Return how many devices ``CUDA_VISIBLE_DEVICES`` names; 1 if it names none."""
    names = visible.split(",") if isinstance(visible, str) else visible or ()
    return max(1, sum(str(name).strip() not in ("", "-1") for name in names))
