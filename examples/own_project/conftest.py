"""Fail a test that leaves threads, descriptors, processes or spill files behind."""

pytest_plugins = ["gpuspill.testing.pytest_plugin"]
