"""Settings for tests that run pytest inside pytest."""

import os

import pytest


@pytest.fixture(autouse=True)
def _inner_runs_of_their_own(monkeypatch):
    # Workers of xdist say so in their environment; pytest-benchmark in the inner run would believe to be in one, too.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    # These two plugins are imported anew for each inner run and take longer than everything else in it.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
