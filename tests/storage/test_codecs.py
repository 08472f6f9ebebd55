"""When compression pays: the decision, and what feeds it. No real codec, disk or clock takes part."""

import itertools
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.errors import ConfigError
from gpuspill.storage.codecs import (
    PLAIN,
    Codec,
    CodecChooser,
    CodecSample,
    Throughput,
    best_choice,
    price,
    take_sample,
)
from gpuspill.storage.files import FileStore

GB = 1e9
MB = 1e6


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeCodec:
    """Shrinks everything to `ratio`, at given speeds, on a clock of its own."""

    def __init__(self, clock, ratio=0.5, compress_rate=0.5 * GB, decompress_rate=2 * GB):
        self.clock = clock
        self.ratio = ratio
        self.compress_rate = compress_rate
        self.decompress_rate = decompress_rate
        self.calls = []

    def compress(self, data):
        data = memoryview(data)
        self.calls.append(data.nbytes)
        self.clock.now += data.nbytes / self.compress_rate
        return len(data).to_bytes(8, "little") + bytes(int(data.nbytes * self.ratio) - 8)

    def decompress(self, data):
        nbytes = int.from_bytes(data[:8], "little")
        self.clock.now += nbytes / self.decompress_rate
        return bytes(nbytes)


CODEC = Codec("lz4", bytes, bytes)
FRAME = memoryview(bytes(32 * 2**20))


def lz4(ratio, compress_rate=0.5 * GB, decompress_rate=2 * GB):
    return CodecSample(CODEC, ratio, compress_rate, decompress_rate)


class TestBestChoice:
    @pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.89, 0.95])
    def test_fast_disk(self, ratio):
        # lz4 at 0.5 GB/s before a disk of 2.5: slower whatever it saves.
        assert best_choice([lz4(ratio)], 2.5 * GB, 2.5 * GB) == PLAIN

    @pytest.mark.parametrize(
        ("ratio", "pays"), [(0.0, True), (0.1, True), (0.5, True), (0.7, True), (0.89, False), (0.95, False)]
    )
    def test_slow_disk(self, ratio, pays):
        choice = best_choice([lz4(ratio)], 100 * MB, 100 * MB)
        assert choice == ((CODEC, ratio) if pays else PLAIN)

    def test_nothing_known_of_the_disk(self):
        assert best_choice([lz4(0.1)], None, None) == PLAIN

    @pytest.mark.parametrize("rates", [(100 * MB, None), (None, 100 * MB)])
    def test_one_rate_stands_in_for_the_other(self, rates):
        assert best_choice([lz4(0.1)], *rates).codec is CODEC

    def test_no_samples(self):
        assert best_choice([], 1.0, 1.0) == PLAIN

    def test_fastest_of_several(self):
        small = CodecSample(Codec("zstd", bytes, bytes), 0.3, 0.3 * GB, 1 * GB)
        # The slower the disk, the more a smaller result is worth.
        assert best_choice([lz4(0.5), small], 300 * MB, 300 * MB).codec is CODEC
        assert best_choice([lz4(0.5), small], 50 * MB, 50 * MB).codec is small.codec

    @settings(deadline=None)
    @given(
        ratio=st.floats(0.01, 0.89),
        rates=st.tuples(*[st.floats(1e6, 1e11)] * 4),
        slower=st.floats(1.0, 100.0),
    )
    def test_a_slower_disk_never_makes_compression_pay_less(self, ratio, rates, slower):
        compress, decompress, write, read = rates
        before = best_choice([lz4(ratio, compress, decompress)], write, read)
        after = best_choice([lz4(ratio, compress, decompress)], write / slower, read / slower)
        assert before == PLAIN or after == before

    @settings(deadline=None)
    @given(ratio=st.floats(0.01, 0.89), rates=st.tuples(*[st.floats(1e6, 1e11)] * 4))
    def test_it_is_chosen_only_if_it_saves_time(self, ratio, rates):
        compress, decompress, write, read = rates
        choice = best_choice([lz4(ratio, compress, decompress)], write, read, min_gain=0.0)
        nbytes = 1e9
        plain = nbytes / write + nbytes / read
        packed = nbytes / compress + nbytes * ratio / write + nbytes * ratio / read + nbytes / decompress
        assert choice == (PLAIN if packed > plain else (CODEC, ratio))


