pytest_plugins = ["gpuspill.testing.pytest_plugin", "pytester"]
