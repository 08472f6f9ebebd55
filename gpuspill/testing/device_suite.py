"""What the parts of the device conformance suite share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from gpuspill.device.port import Allocation, Device

__all__ = ["Bytes", "DeviceSuite", "fetch", "pattern", "store"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pattern(nbytes: int, seed: int = 1) -> Bytes:
    """Return bytes that are different for different seeds, and nowhere the same for long."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def store(device: Device, data: Any) -> Allocation:
    """Return a new allocation that holds `data`, observed to be there."""
    allocation = device.allocate(len(data))
    device.copy_to_device(data, allocation, device.stream("to_device")).wait()
    return allocation


def fetch(device: Device, allocation: Allocation) -> bytes:
    """Return what an allocation holds; its producer must have been observed."""
    host = bytearray(allocation.nbytes)
    device.copy_to_host(allocation, host, device.stream("to_host")).wait()
    return bytes(host)


class DeviceSuite:
    """Fixtures and properties; see :mod:`gpuspill.testing.devices`."""

    detects_misuse: ClassVar[bool] = False
    """Whether unordered and early use is always found out. Then that is tested too."""

    capacity: ClassVar[int] = 1 << 20
    """Bytes that can be allocated at least. Twice as many cannot."""

    @pytest.fixture
    def device(self) -> Any:
        """Yield a device on which nothing is allocated; close it afterwards."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _is_valid_afterwards(self, device: Device) -> Iterator[None]:
        yield
        device.validate()
        assert device.statistics().copies_in_flight == 0

    @pytest.fixture
    def needs_detection(self) -> None:
        """Skip the test if misuse is not detected."""
        if not self.detects_misuse:
            pytest.skip("this device cannot tell")
