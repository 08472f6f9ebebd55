import pytest

pytest.register_assert_rewrite(
    "gpuspill.testing.device_arrays",
    "gpuspill.testing.device_copies",
    "gpuspill.testing.device_memory",
    "gpuspill.testing.past_host_tests",
)
