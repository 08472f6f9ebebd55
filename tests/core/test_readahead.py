"""How much is read ahead: less after it was for nothing, more again when it would have helped."""

import pytest

from gpuspill.core.readahead import LEAST, MOST, ReadAhead
from gpuspill.core.state import SpillState

ROOM = 1200


def test_a_share_of_the_room():
    ahead = ReadAhead()
    assert ahead.allows(400, ROOM)
    ahead.begin(1, 300)
    assert ahead.allows(100, ROOM)
    assert not ahead.allows(101, ROOM)
    assert ahead.allows(10**12, None)
    ahead.used(1)
    assert ahead.allows(400, ROOM)
    assert ahead.nbytes == 0


def test_one_value_at_a_time_however_large_until_that_was_for_nothing():
    ahead = ReadAhead()
    assert ahead.allows(1000, ROOM)
    for pid in range(3):
        ahead.begin(pid, 1000)
        assert not ahead.allows(1, ROOM)
        ahead.evicted(pid)
    assert not ahead.allows(1000, ROOM)
    assert ahead.share == MOST / 8
    for _ in range(8):
        ahead.missed()  # it would have been of use
    assert ahead.allows(1000, ROOM)


def test_the_share_falls_fast_and_rises_slowly_within_bounds():
    ahead = ReadAhead()
    for pid in range(20):
        ahead.begin(pid, 1)
        ahead.evicted(pid)
    assert ahead.share == LEAST
    ahead.begin(99, 1)
    ahead.used(99)
    assert LEAST < ahead.share < 2 * LEAST
    for _ in range(100):
        ahead.missed()
    assert ahead.share == MOST


@pytest.mark.parametrize("forget", ["used", "evicted", "gone"])
def test_what_was_not_read_ahead_does_not_matter(forget):
    ahead = ReadAhead()
    getattr(ahead, forget)(7)
    assert (ahead.share, ahead.nbytes) == (MOST, 0)


def spilled(*keys):
    state = SpillState(limit=1000)
    pids = {key: state.insert(key, 100) for key in keys}
    while (pid := state.spills.next(force=True)) is not None:
        state.spills.reserve_record(pid, 100)
        state.spills.complete(pid, 100, force=True)
    return state, pids


def test_no_more_is_begun_than_the_share():
    state, pids = spilled(*"abcdef")
    begun = [state.restores.begin_ahead(pids[key], (0,)) for key in "abcdef"]
    assert begun == [True] * 3 + [False] * 3
    state.validate()
    state.restores.complete(pids["a"])
    state.touch(pids["a"])
    assert state.restores.begin_ahead(pids["d"], (0,))
    state.validate()


@pytest.mark.parametrize("end", ["touched", "pinned", "deleted", "deleted while it is read", "failed", "lost"])
def test_what_ends_it(end):
    state, pids = spilled("a")
    pid = pids["a"]
    assert state.restores.begin_ahead(pid, (0,))
    assert state.read_ahead.nbytes == 100
    if end == "deleted while it is read":
        state.remove("a")
    if end in ("failed", "lost"):
        state.restores.fail(pid, lost=end == "lost")
    else:
        state.restores.complete(pid)
    if end == "touched":
        state.touch(pid)
    elif end == "pinned":
        state.pin(pid)
    elif end == "deleted":
        state.remove("a")
    assert state.read_ahead.nbytes == 0
    assert state.read_ahead.share == MOST
    state.validate()


def test_evicted_unused_is_waste():
    state, pids = spilled("a")
    assert state.restores.begin_ahead(pids["a"], (0,))
    state.restores.complete(pids["a"])
    state.set_limits(0, None)
    assert state.spills.next() is None  # dropped: it has a record
    assert state.read_ahead.share == MOST / 2
    state.validate()
