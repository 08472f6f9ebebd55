import pytest

from gpuspill.manager.knots import Knots

pytest_plugins = ["gpuspill.testing.pytest_plugin", "pytester"]


@pytest.fixture
def unsure(monkeypatch):
    """Nothing can tell who holds a value: it is evicted in the end, whoever does."""
    monkeypatch.setattr("gpuspill.manager.spill.knots", lambda value: Knots(0, False, 1))