class TestPrice:
    @pytest.mark.parametrize(("busy", "seconds"), [(0.0, 1.0), (0.5, 0.6), (1.0, 0.2)])
    def test_waiting_costs_what_idle_processors_cost(self, busy, seconds):
        assert price(1.0, 0.2, busy) == pytest.approx(seconds)

    @settings(deadline=None)
    @given(seconds=st.floats(0, 10), cpu=st.floats(0, 10), busy=st.floats(0, 1))
    def test_never_less_than_processor_time(self, seconds, cpu, busy):
        # Two clocks: processor time may come out larger.
        assert cpu <= price(seconds, cpu, busy) <= max(seconds, cpu) + 1e-9


class TestThroughput:
    def test_unknown_at_first(self):
        assert Throughput().rate is None

    def test_time_counts_not_the_number_of_operations(self):
        throughput = Throughput(decay=1.0)
        throughput.observe(1_000_000, 1.0)
        throughput.observe(1, 0.001)
        assert throughput.rate == pytest.approx(1e6, rel=0.01)

    def test_follows_a_change(self):
        throughput = Throughput()
        for rate in (1e9, 1e8):
            for _ in range(30):
                throughput.observe(2**20, 2**20 / rate)
            assert throughput.rate == pytest.approx(rate, rel=0.05)

    def test_no_time_at_all(self):
        throughput = Throughput()
        throughput.observe(100, 0.0)
        assert throughput.rate > 1e9


class TestTakeSample:
    @settings(deadline=None)
    @given(
        frame=st.binary(max_size=300),
        nbytes=st.integers(1, 40),
        count=st.integers(1, 6),
    )
    def test_size_and_content(self, frame, nbytes, count):
        sample = take_sample(memoryview(frame), nbytes, count)
        assert sample.nbytes == min(len(frame), nbytes * count)
        for start in range(0, sample.nbytes, nbytes):
            assert bytes(sample[start : start + nbytes]) in frame

    def test_spread_over_the_frame(self):
        frame = b"".join(bytes([i]) * 100 for i in range(100))
        sample = bytes(take_sample(memoryview(frame), 100, 5))
        assert sample[0] == 0
        assert sample[-1] == 99
        assert len(set(sample)) >= 5


