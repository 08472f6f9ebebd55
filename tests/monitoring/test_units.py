from __future__ import annotations

import pytest

from gpuspill.monitoring import units
from gpuspill.monitoring.catalogue import catalogue


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (1000 * 2**20, "0.98 GiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (12.34 * 2**30, "12.3 GiB"),
        (512 * 2**20, "512 MiB"),
        (-3 * 2**20, "-3.00 MiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes(number, text):
    assert units.nbytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0004, "0.40 ms"),
        (0.35, "350 ms"),
        (0.9996, "1.00 s"),
        (12.44, "12.4 s"),
        (61, "1 min 1 s"),
        (4000, "1 h 6 min"),
    ],
)
def test_durations(seconds, text):
    assert units.duration(seconds) == text


def test_a_statistic_is_shown_in_its_unit():
    known = catalogue()
    assert units.amount(known["limit"], None) == "none"
    assert units.amount(known["limit"], 2**30) == "1.00 GiB"
    assert units.amount(known["wait_seconds"], 2.0) == "2.00 s"
    assert units.amount(known["keys"], 12345) == "12,345"
