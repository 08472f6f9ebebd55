import pytest

pytest.register_assert_rewrite("gpuspill.testing.store_tests")
