import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuspill.errors import QuotaExceeded
from gpuspill.storage.quota import Quota


def test_message_says_what_to_do():
    quota = Quota(1000, where="/some/place")
    quota.reserve(300).commit()
    quota.reserve(200)
    with pytest.raises(QuotaExceeded) as info:
        quota.reserve(501)
    for part in ("501", "1,000", "300", "200", "/some/place", "raise the quota"):
        assert part in str(info.value)
    quota.reserve(500)


def test_negative():
    with pytest.raises(ValueError, match="at least 0"):
        Quota(-1)


def test_zero_is_a_quota():
    quota = Quota(0)
    quota.reserve(0).commit()
    with pytest.raises(QuotaExceeded):
        quota.reserve(1)


def test_no_limit():
    quota = Quota(None)
    reservation = quota.reserve(10**18)
    assert not quota.is_scarce(10**18, 0.5)
    reservation.commit()
    assert quota.levels() == (10**18, 0)


def test_release_after_commit_does_nothing():
    quota = Quota(100)
    reservation = quota.reserve(60)
    reservation.commit()
    reservation.release()
    assert quota.levels() == (60, 0)


def test_changing_the_limit():
    quota = Quota(None)
    quota.reserve(60).commit()
    held = quota.reserve(60)
    quota.set_limit(100)
    with pytest.raises(QuotaExceeded, match="100 bytes"):
        quota.reserve(1)
    # More than the limit is there; what is there may shrink and go, but not grow.
    with pytest.raises(QuotaExceeded):
        held.resize(61)
    held.resize(40)
    held.commit()
    quota.give_back(60)
    quota.reserve(60)
    quota.set_limit(None)
    quota.reserve(10**9)
    with pytest.raises(ValueError, match="at least 0"):
        quota.set_limit(-1)


def test_growing_fails_and_keeps_what_was_held():
    quota = Quota(100)
    reservation = quota.reserve(60)
    with pytest.raises(QuotaExceeded):
        reservation.resize(101)
    assert quota.levels() == (0, 60)
    reservation.resize(100)
    reservation.release()
    assert quota.levels() == (0, 0)


@pytest.mark.parametrize(("nbytes", "scarce"), [(0, False), (40, False), (41, True), (90, True), (200, True)])
def test_scarce(nbytes, scarce):
    quota = Quota(100)
    quota.reserve(30).commit()
    quota.reserve(20)
    assert quota.is_scarce(nbytes, 0.1) is scarce


def test_threads_never_exceed_it_together():
    quota = Quota(1000)
    barrier = threading.Barrier(8)
    peak = []

    def work(_):
        barrier.wait(60)
        for _ in range(300):
            try:
                reservation = quota.reserve(200)
            except QuotaExceeded:
                continue
            peak.append(sum(quota.levels()))
            reservation.commit()
            peak.append(sum(quota.levels()))
            quota.give_back(200)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert 200 <= max(peak) <= 1000
    assert quota.levels() == (0, 0)


class QuotaMachine(RuleBasedStateMachine):
    """Against two numbers."""

    def __init__(self):
        super().__init__()
        self.quota = Quota(100)
        self.held = []
        self.committed = []

    @property
    def free(self):
        return 100 - sum(nbytes for _, nbytes in self.held) - sum(self.committed)

    @rule(nbytes=st.integers(0, 120))
    def reserve(self, nbytes):
        if nbytes <= self.free:
            self.held.append((self.quota.reserve(nbytes), nbytes))
        else:
            with pytest.raises(QuotaExceeded):
                self.quota.reserve(nbytes)

    @precondition(lambda self: self.held)
    @rule(nbytes=st.integers(0, 120))
    def resize(self, nbytes):
        reservation, before = self.held[-1]
        if nbytes - before <= self.free:
            reservation.resize(nbytes)
            self.held[-1] = reservation, nbytes
        else:
            with pytest.raises(QuotaExceeded):
                reservation.resize(nbytes)

    @precondition(lambda self: self.held)
    @rule(commit=st.booleans())
    def end(self, commit):
        reservation, nbytes = self.held.pop(0)
        if commit:
            reservation.commit()
            self.committed.append(nbytes)
        reservation.release()
        reservation.release()

    @precondition(lambda self: self.committed)
    @rule()
    def give_back(self):
        self.quota.give_back(self.committed.pop())

    @invariant()
    def agrees(self):
        assert self.quota.levels() == (sum(self.committed), sum(nbytes for _, nbytes in self.held))


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=40, deadline=None)
