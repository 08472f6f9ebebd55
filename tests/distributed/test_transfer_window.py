"""What bounds the bytes under way: first come first served, nothing lost when somebody gives up."""

from __future__ import annotations

import asyncio

import pytest
from distributed.utils_test import gen_test

from gpuspill.distributed.wire import SendBuffer


async def turns():
    """Let everybody who can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Tasks that want bytes, in the order in which they came."""

    def __init__(self, window, peer=None):
        self.window = window
        self.peer = peer
        self.tasks = []

    async def ask(self, *sizes):
        for nbytes in sizes:
            self.tasks.append(asyncio.create_task(self.window.take(nbytes, self.peer)))
            await turns()

    def give_back(self, *numbers):
        for number in numbers:
            self.tasks[number].result().release()

    @property
    def served(self):
        return [number for number, task in enumerate(self.tasks) if task.done() and not task.cancelled()]


@gen_test()
async def test_what_fits_goes_at_once():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(4, 6)
    assert line.served == [0, 1]
    assert window.used == 10


@gen_test()
async def test_first_come_first_served():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(8, 5, 1, 4)
    assert line.served == [0]  # the third would fit
    line.give_back(0)
    await turns()
    assert line.served == [0, 1, 2, 3]
    assert window.used == 10


@gen_test()
async def test_who_comes_later_does_not_overtake():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(8, 5)
    line.give_back(0)  # the second has its turn now but has not run yet
    late = asyncio.create_task(window.take(6))
    await turns()
    assert line.served == [0, 1]
    assert not late.done()
    line.give_back(1)
    await late
    assert window.used == 6


@pytest.mark.parametrize("before", [0, 1])
@gen_test()
async def test_what_is_too_large_goes_alone(before):
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(*[1] * before, 50, 1)
    if before:
        assert line.served == [0]
        line.give_back(0)
        await turns()
    assert line.served[-1] == before
    assert window.used == 50
    line.give_back(before)
    await turns()
    assert window.used == 1


@pytest.mark.parametrize("position", [0, 1, 2])
@gen_test()
async def test_giving_up_in_the_line(position):
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(10, 4, 3, 3)
    line.tasks[1 + position].cancel()
    await turns()
    assert line.served == [0]
    line.give_back(0)
    await turns()
    left = [1 + number for number in range(3) if number != position]
    assert line.served == [0, *left]
    line.give_back(*left)
    await turns()
    assert window.used == 0
    assert all(task.done() for task in line.tasks)


@gen_test()
async def test_giving_up_lets_those_behind_pass():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(5, 8, 5)
    line.tasks[1].cancel()
    await turns()
    assert line.served == [0, 2]
    assert window.used == 10


@gen_test()
async def test_giving_up_in_the_moment_of_the_turn():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(10, 8, 8)
    line.give_back(0)  # it is the turn of the second, which has not run yet
    assert window.used == 8
    line.tasks[1].cancel()
    await turns()
    assert line.served == [0, 2]
    assert window.used == 8
    line.give_back(2)
    assert window.used == 0


@gen_test()
async def test_giving_up_before_it_was_begun():
    window = SendBuffer(10, share=10)
    task = asyncio.create_task(window.take(5))
    task.cancel()
    await turns()
    assert window.used == 0


@gen_test()
async def test_all_give_up_at_once():
    window = SendBuffer(10, share=10)
    line = Line(window)
    await line.ask(10, *[3] * 20)
    for task in line.tasks[1:]:
        task.cancel()
    line.give_back(0)
    await turns()
    assert window.used == 0
    await line.ask(10)
    assert window.used == 10


@gen_test()
async def test_only_buffers_are_remembered_when_they_are_written():
    """Memory of the file goes when it is written. Buffers stay, to be used again."""
    window = SendBuffer(1000)
    (await window.take(400)).release()
    assert window.lately() == 0
    slot = await window.take(320)
    window.buffered()
    slot.release()
    assert window.lately() == 300
    remembered = [window.lately() for _ in range(200)]
    assert remembered == sorted(remembered, reverse=True)
    assert remembered[10] < 160
    assert remembered[-1] == 0


class Later:
    """What the window has asked the event loop to do when time has passed."""

    def __init__(self, monkeypatch):
        self.handles = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def caught(delay, callback, *args):
            if getattr(callback, "__self__", None).__class__ is not SendBuffer:
                return call_later(delay, callback, *args)
            self.handles.append(asyncio.TimerHandle(0, callback, args, loop))
            return self.handles[-1]

        monkeypatch.setattr(loop, "call_later", caught)

    async def pass_time(self):
        """Let everything fall due."""
        handles, self.handles = self.handles, []
        for handle in handles:
            if not handle.cancelled():
                handle._run()
        await turns()


def test_a_peer_that_does_not_read_stops_no_one_else(monkeypatch):
    """It holds no more than its share, and after a time that counts against itself only."""

    @gen_test()
    async def test():
        later = Later(monkeypatch)
        window = SendBuffer(10)
        stuck, other = Line(window, "stuck"), Line(window, "other")
        await stuck.ask(3, 2, 1)
        assert stuck.served == [0, 1]  # half of it
        await other.ask(5, 3)
        assert other.served == [0]
        other.give_back(0)
        await turns()
        assert other.served == [0, 1]
        await other.ask(4)
        assert other.served == [0, 1]
        await later.pass_time()  # neither has read
        assert other.served == [0, 1]  # it is over its own share
        assert stuck.served == [0, 1]
        third = Line(window, "third")
        await third.ask(5, 20)
        assert third.served == [0]
        other.give_back(1)
        await turns()
        assert other.served == [0, 1, 2]
        stuck.give_back(0)
        await turns()
        assert stuck.served == [0, 1, 2]  # overdue bytes of its own are gone
        third.give_back(0)
        other.give_back(2)
        stuck.give_back(1, 2)
        await turns()
        assert third.served == [0, 1]
        third.give_back(1)
        assert window.used == window._overdue == 0
        assert not window._peers

    test()


@gen_test()
async def test_peers_take_turns():
    window = SendBuffer(10)
    lines = [Line(window, name) for name in "ab"]
    holds = await window.take(10, "c")
    await lines[0].ask(3, 3, 3)
    await lines[1].ask(3)
    holds.release()
    await turns()
    assert [line.served for line in lines] == [[0], [0]]  # each has its share
    lines[0].give_back(0)
    await turns()
    assert [line.served for line in lines] == [[0, 1], [0]]


@gen_test()
async def test_what_turns_out_to_be_less_makes_room():
    window = SendBuffer(10, share=10)
    line = Line(window)
    slot = await window.take(8)
    await line.ask(6)
    assert line.served == []
    slot.resize(9)
    slot.resize(2)
    await turns()
    assert line.served == [0]
    assert window.used == 8
    slot.release()
    line.give_back(0)
    assert window.used == 0
