"""Values that came as bytes stay bytes until somebody needs them; values on disk leave as bytes."""

from __future__ import annotations

import errno
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from gpuspill.errors import DataLostError, ManagerClosed, RecordLost, StorageError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import Encoded, PickleSerializer, Serialized
from gpuspill.storage.base import Store
from gpuspill.storage.patient import PatientStore
from gpuspill.testing.stores import FaultyStore, Gate, GatedStore, MemoryStore, nth

NBYTES = 800
TIMEOUT = 30


class CountingSerializer(PickleSerializer):
    """Counts what it does, and can be held up while it decodes."""

    def __init__(self) -> None:
        self.encoded = 0
        self.decoded = 0
        self.gate: Gate | None = None

    def dumps(self, value: object) -> Serialized:
        self.encoded += 1
        return super().dumps(value)

    def loads(self, header: bytes, frames: object) -> object:
        self.decoded += 1
        if self.gate is not None:
            self.gate.pass_through()
        return super().loads(header, frames)  # type: ignore[arg-type]


class Kit:
    """A manager, what it writes to and what it decodes with."""

    def __init__(self, store: Store | None = None, limit: int | None = None) -> None:
        self.store = GatedStore(MemoryStore() if store is None else store)
        self.serializer = CountingSerializer()
        self.elsewhere: dict[object, tuple[object, int]] = {}
        self.manager = ProxifyManager(
            limit=limit, store=self.store, serializer=self.serializer, sizeof=lambda _: NBYTES
        )


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.manager.validate()
    kit.manager.close()


