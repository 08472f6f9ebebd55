import gc

import pytest

from gpuspill.manager.knots import Knots

pytest_plugins = ["gpuspill.testing.pytest_plugin", "pytester"]


@pytest.fixture(scope="module", autouse=True)
def _young_heap() -> None:
    """Collect garbage of this module's tests only.

    Thousands of collected tests and imported libraries live as long as the process. A full collection that walks them
    takes a second, late in a run, and many tests collect.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def unsure(monkeypatch):
    """Nothing can tell who holds a value: it is evicted in the end, whoever does."""
    monkeypatch.setattr("gpuspill.manager.spill.knots", lambda value: Knots(0, False))
