"""KvikIO: files for device memory by GPUDirect Storage, and finding out whether there is any.

The only module that imports KvikIO, and it does so when it is asked for. KvikIO itself goes through
host memory where there is no driver (*compatibility mode*), which is of no use here: bytes that
pass through host memory can as well be hashed, so then nothing is found.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from typing import Any

from gpuspill.device.past_host import DirectFile, FileDriverError, Transfer
from gpuspill.device.port import Allocation
from gpuspill.errors import ConfigError

__all__ = ["KvikioFiles", "kvikio_files"]


class _Memory:
    """Device memory, as KvikIO takes it."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _Transfer:
    def __init__(self, future: Any) -> None:
        self._future = future

    def get(self) -> int:
        """Wait for it."""
        try:
            return int(self._future.get())
        except Exception as error:
            raise FileDriverError(f"KvikIO reports: {error}") from error


class _File:
    def __init__(self, file: Any) -> None:
        self._file = file

    # One task for each: of several, those that are left are not waited for when one fails.

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> Transfer:
        """Begin to write."""
        return _begin(self._file.pwrite, allocation, offset, nbytes)

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Transfer:
        """Begin to read."""
        return _begin(self._file.pread, allocation, offset, nbytes)

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(Exception):
            self._file.close()


def _begin(call: Any, allocation: Allocation, offset: int, nbytes: int) -> Transfer:
    try:
        return _Transfer(call(_Memory(allocation.address + offset, nbytes), nbytes, offset, nbytes))
    except Exception as error:
        raise FileDriverError(f"KvikIO reports: {error}") from error


class KvikioFiles:
    """Opens files by KvikIO; see :class:`gpuspill.device.past_host.FileDriver`.

    KvikIO's own settings hold (``KVIKIO_NTHREADS``: how many transfers are done at once).
    """

    def __init__(self) -> None:
        import kvikio

        self._open = kvikio.CuFile

    def open(self, path: str, *, write: bool) -> DirectFile:
        """Open a file that is there."""
        try:
            return _File(self._open(path, "r+" if write else "r"))
        except Exception as error:
            raise FileDriverError(f"KvikIO cannot open the file: {error}") from error


def kvikio_files(directory: str) -> KvikioFiles:
    """Return what opens files for device memory.

    Parameters
    ----------
    directory
        Where the files are going to be. One is made there, and removed, to find out whether its
        file system will do.

    Raises
    ------
    ConfigError
        There is nothing; the message says what is missing.
    """
    if importlib.util.find_spec("kvikio") is None:
        raise ConfigError("KvikIO is not installed (install kvikio-cu12 or kvikio-cu13)")
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults

        # Before the driver: a user who chose this may have a reason not to open it.
        if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
            raise ConfigError("KvikIO was told to go through host memory (KVIKIO_COMPAT_MODE)")
        if not kvikio.cufile_driver.get("is_gds_available"):
            raise ConfigError("the driver of GPUDirect Storage (nvidia-fs) is not loaded, or cuFile cannot be opened")
        _try(kvikio, directory)
        return KvikioFiles()
    except ConfigError:
        raise
    except Exception as error:  # of a library that finds another version of something than it was made for
        raise ConfigError(f"KvikIO is installed and cannot be used: {error}") from error


def _try(kvikio: Any, directory: str) -> None:
    """Raise ConfigError unless cuFile takes a file there."""
    os.makedirs(directory, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="gpuspill-gds-") as file:
        try:
            # For this file only: by default KvikIO goes through host memory when cuFile refuses
            # one, and does not say.
            with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
                kvikio.CuFile(file.name, "r+").close()
        except Exception as error:
            raise ConfigError(f"cuFile does not take files in {directory}: {error}") from error
