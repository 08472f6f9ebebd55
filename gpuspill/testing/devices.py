"""What every device has to do, as tests.

To test a device adapter of your own, derive from :class:`DeviceTests` and give it a fixture::

    class TestMyDevice(DeviceTests):
        @pytest.fixture
        def device(self):
            device = MyDevice(...)
            yield device
            device.close()

and, for the array type of a library that lives on it, from :class:`ArrayTests`. The device should
have a small capacity of its own (``capacity`` bytes or more, and little more): the tests fill it.
For messages that show values, before importing this::

    pytest.register_assert_rewrite(
        "gpuspill.testing.device_arrays", "gpuspill.testing.device_copies",
        "gpuspill.testing.device_memory"
    )

Nothing here is a measurement: how fast copies are, and whether they overlap, is for benchmarks.
"""

from __future__ import annotations

from gpuspill.testing.device_arrays import ArrayTests
from gpuspill.testing.device_copies import CopyTests
from gpuspill.testing.device_memory import MemoryTests
from gpuspill.testing.device_suite import fetch, pattern, store

__all__ = ["ArrayTests", "DeviceTests", "fetch", "pattern", "store"]


class DeviceTests(MemoryTests, CopyTests):
    """Conformance: what a device has to do. One test a promise of :mod:`gpuspill.device.port`.

    Attributes
    ----------
    detects_misuse
        Whether unordered and early use is always found out. Then that is tested too.
    capacity
        Bytes that can be allocated at least. Twice as many cannot.
    """
