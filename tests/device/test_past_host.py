"""Whether to try, and what happens when it fails: on a fake of the boundary to the library."""

import os

import numpy as np
import pytest

from gpuspill.device.past_host import FileDriverError, PastHost, Trust
from gpuspill.simulated import ManualClock, SimulatedDevice
from gpuspill.testing.fake_files import FakeFiles
from gpuspill.testing.past_host_tests import PIECE, DevicePastHostTests


@pytest.fixture
def device():
    device = SimulatedDevice(2**24, bandwidth=1e6, latency=1e-3, clock=ManualClock())
    yield device
    device.validate()
    assert device.statistics().copies_in_flight == 0
    assert device.statistics().violations == 0


@pytest.fixture
def files(device):
    files = FakeFiles(device)
    yield files
    assert files.under_way == 0


class TestFake(DevicePastHostTests):
    @pytest.fixture
    def driver(self, files):
        return files

    # -- what only a fake does when asked to -----------------------------------------------------

    @pytest.mark.parametrize("nth", [1, 2, 5, 11])
    @pytest.mark.parametrize("what", ["fails", "is short", "moves nothing"])
    def test_a_piece_that(self, past_host, files, fd, caplog, what, nth):
        """Whichever it is, all others that were begun have ended when the answer is there."""

        def fault(kind, number):
            if number != nth:
                return None
            if what == "fails":
                raise FileDriverError("broken")
            return 4096 if what == "is short" else 0

        files.fault = fault
        os.posix_fallocate(fd, 0, 11 * PIECE)
        allocation = self.memory(self.bytes(11 * PIECE))
        assert not past_host.write(allocation, fd, lambda: None)
        assert files.under_way == 0
        assert past_host.writes == 0
        assert "broken" in caplog.text or "bytes were moved of 16,384" in caplog.text
        files.fault = lambda kind, number: None
        assert past_host.write(allocation, fd, lambda: None)
        assert past_host.writes == len(caplog.records) == 1

    @pytest.mark.parametrize("nth", [1, 3])
    def test_reading_fails(self, driver, files, tmp_path, nth):
        def fault(kind, number):
            if number == nth:
                raise FileDriverError("broken")

        (tmp_path / "file").write_bytes(bytes(3 * PIECE))
        files.fault = fault
        past_host = PastHost(files, piece=PIECE, trust=Trust(minimum=1))
        reading = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            assert not past_host.read(reading, self.memory(np.ones(3 * PIECE, np.uint8)))
        finally:
            os.close(reading)
        assert files.under_way == past_host.reads == 0


def test_trust_is_lost_after_failures_in_a_row():
    trust = Trust(minimum=10, patience=3)
    assert [trust.worth(n) for n in (0, 9, 10, 10**12)] == [False, False, True, True]
    assert trust.failed()
    assert not trust.failed()
    trust.succeeded()
    assert not trust.failed()
    assert not trust.failed()
    assert not trust.lost
    assert trust.worth(10)
    assert not trust.failed()
    assert trust.lost
    trust.succeeded()  # of a transfer that was begun before
    assert trust.lost
    assert not trust.worth(10**12)


def test_nothing_is_never_worth_it():
    assert not Trust(minimum=0).worth(0)
