"""The setting that switches :mod:`gpuspill.testing.pytest_plugin` on, by pytest's configuration.

pytest loads this file wherever gpuspill is installed (entry point ``pytest11``), so it does nothing
unless asked::

    [tool.pytest.ini_options]
    gpuspill_testing = true
"""

from __future__ import annotations

import pytest

PLUGIN = "gpuspill.testing.pytest_plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting."""
    parser.addini(
        "gpuspill_testing",
        "fail a test that leaves threads, file descriptors, child processes or spill files behind (gpuspill)",
        type="bool",
        default=False,
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the plugin before the command line is read, to which it adds an option."""
    if early_config.getini("gpuspill_testing"):
        early_config.pluginmanager.import_plugin(PLUGIN)
