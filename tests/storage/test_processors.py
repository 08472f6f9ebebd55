"""How busy the machine's processors are, by a clock and counters that the test moves."""

import pytest

from gpuspill.storage.processors import Processors, Ticks, read_ticks


class Machine:
    """Time, and what the system has counted in it: a hundred ticks a second."""

    def __init__(self):
        self.now = 100.0
        self.ticks = Ticks(5000, 10_000)
        self.looks = 0

    def run(self, seconds, busy):
        self.now += seconds
        self.ticks = Ticks(self.ticks.busy + round(100 * seconds * busy), self.ticks.total + round(100 * seconds))

    def read(self):
        self.looks += 1
        return self.ticks

    def processors(self):
        return Processors(self.read, lambda: self.now)


def test_follows_what_is_used():
    machine = Machine()
    processors = machine.processors()
    assert processors.busy() == 0.0
    for busy in (1.0, 0.25, 0.0):
        for _ in range(20):
            machine.run(1.0, busy)
            processors.busy()
        assert processors.busy() == pytest.approx(busy, abs=0.01)


def test_a_short_while_does_not_turn_it():
    machine = Machine()
    processors = machine.processors()
    machine.run(0.5, 1.0)
    assert 0.1 < processors.busy() < 0.4


def test_looks_twice_a_second():
    machine = Machine()
    processors = machine.processors()
    for _ in range(1000):
        machine.run(0.01, 1.0)
        processors.busy()
    assert 15 <= machine.looks <= 21


def test_a_system_that_does_not_tell():
    machine = Machine()
    processors = Processors(lambda: None, lambda: machine.now)
    machine.run(10.0, 1.0)
    assert processors.busy() == 0.0


def test_a_look_that_fails_changes_nothing():
    machine = Machine()
    found = [machine.ticks]
    processors = Processors(lambda: found[0], lambda: machine.now)
    machine.run(10.0, 1.0)
    found[0] = machine.ticks
    before = processors.busy()
    found[0] = None
    machine.run(10.0, 0.0)
    assert processors.busy() == before > 0.9
    found[0] = machine.ticks
    machine.run(1.0, 0.0)
    assert processors.busy() < before


def test_counters_that_stand_still_or_go_back():
    machine = Machine()
    processors = machine.processors()
    for ticks in (machine.ticks, Ticks(0, 0), Ticks(50, 10), Ticks(5, 20)):
        machine.now += 1.0
        machine.ticks = ticks
        assert 0.0 <= processors.busy() <= 1.0


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        (b"cpu  10 20 30 400 5 6 7 8 9 1\ncpu0 1\n", Ticks(81, 486)),
        (b"cpu  10 20 30\n", None),
        (b"cpu  a b c d e f g h\n", None),
        (b"", None),
    ],
)
def test_the_system_s_file(tmp_path, monkeypatch, line, ticks):
    (tmp_path / "stat").write_bytes(line)
    monkeypatch.setattr(
        "gpuspill.storage.processors.open", lambda path, mode: (tmp_path / "stat").open(mode), raising=False
    )
    assert read_ticks() == ticks


def test_without_the_file(monkeypatch):
    def fail(path, mode):
        raise FileNotFoundError(path)

    monkeypatch.setattr("gpuspill.storage.processors.open", fail, raising=False)
    assert read_ticks() is None
