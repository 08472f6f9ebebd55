"""The policies of gpuspill pass the suite that policies of others have to pass."""

from __future__ import annotations

import pytest

from gpuspill.core.policy import NextUsePolicy
from gpuspill.core.policy_guard import GuardedPolicy
from gpuspill.testing.policy_tests import PolicyTests


class TestNextUsePolicy(PolicyTests):
    make = NextUsePolicy


class TestGuardedPolicy(PolicyTests):
    def make(values):
        return GuardedPolicy(NextUsePolicy(values), pytest.fail)


class FailsAtTheFirst(NextUsePolicy):
    def insert(self, *args, **options):
        raise ZeroDivisionError


class TestAPolicyThatHasFailed(PolicyTests):
    def make(values):
        return GuardedPolicy(FailsAtTheFirst(values), lambda error: None)
