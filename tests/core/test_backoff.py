"""The wait before something is tried again."""

from gpuspill.core.backoff import Backoff


def waits(backoff: Backoff, now: float, count: int) -> list[float]:
    found = []
    for _ in range(count):
        backoff.failed(now, again=True)
        found.append(backoff.left(now))
        now += backoff.left(now)
    return found


def test_it_doubles_up_to_a_limit():
    backoff = Backoff(1.0, 5.0)
    assert backoff.left(0.0) <= 0
    assert waits(backoff, 0.0, 5) == [1, 2, 4, 5, 5]


def test_several_failures_of_one_attempt_count_once():
    backoff = Backoff(1.0, 8.0)
    backoff.start(0.0)
    for now in (0.2, 0.5):
        backoff.failed(now, again=True)
        assert backoff.left(now) == 1.0, "it begins when the attempt has ended"
    backoff.start(1.5)
    assert backoff.left(1.5) == 2.0


def test_what_fails_for_the_first_time_does_not_put_off_what_waits():
    backoff = Backoff(1.0, 8.0)
    backoff.failed(0.0, again=False)
    for now in (0.25, 0.5, 0.75):
        backoff.failed(now, again=False)
        assert backoff.left(now) == 1.0 - now
    backoff.failed(1.0, again=False)
    assert backoff.left(1.0) == 2.0, "it still does not work"


def test_relenting_shortens_a_wait_and_never_makes_it_longer():
    backoff = Backoff(1.0, 8.0)
    waits(backoff, 0.0, 4)  # the last one begins at 7
    backoff.relent(8.0)
    assert backoff.left(8.0) == 1.0
    backoff.relent(8.5)
    assert backoff.left(8.5) == 0.5
    assert waits(backoff, 9.0, 2) == [1, 2]


def test_success_ends_the_wait():
    backoff = Backoff(1.0, 8.0)
    waits(backoff, 0.0, 4)
    backoff.succeeded()
    assert backoff.left(7.0) <= 0
    assert waits(backoff, 7.0, 2) == [1, 2]
