"""A program with a busy store that starts processes in any way: ``python forking.py WHAT HOW ROUNDS``.

Children use what they inherited. Prints ``whole`` if all of them ended well and nothing of the parent's was changed.
"""

import faulthandler
import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial

import numpy as np

import gpuspill
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.parking import Parked
from gpuspill.errors import ManagerClosed

KEYS = 24
THREADS = 3  # a part of the keys each
N = 2_500  # 20 KB each
LIMIT = 8 * N * 8  # a third of them


def value(number):
    return np.full(N, float(number))


def check(found, number):
    assert found.shape == (N,), found.shape
    assert (found == number).all(), (found[0], number)


def load(store, seed, stop, errors):
    """Store, read, park and delete until told to stop.

    Each thread reads keys of its own. What two hold at a time may leave memory and be taken back, and then the store
    gives up its record, which a child cannot read any more.
    """
    try:
        turn = 0
        while not stop.is_set():
            turn += 1
            key = f"load-{seed}-{turn % 6}"
            store[key] = value(turn)
            handle = Parked(value(-turn), store)
            check(store[key], turn)
            number = (seed + THREADS * turn) % KEYS
            check(store[f"key-{number}"], number)
            check(handle.resolve(), -turn)
            del store[key]
    except BaseException as error:
        errors.append(repr(error))
        raise


# -- what children do ------------------------------------------------------------------------------


def park(store, handles):
    parked = gpuspill.proxify(value(1))
    ours = [Parked(value(number), store) for number in range(10)]
    for number, handle in enumerate(ours):
        store[f"child-{number}"] = value(number)
        check(handle.resolve(), number)
        check(store[f"child-{number}"], number)
    check(gpuspill.unproxify(parked), 1)


def read(store, handles):
    for number in range(KEYS):
        check(store[f"key-{number}"], number)
        with handles[number] as found:
            check(found, 1000 + number)
        check(gpuspill.unproxify([handles[number]])[0], 1000 + number)


def delete(store, handles):
    store.clear()
    assert len(store) == 0


def drop(store, handles):
    handles.clear()
    gc.collect()
    store.settle_parked()
    assert f"key-{0}" in store


def close(store, handles):
    store.close()


def ask(store, handles):
    manager = store.manager
    keys = [f"key-{number}" for number in range(KEYS)]
    with manager.admission.admit("child", keys, 10 * LIMIT) as admission:
        assert admission.wait(60)
        found = manager.batch.materialize(admission)
    found.update((f"{key} again", value) for key, value in manager.batch.get_many(keys).result(60).items())
    for number, key in enumerate(keys):
        check(found[key], number)
        check(found[f"{key} again"], number)
    store.wait_for_room()
    manager.limits.set_limit(1, 1)
    manager.uses.prefetch(keys)
    manager.limits.evict_all()
    manager.limits.make_room(LIMIT)
    manager.statistics()
    store.statistics()
    manager.validate()


WHAT = {function.__name__: function for function in (park, read, delete, drop, close, ask)}


def child(what, how, store, handles, missed):
    try:
        WHAT[what](store, handles)
    except ManagerClosed as error:
        if "has removed it since" not in str(error):
            raise
        missed[0] += 1
    assert threading.active_count() == 1, threading.enumerate()
    if how == "_exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


def wait(pid, how):
    deadline = time.monotonic() + 120
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
            raise RuntimeError("a child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if how == "kill" else 0), status


# -- processes that libraries start ------------------------------------------------------------------

#: What a forked process finds here.
inherited = {}


def use_argument(number, handle):
    """In another process: use a handle that came along, pickled, and return one."""
    check(gpuspill.unproxify(handle), 1000 + number)
    return gpuspill.proxify(value(2000 + number))


def use(number, handle):
    """In another process: use a handle that came along, and what was inherited, if something was."""
    store, handles = inherited.get("store"), inherited.get("handles")
    if store is not None:
        check(store[f"key-{number}"], number)
        with handles[number] as found:
            check(found, 1000 + number)
        park(store, handles)
    return use_argument(number, handle)


def use_all(starmap, handles):
    for number, found in enumerate(starmap(list(enumerate(handles)))):
        check(gpuspill.unproxify(found), 2000 + number)


def multiprocess(method, store, handles):
    with multiprocessing.get_context(method).Pool(2) as pool:
        use_all(lambda tasks: pool.starmap(use, tasks, chunksize=1), handles)


def loky(store, handles):
    import joblib

    use_all(lambda tasks: joblib.Parallel(2)(joblib.delayed(use_argument)(*task) for task in tasks), handles)


def run_programs(store, handles):
    subprocess.run([sys.executable, "-c", "import gpuspill"], check=True)
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)  # forks in the old way


class Dataset:
    """For PyTorch, which forks its workers: reads inherited values and handles, and parks."""

    def __len__(self):
        return KEYS

    def __getitem__(self, number):
        found = gpuspill.unproxify(use(number, inherited["handles"][number]))
        return found[:10]


def torch(store, handles):
    from torch.utils.data import DataLoader

    for number, batch in enumerate(DataLoader(Dataset(), batch_size=None, num_workers=2)):
        assert (batch.numpy() == 2000 + number).all()


LIBRARIES = {
    "fork": partial(multiprocess, "fork"),
    "spawn": partial(multiprocess, "spawn"),
    "forkserver": partial(multiprocess, "forkserver"),
    "loky": loky,
    "subprocess": run_programs,
    "torch": torch,
}


def main(what, how, rounds):
    faulthandler.enable()
    directory = tempfile.mkdtemp()  # not a context: children that leave it would remove it
    store = build_store(Settings(device=None, compression=None), directory)
    store.manager.limits.set_limit(LIMIT, None)
    handles = [Parked(value(1000 + number), store) for number in range(KEYS)]
    for number in range(KEYS):
        store[f"key-{number}"] = value(number)
    inherited.update(store=store, handles=handles)
    stop, errors = threading.Event(), []
    threads = [threading.Thread(target=load, args=(store, seed, stop, errors), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    missed = mmap.mmap(-1, 1)
    for _ in range(rounds):
        if what == "library":
            LIBRARIES[how](store, handles)
            continue
        pid = os.fork()
        if not pid:
            child(what, how, store, handles, missed)
        wait(pid, how)
    while store.statistics().spills <= rounds and not errors:  # children may be faster than the parent's threads
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    # A thread of ours that the system lets stand holds its value: evicted and taken back, it has no record.
    assert missed[0] <= 1 + rounds // 20, missed[0]
    for number in range(KEYS):
        check(store[f"key-{number}"], number)
        check(handles[number].resolve(), 1000 + number)
    statistics = store.statistics()
    assert statistics.lost == 0, statistics
    assert statistics.spills > rounds, statistics
    store.manager.validate()
    store.close()
    os.rmdir(directory)
    print("whole")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