def value(number: int = 1) -> np.ndarray:
    return np.full(NBYTES // 8, float(number))


def encoded(number: int = 1) -> Encoded:
    header, frames = PickleSerializer().dumps(value(number))
    return Encoded(header, [memoryview(bytearray(frame)) for frame in frames], NBYTES)


def undecodable() -> Encoded:
    return Encoded(b"this is no pickle", [], NBYTES)


def exported(manager: ProxifyManager, *keys: str) -> dict:
    pins = manager.admission.pin(keys)
    try:
        return manager.batch.export(pins).result(TIMEOUT)
    finally:
        pins.release()


# -- arriving --------------------------------------------------------------------------------------


def test_nothing_is_decoded_before_it_is_needed(kit: Kit) -> None:
    kit.manager.store_encoded("x", encoded())
    assert "x" in kit.manager
    assert kit.manager.nbytes("x") == NBYTES
    assert kit.manager.memory_total() == NBYTES
    assert not kit.manager.is_resident("x")  # cannot be handed out at once
    assert kit.manager.peek("x", "nothing") == "nothing"
    assert kit.serializer.decoded == 0
    np.testing.assert_array_equal(kit.manager.get("x"), value())
    assert kit.manager.is_resident("x")
    assert kit.manager.peek("x") is kit.manager.get("x")
    assert kit.manager.memory_total() == NBYTES
    assert kit.serializer.decoded == 1
    assert kit.store.statistics().reads == 0


def test_it_is_spilled_as_it_came(kit: Kit) -> None:
    kit.manager.store_encoded("x", encoded(3))
    kit.manager.limits.evict_all()
    assert kit.manager.memory_total() == 0
    assert (kit.serializer.encoded, kit.serializer.decoded) == (0, 0)
    assert kit.store.statistics().writes == 1
    assert kit.manager.nbytes("x") == NBYTES
    np.testing.assert_array_equal(kit.manager.get("x"), value(3))
    assert kit.serializer.decoded == 1


def test_a_decoded_value_is_like_any_other(kit: Kit) -> None:
    kit.manager.store_encoded("x", encoded(3))
    x = kit.manager.get("x")
    kit.manager.store("y", x)  # the same object is charged once
    assert kit.manager.memory_total() == NBYTES
    del x
    kit.manager.limits.evict_all()
    assert kit.serializer.encoded == 1
    assert kit.manager.get("x") is kit.manager.get("y")


@pytest.mark.fault("used meanwhile", on="receive", outcome="one object for all")
def test_what_is_decoded_while_it_is_written_is_not_decoded_again(kit: Kit) -> None:
    gate = kit.store.before["write"] = Gate()
    kit.manager.store_encoded("x", encoded(3))
    with ThreadPoolExecutor(1) as threads:
        eviction = threads.submit(kit.manager.limits.evict_all)
        assert gate.arrived.acquire(timeout=TIMEOUT)
        x = kit.manager.get("x")
        np.testing.assert_array_equal(x, value(3))
        kit.manager.validate()
        gate.open()
        del x
        eviction.result(TIMEOUT)
    kit.manager.validate()
    assert kit.serializer.decoded == 1
    np.testing.assert_array_equal(kit.manager.get("x"), value(3))
    assert kit.serializer.encoded == 0  # the record is the one of the bytes


def test_all_who_want_it_get_the_same_object(kit: Kit) -> None:
    gate = kit.serializer.gate = Gate()
    kit.manager.store_encoded("x", encoded())
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(kit.manager.get, "x")
        assert gate.arrived.acquire(timeout=TIMEOUT)
        others: list[Future] = [threads.submit(kit.manager.get, "x"), threads.submit(kit.manager.get, "x")]
        others.append(kit.manager.batch.get_many(["x"]))
        admission = kit.manager.admission.admit(None, ["x"])
        others.append(kit.manager.batch.materialize_later(admission))
        kit.manager.validate()
        gate.open()
        x = first.result(TIMEOUT)
        for other in others:
            got = other.result(TIMEOUT)
            assert (got["x"] if isinstance(got, dict) else got) is x
        admission.release()
    assert kit.serializer.decoded == 1
    assert kit.manager.statistics().pinned_nbytes == 0


def test_it_is_no_victim_while_it_is_decoded(kit: Kit) -> None:
    gate = kit.serializer.gate = Gate()
    kit.manager.store_encoded("x", encoded())
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(kit.manager.get, "x")
        assert gate.arrived.acquire(timeout=TIMEOUT)
        kit.manager.limits.evict_all()
        assert kit.store.statistics().writes == 0
        assert kit.manager.statistics().pinned_nbytes == NBYTES
        gate.open()
        np.testing.assert_array_equal(reader.result(TIMEOUT), value())
    assert kit.manager.statistics().pinned_nbytes == 0


@pytest.mark.fault("deleted meanwhile", on="receive", outcome="delivered; nothing left")
def test_its_key_may_be_deleted_while_it_is_decoded(kit: Kit) -> None:
    gate = kit.serializer.gate = Gate()
    kit.manager.store_encoded("x", encoded())
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(kit.manager.get, "x")
        assert gate.arrived.acquire(timeout=TIMEOUT)
        kit.manager.discard("x")
        gate.open()
        np.testing.assert_array_equal(reader.result(TIMEOUT), value())
    assert kit.manager.memory_total() == 0
    assert len(kit.manager) == 0


@pytest.mark.fault("value cannot be rebuilt", on="receive", outcome="an error each time; not lost")
def test_what_cannot_be_decoded_raises_for_each_reader_and_stays(kit: Kit) -> None:
    kit.manager.store_encoded("x", undecodable())
    for _ in range(2):
        with pytest.raises(pickle.UnpicklingError):
            kit.manager.get("x")
    with pytest.raises(pickle.UnpicklingError):
        kit.manager.batch.get_many(["x"]).result(TIMEOUT)
    kit.manager.validate()
    assert kit.manager.statistics().pinned_nbytes == 0
    kit.manager.limits.evict_all()
    with pytest.raises(pickle.UnpicklingError):
        kit.manager.get("x")
    assert exported(kit.manager, "x")["x"].header == b"this is no pickle"


def test_bytes_that_somebody_holds_are_not_taken_for_the_value(kit: Kit, unsure: None) -> None:
    held = encoded(5)
    kit.manager.store_encoded("x", held)
    for _ in range(25):  # refused twenty times
        kit.manager.limits.evict_all()
    assert kit.manager.statistics().disk_keys == 1
    np.testing.assert_array_equal(kit.manager.get("x"), value(5))
    del held


def test_bytes_in_memory_stay_readable_after_closing(kit: Kit) -> None:
    kit.manager.store_encoded("x", encoded(1))
    kit.manager.store_encoded("y", encoded(2))
    kit.manager.store_encoded("z", encoded(3))
    kit.manager.close()
    np.testing.assert_array_equal(kit.manager.get("x"), value(1))
    np.testing.assert_array_equal(kit.manager.batch.get_many(["y"]).result(TIMEOUT)["y"], value(2))
    admission = kit.manager.admission.admit(None, ["x", "y", "z"])
    assert admission.granted
    assert sum(x[0] for x in kit.manager.batch.materialize(admission).values()) == 6
    admission.release()
    kit.manager.validate()
    assert kit.manager.statistics().pinned_nbytes == 0


def test_replacing_and_deleting(kit: Kit) -> None:
    kit.manager.store_encoded("x", encoded(1))
    kit.manager.store_encoded("x", encoded(2))
    assert kit.manager.memory_total() == NBYTES
    np.testing.assert_array_equal(kit.manager.get("x"), value(2))
    kit.manager.store_encoded("x", encoded(3))
    kit.manager.discard("x")
    assert kit.manager.memory_total() == 0
    assert kit.serializer.decoded == 1


def test_it_settles_the_promise_of_its_key() -> None:
    kit = Kit(limit=10 * NBYTES)
    admission = kit.manager.admission.reserve(NBYTES, outputs={"x": NBYTES})
    assert kit.manager.statistics().reserved_nbytes == NBYTES
    kit.manager.store_encoded("x", encoded())
    assert kit.manager.statistics().reserved_nbytes == 0
    admission.release()
    assert kit.manager.memory_total() == NBYTES
    kit.manager.close()


def test_decoding_without_storing(kit: Kit) -> None:
    np.testing.assert_array_equal(kit.manager.batch.decode(encoded(7)).result(TIMEOUT), value(7))
    with pytest.raises(pickle.UnpicklingError):
        kit.manager.batch.decode(undecodable()).result(TIMEOUT)
    assert len(kit.manager) == 0
    kit.manager.close()
    with pytest.raises(ManagerClosed):
        kit.manager.batch.decode(encoded(7)).result(TIMEOUT)


# -- leaving ---------------------------------------------------------------------------------------


def test_export_leaves_everything_as_it_was(kit: Kit) -> None:
    for number in range(4):
        kit.manager.store(f"x-{number}", value(number))
    kit.manager.limits.evict_all()
    x = kit.manager.get("x-0")
    before = kit.manager.statistics()
    encodings, decodings = kit.serializer.encoded, kit.serializer.decoded
    got = exported(kit.manager, *(f"x-{number}" for number in range(4)))
    after = kit.manager.statistics()
    assert got["x-0"] is x  # from memory
    for number in range(1, 4):
        sent = got[f"x-{number}"]
        assert isinstance(sent, Encoded)
        assert sent.nbytes == NBYTES
        np.testing.assert_array_equal(PickleSerializer().loads(sent.header, sent.frames), value(number))
    assert (kit.serializer.encoded, kit.serializer.decoded) == (encodings, decodings)
    for name in ("host_nbytes", "disk_nbytes", "spills", "restores", "disk_keys", "pinned_nbytes", "hits", "misses"):
        assert getattr(after, name) == getattr(before, name), name
    del x


def test_export_of_what_came_as_bytes_passes_it_on(kit: Kit) -> None:
    came = encoded()
    kit.manager.store_encoded("x", came)
    assert exported(kit.manager, "x")["x"] is came
    del came
    kit.manager.limits.evict_all()
    assert bytes(exported(kit.manager, "x")["x"].frames[0]) == value().tobytes()
    assert kit.serializer.decoded == 0


def test_pin_leaves_out_what_is_unknown_and_asks_for_no_room() -> None:
    kit = Kit(limit=NBYTES)
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    pins = kit.manager.admission.pin(["x", "y"])
    assert set(pins.pids) == {"x"}
    assert pins.granted
    statistics = kit.manager.statistics()
    assert statistics.pinned_nbytes == 0 or statistics.host_nbytes == 0
    assert (statistics.reserved_nbytes, statistics.waiting) == (0, 0)
    assert kit.manager.admission.missing_nbytes(pins.pids) == NBYTES
    kit.manager.get("x")
    assert kit.manager.admission.missing_nbytes(pins.pids) == 0
    kit.manager.limits.evict_all()
    assert kit.manager.is_resident("x")  # pinned
    pins.release()
    pins.release()
    kit.manager.limits.evict_all()
    assert not kit.manager.is_resident("x")
    kit.manager.validate()
    kit.manager.close()


@pytest.mark.fault("deleted meanwhile", on="send", outcome="sent; nothing left")
def test_a_pinned_value_is_exported_although_its_key_is_gone(kit: Kit) -> None:
    kit.manager.store("x", value(4))
    kit.manager.limits.evict_all()
    pins = kit.manager.admission.pin(["x"])
    kit.manager.discard("x")
    sent = kit.manager.batch.export(pins).result(TIMEOUT)["x"]
    np.testing.assert_array_equal(PickleSerializer().loads(sent.header, sent.frames), value(4))
    pins.release()
    assert kit.manager.statistics().disk_nbytes == 0


def test_export_waits_for_a_restore_in_flight_and_sends_the_value(kit: Kit) -> None:
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    gate = kit.store.before["read"] = Gate()
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(kit.manager.get, "x")
        assert gate.arrived.acquire(timeout=TIMEOUT)
        pins = kit.manager.admission.pin(["x"])
        future = kit.manager.batch.export(pins)
        gate.open()
        assert future.result(TIMEOUT)["x"] is reader.result(TIMEOUT)
        pins.release()
    assert kit.store.statistics().reads == 1


@pytest.mark.fault("used meanwhile", on="send", outcome="sent as it was")
def test_a_restore_during_an_export_does_not_disturb_it(kit: Kit) -> None:
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    gate = kit.store.before["read"] = Gate()
    pins = kit.manager.admission.pin(["x"])
    future = kit.manager.batch.export(pins)
    assert gate.arrived.acquire(timeout=TIMEOUT)
    del kit.store.before["read"]
    np.testing.assert_array_equal(kit.manager.get("x"), value())
    gate.open()
    assert isinstance(future.result(TIMEOUT)["x"], Encoded)
    pins.release()


def test_cancelling_an_export_before_it_begins(kit: Kit) -> None:
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    gate = kit.store.before["read"] = Gate()
    pins = kit.manager.admission.pin(["x"])
    busy = [kit.manager.batch.export(pins) for _ in range(2)]  # as many as there are threads
    for _ in busy:
        assert gate.arrived.acquire(timeout=TIMEOUT)
    late = kit.manager.batch.export(pins)
    assert late.cancel()
    gate.open()
    for future in busy:
        assert isinstance(future.result(TIMEOUT)["x"], Encoded)
    pins.release()
    assert exported(kit.manager, "x")
    assert kit.store.statistics().reads == 3


def test_a_lost_record_is_lost_for_everybody() -> None:
    store = MemoryStore()
    kit = Kit(store)
    kit.manager.store("x", value())
    kit.manager.store("y", value())
    kit.manager.limits.evict_all()
    store._records.clear()
    with pytest.raises(DataLostError) as caught:
        exported(kit.manager, "x", "y")
    assert caught.value.key == "x"
    with pytest.raises(DataLostError):
        kit.manager.get("x")
    with pytest.raises(DataLostError):
        exported(kit.manager, "x")
    statistics = kit.manager.statistics()
    # Both were read at the same time, and both found to be gone.
    assert (statistics.lost, statistics.pinned_nbytes, statistics.reserved_nbytes) == (2, 0, 0)
    kit.manager.validate()
    kit.manager.discard("x")
    kit.manager.close()


@pytest.mark.fault("overwritten meanwhile", on="send", outcome="sent as it was")
def test_a_record_that_was_given_up_meanwhile_is_not_missed(kit: Kit) -> None:
    """Restored, and its record deleted, after the export looked it up."""
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    gate = kit.store.before["read"] = Gate()
    pins = kit.manager.admission.pin(["x"])
    future = kit.manager.batch.export(pins)
    assert gate.arrived.acquire(timeout=TIMEOUT)
    del kit.store.before["read"]
    x = kit.manager.get("x")
    with kit.manager._metadata:
        receipt = next(iter(kit.manager._metadata.slots.values())).receipt
    kit.store.delete(receipt)
    gate.open()
    assert future.result(TIMEOUT)["x"] is x
    pins.release()


@pytest.mark.fault("error of the disk", on="send", outcome="tried again, then lost")
@pytest.mark.fault("no file descriptor left", on="send", outcome="tried again, with pauses")
@pytest.mark.parametrize(
    ("number", "failures", "lost"), [(errno.EIO, 1, False), (errno.EIO, 4, True), (errno.EMFILE, 9, False)]
)
def test_reading_for_a_transfer_is_tried_again(number: int, failures: int, lost: bool) -> None:
    fault = nth("read", *range(1, failures + 1), error=lambda: StorageError(number, "not now"))
    kit = Kit(PatientStore(FaultyStore(MemoryStore(), fault), sleep=lambda seconds: None))
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    if lost:
        with pytest.raises(DataLostError, match="not now, twice"):
            exported(kit.manager, "x")
    else:
        assert isinstance(exported(kit.manager, "x")["x"], Encoded)
    assert kit.manager.statistics().lost == lost
    kit.manager.close()


def test_export_after_closing(kit: Kit) -> None:
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()
    pins = kit.manager.admission.pin(["x"])
    kit.manager.close()
    with pytest.raises(ManagerClosed):
        kit.manager.batch.export(pins).result(TIMEOUT)
    pins.release()


@pytest.mark.fault("several threads at once", on="send", outcome="every value right, all totals zero")
def test_many_threads_read_export_and_evict() -> None:
    kit = Kit(limit=3 * NBYTES)
    for number in range(8):
        kit.manager.store_encoded(f"x-{number}", encoded(number))
    errors = []

    def work(seed: int) -> None:
        try:
            for step in range(60):
                number = (seed * 7 + step * 3) % 8
                key = f"x-{number}"
                if (seed + step) % 2:
                    assert kit.manager.get(key)[0] == number
                else:
                    got = exported(kit.manager, key)[key]
                    if isinstance(got, Encoded):
                        got = PickleSerializer().loads(got.header, got.frames)
                    assert got[0] == number
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not errors
    kit.manager.validate()
    statistics = kit.manager.statistics()
    assert (statistics.pinned_nbytes, statistics.reserved_nbytes, statistics.waiting) == (0, 0, 0)
    kit.manager.close()


def test_a_loss_is_told_once_whoever_asked_for_whom(kit: Kit) -> None:
    kit.manager.store("x", value())
    kit.manager.limits.evict_all()

    def gone(*args: object, **kwargs: object) -> None:
        raise RecordLost("the file is gone")

    kit.store.read = gone  # type: ignore[method-assign]
    pins = kit.manager.admission.pin(["x"])
    with pytest.raises(DataLostError) as caught:
        kit.manager.batch.export(pins).result(TIMEOUT)
    assert str(caught.value) == "the value of 'x' is lost: the file is gone"
    with pytest.raises(DataLostError) as caught:
        kit.manager.get("x")
    assert str(caught.value) == "the value of 'x' is lost: the file is gone"
    pins.release()


# -- with something on a device --------------------------------------------------------------------


@pytest.fixture
def dispersing(kit: Kit) -> Kit:
    """A manager whose values go elsewhere when they are decoded, but for 10 bytes."""

    def disperse(key: object, value: object, nbytes: int) -> tuple[object, int]:
        kit.elsewhere[key] = value, nbytes
        return Rest(), 10

    kit.manager.disperse_by(disperse)
    return kit


class Rest:
    """What is left of a value."""


def on_device(number: int = 1) -> Encoded:
    return replace(encoded(number), device_nbytes=NBYTES - 10)


@pytest.mark.parametrize("spilled", [False, True])
def test_what_it_has_on_a_device_goes_there_when_it_is_decoded(dispersing: Kit, spilled: bool) -> None:
    kit = dispersing
    kit.manager.store_encoded("x", on_device(3))
    kit.manager.store_encoded("y", encoded(4))
    if spilled:
        kit.manager.limits.evict_all()
    assert (kit.manager.arriving_nbytes("x"), kit.manager.arriving_nbytes("y")) == (NBYTES - 10, 0)
    assert not kit.elsewhere
    rest = kit.manager.get("x")
    assert type(rest) is Rest
    assert kit.manager.get("x") is rest
    assert type(kit.manager.get("y")) is np.ndarray  # nothing of it is on a device
    np.testing.assert_array_equal(kit.elsewhere["x"][0], value(3))
    assert kit.elsewhere["x"][1] == NBYTES
    assert list(kit.elsewhere) == ["x"]
    assert kit.manager.arriving_nbytes("x") == 0
    assert kit.manager.memory_total() == 10 + NBYTES
    # Its record, if there is one, would bring it back once more.
    assert kit.store.statistics().records == (1 if spilled else 0)
    kit.manager.limits.evict_all()
    assert kit.manager.get("x") is rest
    assert kit.manager.memory_total() == 10
    assert kit.manager.statistics().unspillable == 1


def test_it_is_decoded_while_it_is_written(dispersing: Kit) -> None:
    kit = dispersing
    gate = kit.store.before["write"] = Gate()
    kit.manager.store_encoded("x", on_device(3))
    with ThreadPoolExecutor(1) as threads:
        eviction = threads.submit(kit.manager.limits.evict_all)
        assert gate.arrived.acquire(timeout=TIMEOUT)
        rest = kit.manager.get("x")
        kit.manager.validate()
        gate.open()
        eviction.result(TIMEOUT)
    assert kit.manager.get("x") is rest
    assert kit.manager.memory_total() == 10
    assert kit.store.statistics().records == 0


@pytest.mark.parametrize("spilled", [False, True])
def test_it_is_passed_on_as_what_it_is(dispersing: Kit, spilled: bool) -> None:
    kit = dispersing
    kit.manager.store_encoded("x", on_device(3))
    if spilled:
        kit.manager.limits.evict_all()
    found = exported(kit.manager, "x")["x"]
    assert (type(found), found.nbytes, found.device_nbytes) == (Encoded, NBYTES, NBYTES - 10)
    assert not kit.elsewhere


@pytest.mark.fault("device memory runs out", on="disk→host", outcome="an error names it; not lost")
@pytest.mark.parametrize("spilled", [False, True])
def test_no_room_on_the_device_is_said_of_the_key_and_may_pass(dispersing: Kit, spilled: bool) -> None:
    kit = dispersing
    loads = kit.serializer.loads
    kit.manager.store_encoded("x", on_device(3))
    if spilled:
        kit.manager.limits.evict_all()

    def fail(header: bytes, frames: object) -> object:
        raise MemoryError("full")

    kit.serializer.loads = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match=r"value of 'x'.* 790 bytes on the device.*full"):
        kit.manager.get("x")
    kit.serializer.loads = loads  # type: ignore[method-assign]
    assert kit.manager.arriving_nbytes("x") == NBYTES - 10
    assert type(kit.manager.get("x")) is Rest


def test_a_closed_manager_still_decodes_what_it_has(dispersing: Kit) -> None:
    kit = dispersing
    kit.manager.store_encoded("x", on_device(3))
    kit.manager.close()
    np.testing.assert_array_equal(kit.manager.get("x"), value(3))
    assert not kit.elsewhere
