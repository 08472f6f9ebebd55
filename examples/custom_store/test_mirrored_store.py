"""What every store has to do, and what this one does besides."""

import pytest

pytest.register_assert_rewrite(
    "gpuspill.testing.store_tests"
)  # for messages that show values

from gpuspill.errors import QuotaExceeded
from gpuspill.storage.files import FileStore
from gpuspill.testing.store_tests import StoreTests
from gpuspill.testing.stores import MemoryStore
from mirrored_store import MirroredStore


def make(path, mirror=None):
    return MirroredStore(
        FileStore(path / "first"), FileStore(path / "second") if mirror is None else mirror
    )


class TestMirroredStore(StoreTests):
    """The conformance suite."""

    @pytest.fixture
    def store(self, tmp_path):
        with make(tmp_path) as store:
            yield store


def files(path):
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]


def test_a_damaged_copy_is_replaced_by_the_other(tmp_path):
    with make(tmp_path) as store:
        receipt = store.write(b"header", [b"frame" * 100])
        for file in files(tmp_path / "first"):
            file.write_bytes(b"damage")
        header, frames = store.read(receipt)
        assert (header, bytes(frames[0])) == (b"header", b"frame" * 100)


def test_if_the_mirror_has_no_room_nothing_is_written(tmp_path):
    with make(tmp_path, MemoryStore(quota=10)) as store:
        with pytest.raises(QuotaExceeded):
            store.write(b"header", [b"frame" * 100])
        assert store.statistics().records == 0
        store.validate()
