"""Real libraries for CUDA, on the stand-in for its driver.

``make test-cuda`` makes an environment with them and runs these tests, in a process of their own: the stand-in has
to be there before any library looks for the driver.
"""

import importlib.util
import os
import sys
import tempfile

import pytest

from gpuspill.testing import standin as kit

MB = 2**20
HERE = os.path.dirname(__file__)


def _load():
    """Return the stand-in, or why there is none."""
    if os.environ.get("GPUSPILL_STANDIN") != "1":
        return "runs on a stand-in for CUDA's driver, which takes a process of its own: make test-cuda"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda.bindings is not installed: make test-cuda"
    # Read by the library at its first call. Two devices: what is on the second one is left alone.
    os.environ.setdefault("STANDIN_MEMORY", str(16 * MB))
    os.environ.setdefault("STANDIN_DEVICES", "2")
    # RMM asks the driver for what is not documented (distributed imports it if it is there); NVML has one of its own.
    for name in ("rmm", "pynvml"):
        sys.modules[name] = None
    with tempfile.TemporaryDirectory() as directory:
        try:
            return kit.load(kit.build(directory))
        except kit.CannotBuild as error:
            return str(error)


_loaded = _load()


def pytest_collection_modifyitems(items):
    if isinstance(_loaded, str):
        for item in items:
            if str(item.path).startswith(HERE):
                item.add_marker(pytest.mark.skip(reason=_loaded))


@pytest.fixture(autouse=True)
def standin():
    """The stand-in, on which nothing went wrong at the end of the test."""
    assert not isinstance(_loaded, str)
    yield _loaded
    violation = _loaded.violation
    _loaded.reset()
    _loaded.speed()
    assert not violation, violation