class TestCodecChooser:
    @pytest.mark.parametrize("setting", [None, False])
    def test_off(self, setting):
        codec = FakeCodec(Clock())
        chooser = CodecChooser(setting, {"lz4": codec})
        assert chooser.choose(FRAME) == PLAIN
        assert codec.calls == []

    @pytest.mark.parametrize("setting", ["lz5", "", True, 3, "AUTO"])
    def test_unknown_setting(self, setting):
        message = f"some.where: found {setting!r}, expected 'lz4', 'zlib', 'auto' or None"
        with pytest.raises(ConfigError, match=f"^{message}$"):
            CodecChooser(
                setting, {"lz4": FakeCodec(Clock()), "zlib": zlib, None: zlib, "auto": zlib}, named="some.where"
            )

    def test_a_codec_whose_library_is_not_installed(self):
        for name, package in [("snappy", "python-snappy"), ("zstd", "zstandard")]:
            with pytest.raises(ConfigError) as caught:
                CodecChooser(name, {"lz4": FakeCodec(Clock()), "zlib": zlib}, named="some.where")
            assert str(caught.value) == (
                f"some.where: found {name!r}, which needs the package {package}: it is not installed here, or too old. "
                "Install it or choose 'lz4', 'zlib', 'auto' or None"
            )

    def test_takes_distributeds_registry(self):
        compression = pytest.importorskip("distributed.protocol.compression")
        chooser = CodecChooser("zlib", compression.compressions)
        data = memoryview(bytes(100_000))
        codec = chooser.choose(data).codec
        assert codec is not None
        assert codec.name == "zlib"
        assert bytes(codec.decompress(codec.compress(data))) == bytes(data)

    @pytest.mark.parametrize(("ratio", "chosen"), [(0.1, True), (0.89, True), (0.91, False), (1.2, False)])
    def test_by_name_where_it_shrinks(self, ratio, chosen):
        clock = Clock()
        chooser = CodecChooser("lz4", {"lz4": FakeCodec(clock, ratio)}, clock=clock)
        assert (chooser.choose(FRAME).codec is not None) is chosen

    @pytest.mark.parametrize("nbytes", [0, 1, 9_999])
    def test_small_frames_are_left_alone(self, nbytes):
        codec = FakeCodec(Clock(), 0.1)
        assert CodecChooser("lz4", {"lz4": codec}).choose(memoryview(bytes(nbytes))) == PLAIN
        assert codec.calls == []

    def test_only_a_sample_is_compressed(self):
        codec = FakeCodec(Clock())
        CodecChooser("lz4", {"lz4": codec}).choose(FRAME)
        assert codec.calls == [50_000]

    def test_a_codec_that_fails_is_no_choice(self):
        def fail(data):
            raise RuntimeError("no such frame")

        chooser = CodecChooser("lz4", {"lz4": Codec("lz4", fail, fail)})
        assert chooser.choose(FRAME) == PLAIN

    def test_auto_without_codecs(self):
        chooser = CodecChooser("auto", {})
        chooser.observe_write(2**30, 1000.0)
        assert chooser.choose(FRAME) == PLAIN

    def make_auto(self, disk, **kwargs):
        clock = Clock()
        codec = FakeCodec(clock, **kwargs)
        chooser = CodecChooser("auto", {"lz4": codec}, clock=clock)
        for _ in range(3):
            chooser.observe_write(2**25, 2**25 / disk)
            chooser.observe_read(2**25, 2**25 / disk)
        return chooser, codec

    def test_auto_on_a_fast_disk(self):
        chooser, codec = self.make_auto(2.5 * GB)
        for _ in range(40):
            assert chooser.choose(FRAME) == PLAIN
        # After the first sample it is known that nothing could make it pay, so frames are not even sampled.
        assert len(codec.calls) == 1

    def test_auto_on_a_slow_disk(self):
        chooser, _ = self.make_auto(100 * MB)
        choice = chooser.choose(FRAME)
        assert choice.codec.name == "lz4"
        assert choice.ratio == pytest.approx(0.5)

    def test_auto_on_a_slow_disk_with_data_that_does_not_shrink(self):
        chooser, _ = self.make_auto(100 * MB, ratio=0.97)
        assert chooser.choose(FRAME) == PLAIN

    def test_auto_before_anything_is_known(self):
        codec = FakeCodec(Clock())
        chooser = CodecChooser("auto", {"lz4": codec})
        assert chooser.choose(FRAME) == PLAIN
        assert codec.calls == []

    def test_auto_follows_the_disk(self):
        chooser, _ = self.make_auto(2.5 * GB)
        assert chooser.choose(FRAME) == PLAIN
        for _ in range(30):
            chooser.observe_write(2**25, 2**25 / (100 * MB))
            chooser.observe_read(2**25, 2**25 / (100 * MB))
        assert chooser.choose(FRAME).codec.name == "lz4"

    def test_auto_tries_again_what_could_not_pay(self):
        chooser, codec = self.make_auto(1 * GB, compress_rate=0.1 * GB)
        assert chooser.choose(FRAME) == PLAIN
        assert chooser.choose(FRAME) == PLAIN
        # It was slow once (other data, a busy machine), which must not be the last word.
        codec.compress_rate = codec.decompress_rate = 50 * GB
        choices = [chooser.choose(FRAME) for _ in range(10 * CodecChooser.RETRY_EVERY)]
        assert choices[0] == PLAIN
        assert choices[-1].codec.name == "lz4"

    @pytest.mark.parametrize(("busy", "chosen"), [(0.0, True), (1.0, False)])
    def test_auto_on_a_slow_disk_while_processors_are_busy(self, busy, chosen):
        # Writing and reading take processor time at 2.5 GB/s, and the disk does 0.1.
        chooser = CodecChooser("auto", {"lz4": FakeCodec(clock := Clock())}, clock=clock, busy=lambda: busy)
        for _ in range(3):
            chooser.observe_write(2**25, 2**25 / (100 * MB), 2**25 / (2.5 * GB))
            chooser.observe_read(2**25, 2**25 / (100 * MB), 2**25 / (2.5 * GB))
        assert (chooser.choose(FRAME).codec is not None) is chosen

    def test_trials_take_a_hundredth_of_the_time_of_writing(self):
        clock = Clock()
        codecs = {name: FakeCodec(clock, 0.97) for name in ("lz4", "zstd")}
        chooser = CodecChooser("auto", codecs, clock=clock)
        written = 0.0
        for _ in range(5000):
            before = clock.now
            chooser.choose(FRAME)
            clock.now += 0.005
            written += clock.now - before
            chooser.observe_write(2**25, 2**25 / (100 * MB), 0.005, clock.now - before)
        trial = 50_000 * (1 / (0.5 * GB) + 1 / (2 * GB))
        trials = sum(len(codec.calls) for codec in codecs.values())
        most = chooser.TRIAL_SECONDS + chooser.TRIAL_SHARE * written
        # All that it may take is used, since nothing has shrunk, and not more but for the last one.
        assert most - 4 * trial <= trials * trial <= most + 2 * trial

    def make_spent(self, ratio=0.5):
        """Return a chooser that has no time for samples, on a slow disk."""
        clock = Clock()
        codec = FakeCodec(clock, ratio)
        chooser = CodecChooser("auto", {"lz4": codec}, clock=clock)
        chooser.observe_write(2**25, 2**25 / (100 * MB))
        while chooser._credit > 0:
            chooser.choose(FRAME, kind="known")
        codec.calls.clear()
        return chooser, codec

    def test_without_time_for_a_sample_the_last_of_its_kind_tells(self):
        chooser, codec = self.make_spent()
        assert chooser.choose(FRAME, kind="known").ratio == pytest.approx(0.5)
        assert chooser.choose(FRAME, kind="unknown") == PLAIN
        assert codec.calls == []

    def test_what_became_of_a_frame_counts_as_a_sample(self):
        chooser, codec = self.make_spent()
        for _ in range(5):
            chooser.observe_ratio("known", "lz4", 1.0)
        assert chooser.choose(FRAME, kind="known") == PLAIN
        chooser.observe_ratio("unknown", "lz4", 0.25)
        assert chooser.choose(FRAME, kind="unknown").ratio == 0.25
        assert codec.calls == []

    def test_a_codec_by_name_is_always_tried(self):
        clock = Clock()
        codec = FakeCodec(clock, compress_rate=1 * MB)
        chooser = CodecChooser("lz4", {"lz4": codec}, clock=clock)
        assert {chooser.choose(FRAME).codec.name for _ in range(20)} == {"lz4"}
        assert len(codec.calls) == 20

    def test_few_kinds_are_remembered(self):
        chooser, _ = self.make_spent()
        for kind in range(chooser.MOST_KINDS - 1):
            chooser.observe_ratio(kind, "lz4", 0.5)
        chooser.observe_ratio("known", "lz4", 0.5)
        chooser.observe_ratio("one more", "lz4", 0.5)
        kinds = [kind for kind in ("known", 0, 1, "one more") if chooser.choose(FRAME, kind=kind) != PLAIN]
        assert kinds == ["known", 1, "one more"]

    def test_small_operations_say_nothing_about_bandwidth(self):
        chooser, _ = self.make_auto(2.5 * GB)
        before = chooser.rates()
        for _ in range(100):
            chooser.observe_write(1000, 1.0)
            chooser.observe_read(1000, 1.0)
        assert chooser.rates() == before
        assert before["write"] == pytest.approx(2.5 * GB)
        assert before["compress-lz4"] is None

    def test_threads(self):
        chooser = CodecChooser("auto", {"zlib": zlib})
        chooser.observe_write(2**25, 100.0)
        frame = memoryview(bytes(100_000))
        barrier = threading.Barrier(4)

        def work(_):
            barrier.wait(60)
            return {chooser.choose(frame).codec.name for _ in range(20)}

        with ThreadPoolExecutor(4) as pool:
            assert set().union(*pool.map(work, range(4))) == {"zlib"}


