"""Settings for tests that run pytest inside pytest."""

import pytest


@pytest.fixture(autouse=True)
def _lean_inner_runs(monkeypatch):
    # These two plugins are imported anew for each inner run and take longer than everything else in it.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
