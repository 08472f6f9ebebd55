"""GPUDirect Storage without a GPU: the boundary of ``PastHost``, simulated.

Bytes go between the simulated device and real files, on a stream of their own, late, and use
that nothing orders is raised as an error; as with the real one, no stream of the device is waited
for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.device.past_host import FileDriverError
from gpuspill.device.port import Allocation, Layout, StreamKind
from gpuspill.simulated.device.device import SimulatedAllocation, SimulatedDevice, SimulatedEvent

__all__ = ["FakeFiles"]

_PAGE = 4096


class FakeFiles:
    """Opens files for memory of a simulated device; see ``FileDriver``.

    Parameters
    ----------
    device
        The simulated device.
    find
        Returns the simulated allocation at an address, for allocations of another kind.

    Attributes
    ----------
    fault
        ``fault(what, number) -> int | None``, called when a transfer ends: what (``"write"``,
        ``"read"``), its number, from 1 on for each kind. May raise FileDriverError, before anything
        of it is done, or return how many of its bytes to move.
    gone
        Whether the driver has disappeared: nothing can be opened, and what is open fails.
    opened
        Files opened so far.
    under_way
        Transfers that were begun and not waited for.
    """

    def __init__(self, device: SimulatedDevice, find: Callable[[int], SimulatedAllocation] | None = None) -> None:
        self._device = device
        self._find = find
        self._stream = device.new_stream("files")
        self._lock = threading.Lock()
        self._begun = {"write": 0, "read": 0}
        self.fault: Callable[[str, int], int | None] = lambda what, number: None
        self.gone = False
        self.opened = 0
        self.under_way = 0

    def open(self, path: str, *, write: bool) -> _File:
        """Open a file that is there."""
        if self.gone:
            raise FileDriverError("the driver is gone")
        try:
            fd = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        except OSError as error:
            raise FileDriverError(str(error)) from error
        with self._lock:
            self.opened += 1
        return _File(self, fd)

    def begin(self, what: str) -> int:
        """Count a transfer; returns its number."""
        with self._lock:
            self._begun[what] += 1
            self.under_way += 1
            return self._begun[what]

    def end(self) -> None:
        """Count the end of one."""
        with self._lock:
            self.under_way -= 1

    def copy(self, kind: StreamKind, allocation: Allocation, offset: int, host: HostArray) -> SimulatedEvent:
        """Enqueue a copy between an allocation and host memory."""
        ours = allocation if isinstance(allocation, SimulatedAllocation) else None
        if ours is None:
            assert self._find is not None
            ours = self._find(allocation.address)
        layout = Layout(offset, (host.nbytes,), (1,), "|u1", 1)
        return self._device.enqueue_copy(kind, ours, layout, host, self._stream)


class _File:
    def __init__(self, driver: FakeFiles, fd: int) -> None:
        self.driver = driver
        self.fd = fd
        self.under_way = 0

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> _Transfer:
        """Begin to write."""
        assert os.fstat(self.fd).st_size >= offset + nbytes, "the file would have to grow"
        return _Transfer(self, "write", allocation, offset, nbytes)

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> _Transfer:
        """Begin to read."""
        return _Transfer(self, "read", allocation, offset, nbytes)

    def close(self) -> None:
        """Close it."""
        assert not self.under_way, "closed with transfers under way"
        os.close(self.fd)


class _Transfer:
    def __init__(self, file: _File, what: str, allocation: Allocation, offset: int, nbytes: int) -> None:
        assert offset % _PAGE == 0, offset
        self._file = file
        self._what = what
        self._allocation = allocation
        self._offset = offset
        self._host = np.empty(nbytes, np.uint8)
        # Device memory is read from now on; when it is written is known only once the file was
        # read.
        self._event = file.driver.copy("to_host", allocation, offset, self._host) if what == "write" else None
        self._number = file.driver.begin(what)
        file.under_way += 1

    def get(self) -> int:
        """Wait for it."""
        file, driver = self._file, self._file.driver
        try:
            if self._event is not None:
                self._event.wait()
            nbytes = driver.fault(self._what, self._number)
            if driver.gone:
                raise FileDriverError("the driver is gone")
            part = self._host[: self._host.nbytes if nbytes is None else nbytes]
            if self._event is not None:
                return os.pwrite(file.fd, part.data, self._offset)
            moved = os.preadv(file.fd, [part.data], self._offset)
            if moved:
                driver.copy("to_device", self._allocation, self._offset, part[:moved]).wait()
            return moved
        except OSError as error:
            raise FileDriverError(str(error)) from error
        finally:
            file.under_way -= 1
            driver.end()
