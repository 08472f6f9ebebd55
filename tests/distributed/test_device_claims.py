"""Several workers on one device: each has a limit, and together they may have too much."""

import os
import shutil
import subprocess
import sys
import types

import pytest

from gpuspill.distributed.device_claims import claim


class Device:
    """As much of one as is asked."""

    def __init__(self, uuid="GPU-1"):
        self.uuid = uuid

    def __repr__(self):
        return "<GPU>"

    def memory_info(self):
        return types.SimpleNamespace(total=1000)


def place(directory):
    return directory / f"gpuspill-device-{os.getuid()}-GPU-1"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    yield
    shutil.rmtree(tmp_path)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records]


def test_one_worker_is_told_nothing(tmp_path, caplog):
    first = claim(Device(), 800, tmp_path)
    assert first.others() == []
    assert not caplog.records
    first.release()
    first.release()
    assert not place(tmp_path).exists()
    claim(Device(), 800, tmp_path)
    assert not caplog.records


def test_two_that_want_too_much_together_are_told_what_to_set(tmp_path, caplog):
    claim(Device(), 800, tmp_path)
    claim(Device(), 800, tmp_path)
    (message,) = warnings(caplog)
    for part in ("2 workers", "<GPU>", "1,600 bytes", "1,000", "device-memory-limit to 400"):
        assert part in message


@pytest.mark.parametrize("limit", [None, 501])
def test_no_limit_is_all_of_it(limit, tmp_path, caplog):
    claim(Device(), limit, tmp_path)
    claim(Device(), 500, tmp_path)
    assert len(caplog.records) == 1


def test_limits_that_fit_together_are_no_matter(tmp_path, caplog):
    for limit in (300, 300, 400):
        claim(Device(), limit, tmp_path)
    assert not caplog.records


def test_other_devices_are_no_matter(tmp_path, caplog):
    claim(Device("GPU-1"), 800, tmp_path)
    claim(Device("MIG-2"), 800, tmp_path)
    assert claim(Device(None), 800, tmp_path) is None
    assert not caplog.records


def test_what_a_dead_process_left_does_not_count(tmp_path, caplog):
    code = (
        "import sys, tests.distributed.test_device_claims as t;"
        "from gpuspill.distributed.device_claims import claim; claim(t.Device(), 800, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    left = list(place(tmp_path).iterdir())
    assert len(left) == 1
    claim(Device(), 800, tmp_path)
    assert not caplog.records
    assert not left[0].exists()


def test_files_of_others_there_harm_nothing(tmp_path, caplog):
    place(tmp_path).mkdir()
    (place(tmp_path) / "what").write_text("x")
    assert claim(Device(), 800, tmp_path) is None
    assert not caplog.records


def test_a_place_that_cannot_be_written_to_harms_nothing(tmp_path):
    (tmp_path / "file").touch()
    assert claim(Device(), 800, tmp_path / "file") is None
