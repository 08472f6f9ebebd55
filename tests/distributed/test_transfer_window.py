"""What bounds the bytes under way: first come first served, nothing lost when somebody gives up."""

from __future__ import annotations

import asyncio

import pytest
from distributed.utils_test import gen_test

from gpuspill.distributed.wire import Window


async def turns():
    """Let everybody who can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Tasks that want bytes, in the order in which they came."""

    def __init__(self, window):
        self.window = window
        self.tasks = []

    async def ask(self, *sizes):
        for nbytes in sizes:
            self.tasks.append(asyncio.create_task(self.window.take(nbytes)))
            await turns()

    @property
    def served(self):
        return [number for number, task in enumerate(self.tasks) if task.done() and not task.cancelled()]


@gen_test()
async def test_what_fits_goes_at_once():
    window = Window(10)
    line = Line(window)
    await line.ask(4, 6)
    assert line.served == [0, 1]
    assert window.used == 10


@gen_test()
async def test_first_come_first_served():
    window = Window(10)
    line = Line(window)
    await line.ask(8, 5, 1, 4)
    assert line.served == [0]  # the third would fit
    window.give_back(8)
    await turns()
    assert line.served == [0, 1, 2, 3]
    assert window.used == 10


@gen_test()
async def test_who_comes_later_does_not_overtake():
    window = Window(10)
    line = Line(window)
    await line.ask(8, 5)
    window.give_back(8)  # the second has its turn now but has not run yet
    late = asyncio.create_task(window.take(6))
    await turns()
    assert line.served == [0, 1]
    assert not late.done()
    window.give_back(5)
    await late
    assert window.used == 6


@pytest.mark.parametrize("before", [0, 1])
@gen_test()
async def test_what_is_too_large_goes_alone(before):
    window = Window(10)
    line = Line(window)
    await line.ask(*[1] * before, 50, 1)
    if before:
        assert line.served == [0]
        window.give_back(1)
        await turns()
    assert line.served[-1] == before
    assert window.used == 50
    window.give_back(50)
    await turns()
    assert window.used == 1


@pytest.mark.parametrize("position", [0, 1, 2])
@gen_test()
async def test_giving_up_in_the_line(position):
    window = Window(10)
    line = Line(window)
    await line.ask(10, 4, 3, 3)
    line.tasks[1 + position].cancel()
    await turns()
    assert line.served == [0]
    window.give_back(10)
    await turns()
    left = [size for number, size in enumerate((4, 3, 3)) if number != position]
    assert line.served == [0, *(1 + number for number in range(3) if number != position)]
    for size in left:
        window.give_back(size)
    await turns()
    assert window.used == 0
    assert all(task.done() for task in line.tasks)


@gen_test()
async def test_giving_up_lets_those_behind_pass():
    window = Window(10)
    line = Line(window)
    await line.ask(5, 8, 5)
    line.tasks[1].cancel()
    await turns()
    assert line.served == [0, 2]
    assert window.used == 10


@gen_test()
async def test_giving_up_in_the_moment_of_the_turn():
    window = Window(10)
    line = Line(window)
    await line.ask(10, 8, 8)
    window.give_back(10)  # it is the turn of the second, which has not run yet
    assert window.used == 8
    line.tasks[1].cancel()
    await turns()
    assert line.served == [0, 2]
    assert window.used == 8
    window.give_back(8)
    assert window.used == 0


@gen_test()
async def test_giving_up_before_it_was_begun():
    window = Window(10)
    task = asyncio.create_task(window.take(5))
    task.cancel()
    await turns()
    assert window.used == 0


@gen_test()
async def test_all_give_up_at_once():
    window = Window(10)
    line = Line(window)
    await line.ask(10, *[3] * 20)
    for task in line.tasks[1:]:
        task.cancel()
    window.give_back(10)
    await turns()
    assert window.used == 0
    await line.ask(10)
    assert window.used == 10


@gen_test()
async def test_only_buffers_are_remembered_when_they_are_written():
    """Memory of the file goes when it is written. Buffers stay, to be used again."""
    window = Window(1000)
    await window.take(400)
    window.give_back(400)
    assert window.lately() == 0
    await window.take(320)
    window.buffered()
    window.give_back(320)
    assert window.lately() == 300
    remembered = [window.lately() for _ in range(200)]
    assert remembered == sorted(remembered, reverse=True)
    assert remembered[10] < 160
    assert remembered[-1] == 0
