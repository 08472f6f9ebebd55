from gpuspill.core.policy import NextUsePolicy
from gpuspill.testing.policy_tests import PolicyTests


class TestNextUsePolicy(PolicyTests):
    make = NextUsePolicy
