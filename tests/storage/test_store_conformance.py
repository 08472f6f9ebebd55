"""Every store passes the same tests, and so does every wrapper around one."""

import tempfile
import zlib

import fsspec
import pytest
import zict
from hypothesis import settings

from gpuspill.storage.buffers import BufferPool
from gpuspill.storage.codecs import Codec, CodecChooser
from gpuspill.storage.files import FileStore
from gpuspill.storage.mapping import MappingStore
from gpuspill.storage.patient import PatientStore
from gpuspill.storage.wrappers import DelayedStore, FaultyStore, WrapperStore
from gpuspill.testing.store_tests import StoreMachine, StoreTests
from gpuspill.testing.stores import GatedStore, MemoryStore


def always_compress() -> CodecChooser:
    codec = Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)
    return CodecChooser("zlib", {"zlib": codec}, min_nbytes=1)


class TestFileStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with FileStore(tmp_path) as store:
            yield store


class TestCompressingFileStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with FileStore(tmp_path, codecs=always_compress()) as store:
            yield store


class TestMappingStoreInADict(StoreTests):
    @pytest.fixture
    def store(self):
        records: dict[str, bytes] = {"somebody's": b"else"}
        with MappingStore(records) as store:
            yield store
        assert records == {"somebody's": b"else"}


class TestMappingStoreInZictFile(StoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with MappingStore(zict.File(tmp_path)) as store:
            yield store
        assert list(tmp_path.iterdir()) == []


class TestMappingStoreInFsspec(StoreTests):
    @pytest.fixture(params=["memory://records", "file"])
    def store(self, request, tmp_path):
        url = f"file://{tmp_path}" if request.param == "file" else request.param
        mapper = fsspec.get_mapper(url, create=True)
        with MappingStore(mapper) as store:
            yield store
        assert list(mapper) == []


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store

    @pytest.fixture
    def quota_store(self):
        with MemoryStore(quota=100_000) as store:
            yield store


@pytest.mark.parametrize(
    "wrap",
    [
        WrapperStore,
        GatedStore,
        lambda store: DelayedStore(store, 5.0, sleep=lambda seconds: None),
        lambda store: FaultyStore(store, lambda operation, number: None),
        lambda store: PatientStore(store, sleep=lambda seconds: None),
    ],
    ids=["plain", "gated", "delayed", "faulty", "patient"],
)
class TestWrappers(StoreTests):
    @pytest.fixture
    def store(self, wrap):
        with wrap(MemoryStore()) as store:
            yield store

    @pytest.fixture
    def quota_store(self, wrap):
        with wrap(MemoryStore(quota=100_000)) as store:
            yield store


class FileStoreMachine(StoreMachine):
    def make_store(self):
        self.directory = tempfile.TemporaryDirectory()
        return FileStore(self.directory.name, codecs=always_compress())

    def teardown(self):
        super().teardown()
        self.directory.cleanup()


class MemoryStoreMachine(StoreMachine):
    def make_store(self):
        return MemoryStore()


TestFileStoreMachine = FileStoreMachine.TestCase
TestFileStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMemoryStoreMachine = MemoryStoreMachine.TestCase
TestMemoryStoreMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_reading_into_a_pool(tmp_path):
    pool = BufferPool(2**24)
    with FileStore(tmp_path) as store:
        receipt = store.write(b"h", [b"x" * 2**20, b"y" * 100])
        for _ in range(5):
            header, frames = store.read(receipt, pool.allocate)
            assert (header, bytes(frames[0]), bytes(frames[1])) == (b"h", b"x" * 2**20, b"y" * 100)
            del frames
    stats = pool.statistics()
    assert (stats.misses, stats.hits) == (1, 4)
