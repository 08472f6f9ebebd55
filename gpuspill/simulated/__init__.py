"""A device in host memory, and arrays on it: for tests, demonstrations and CI.

>>> from gpuspill import simulated
>>> x = simulated.asarray([[1.0, 2.0], [3.0, 4.0]])
>>> total = (x + x.T).sum()
>>> float(total)
20.0
>>> simulated.asnumpy(x[0])
array([1., 2.])

``dask.array`` works on it: ``da.from_array(...).map_blocks(simulated.asarray)``. The device is
slow, small and late if it is told to be (:func:`configure`), and finds out who uses memory too
early or frees it too soon: see :mod:`gpuspill.simulated.device.device`, and ``docs/simulated.md``.
"""

from __future__ import annotations

import importlib.util

from gpuspill.simulated.arrays.array import Array
from gpuspill.simulated.arrays.creation import arange, asarray, asnumpy, empty, full, ones, zeros
from gpuspill.simulated.arrays.current import configure, device, use
from gpuspill.simulated.arrays.frames import Description, describe, from_frames, rebuild, to_frames
from gpuspill.simulated.arrays.kernels import run_kernel
from gpuspill.simulated.device.device import ManualClock, RealClock, SimulatedDevice

__all__ = [
    "Array",
    "Description",
    "ManualClock",
    "RealClock",
    "SimulatedDevice",
    "arange",
    "asarray",
    "asnumpy",
    "configure",
    "describe",
    "device",
    "empty",
    "from_frames",
    "full",
    "ones",
    "rebuild",
    "run_kernel",
    "to_frames",
    "use",
    "zeros",
]

if importlib.util.find_spec("dask") is not None and importlib.util.find_spec("dask.array") is not None:
    from gpuspill.simulated.arrays.dispatch import register

    register()
    del register
