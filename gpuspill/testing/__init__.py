"""The test kit, for tests of gpuspill and of stores, devices and policies of others.

:mod:`~gpuspill.testing.store_tests`, :mod:`~gpuspill.testing.devices`,
:mod:`~gpuspill.testing.policy_tests` and what they use know the ports only, not what stands behind
them.

======================================== =========================================================================
:mod:`~gpuspill.testing.pytest_option`   pytest's setting that switches on what follows
:mod:`~gpuspill.testing.pytest_plugin`   fixture that fails a test which leaves something behind; scratch space
:mod:`~gpuspill.testing.leaks`           what it looks for
:mod:`~gpuspill.testing.clock`           a clock that a test moves
:mod:`~gpuspill.testing.oracle`          what the core has to guarantee, judged by a model that shares no code with it
:mod:`~gpuspill.testing.machines`        any order of the core's events, each judged by the oracle
:mod:`~gpuspill.testing.managers`        a manager without threads, which does what it is told
:mod:`~gpuspill.testing.manager_machine` any order of a manager's events, also in the middle of its
moves
:mod:`~gpuspill.testing.manager_events`  these events
:mod:`~gpuspill.testing.manager_model`   what the manager should hold and deliver meanwhile
:mod:`~gpuspill.testing.interruptions`   what happens in the middle of an operation of a store
:mod:`~gpuspill.testing.walks`           running these for a given number of steps
:mod:`~gpuspill.testing.stores`          stores in memory, with faults, with gates
:mod:`~gpuspill.testing.memory_store`    stores whose every operation waits for the test, or for what it does meanwhile
:mod:`~gpuspill.testing.store_tests`     what every store has to pass
:mod:`~gpuspill.testing.devices`         what every device, and every adapter for arrays, has to pass
:mod:`~gpuspill.testing.policy_tests`    what every eviction policy has to pass
======================================== =========================================================================

Nothing else in gpuspill imports this package.
"""
