"""Decisions of the core that random walks found wrong once, one at a time."""

from gpuspill.core.budget import Kind
from gpuspill.core.state import SpillState


def test_who_waits_is_not_let_go_between_two_kinds_of_candidates():
    """What somebody holds turns out to be of no use, but what could not be written before may go now."""
    held = set()
    state = SpillState(limit=100, held=held.__contains__)
    refused = state.insert("refused", 60)
    assert state.spills.next(force=True) == refused
    state.spills.fail(refused, forever=False)
    candidate = state.insert("candidate", 60)
    waiting = state.room.reserve(30, Kind.TASK)
    assert not waiting.granted
    held.add(candidate)
    state.retry()
    assert not waiting.granted
    assert state.counters.overruns == 0
    state.validate()
    assert state.spills.next() == refused
    state.spills.reserve_record(refused, 60)
    state.spills.complete(refused, 60)
    state.validate()
    assert waiting.granted
    assert not waiting.overrun


def test_a_record_of_memory_that_only_views_are_left_of_is_given_up_for_others():
    """Its key went while it was written, and a view keeps it in memory: what was written is redundant."""
    state = SpillState(limit=100, disk_limit=60)
    base = state.insert("base", 50)
    assert state.spills.next(force=True) == base
    state.insert("view", 10, parts=(base,), apart_nbytes=60)
    state.remove("base")
    assert state.spills.reserve_record(base, 50)
    state.spills.complete(base, 50)
    state.validate()
    state.insert_below("other", 30, 30)
    state.validate()
    assert state.effects.take().deleted == [base]


def test_memory_that_is_written_for_itself_is_not_counted_again_with_a_view():
    """Both are on their way out, and the base leaves with the view: its bytes are freed once."""
    state = SpillState(limit=100)
    base = state.insert("base", 50)
    assert state.spills.next(force=True) == base
    view = state.insert("view", 10, parts=(base,), apart_nbytes=60)
    state.remove("base")
    assert state.spills.next(force=True) == view
    assert state.memory.leaving == 60
    state.validate()
    for pid in (view, base):
        state.spills.complete(pid, 60, force=True)
        state.validate()
    assert state.memory.leaving == 0
    state.release_parts(state.effects.take().released_parts)
    state.validate()
    assert state.memory.used == 0


def test_room_that_is_made_for_a_task_is_not_given_to_a_transfer_behind_it():
    state = SpillState(limit=100)
    clean = state.insert("clean", 30)
    assert state.spills.next(force=True) == clean
    state.spills.complete(clean, 30)
    dirty = state.insert("dirty", 60)
    state.touch(clean)
    transfer = state.room.reserve(20, Kind.TRANSFER)
    assert state.spills.next() == dirty
    assert not transfer.granted
    task = state.room.reserve(
        100, Kind.TASK
    )  # for which the clean value is dropped, and which has to wait all the same
    assert not state.find("clean").resident
    assert not task.granted
    assert not transfer.granted
    state.effects.take()
    state.spills.complete(dirty, 60)
    assert state.effects.take().granted[0] is task
    state.validate()