class TestInAStore:
    """The chooser's decisions arrive on disk."""

    @pytest.fixture
    def codec(self):
        return Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)

    def test_each_frame_for_itself(self, tmp_path, codec):
        frames = [bytes(100_000), os.urandom(100_000), b"tiny", bytes(50_000)]
        with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec})) as store:
            receipt = store.write(b"h", frames)
            assert receipt.payload_nbytes == sum(map(len, frames))
            assert 100_000 < receipt.nbytes < 110_000
            assert os.path.getsize(store.path_of(receipt)) == receipt.nbytes
            header, read = store.read(receipt)
            assert (header, [bytes(frame) for frame in read]) == (b"h", frames)
            assert store.statistics().compressed_frames == 2

    def test_frames_are_of_a_kind_by_header_place_and_size(self, tmp_path):
        kinds = []

        class Chooser(CodecChooser):
            def choose(self, frame, *, kind=None):
                kinds.append(kind)
                return super().choose(frame, kind=kind)

        with FileStore(tmp_path, codecs=Chooser()) as store:
            for header, nbytes in [(b"a", 1000), (b"a", 1001), (b"b", 1000), (b"a", 4000)]:
                store.write(header, [bytes(nbytes)] * 2)
        first, second, third, fourth = zip(kinds[::2], kinds[1::2], strict=True)
        assert first == second
        assert len({*first, *third, *fourth}) == 6

    def test_processor_time_of_writing_and_reading(self, tmp_path):
        seen = []

        class Chooser(CodecChooser):
            def observe_write(self, nbytes, seconds, cpu=0.0, spent=0.0):
                seen.append((cpu, spent))

            def observe_read(self, nbytes, seconds, cpu=0.0):
                seen.append((cpu, cpu))

        ticks = itertools.count()
        with FileStore(tmp_path, codecs=Chooser(clock=lambda: float(next(ticks)))) as store:
            store.read(store.write(b"h", [bytes(3_000_000)]))
        (writing, spent), (reading, _) = seen
        assert 0 < writing < spent
        assert reading > 0

    def test_a_misleading_sample(self, tmp_path, codec):
        # The sampled places are zeros, the rest is noise.
        frame = bytearray(os.urandom(1_000_000))
        for i in range(5):
            start = (len(frame) - 10_000) * i // 4
            frame[start : start + 10_000] = bytes(10_000)
        with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec})) as store:
            receipt = store.write(b"", [frame])
            assert receipt.stored_nbytes == len(frame)
            assert bytes(store.read(receipt)[1][0]) == frame
            store.validate()

    @pytest.mark.fault("codec fails", on="host→disk", outcome="written without")
    def test_compression_that_fails_half_way(self, tmp_path):
        def compress(data):
            if len(data) > 50_000:
                raise MemoryError("no room for the result")
            return zlib.compress(data, 1)

        codec = Codec("zlib", compress, zlib.decompress)
        with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec})) as store:
            receipt = store.write(b"", [bytes(100_000)])
            assert receipt.stored_nbytes == 100_000
            assert bytes(store.read(receipt)[1][0]) == bytes(100_000)
            store.validate()

    def test_many_compressed_frames_are_not_all_held(self, tmp_path, monkeypatch):
        monkeypatch.setattr("gpuspill.storage.record_io._FLUSH_NBYTES", 100_000)
        writes = []
        writev = os.writev
        monkeypatch.setattr(os, "writev", lambda fd, bufs: writes.append(sum(map(len, bufs))) or writev(fd, bufs))
        codec = Codec("half", lambda data: bytes(data)[::2], lambda data: bytes(2 * len(data)))
        chooser = CodecChooser("half", {"half": codec})
        with FileStore(tmp_path, codecs=chooser) as store:
            frames = [bytes(60_000)] * 20
            receipt = store.write(b"", frames)
            assert [bytes(frame) for frame in store.read(receipt)[1]] == frames
        assert len(writes) >= 5
        assert max(writes) < 200_000
