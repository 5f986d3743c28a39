"""Settings of the repository's own test suite."""

pytest_plugins = ["pytester"]
