"""Settings of the repository's own test suite."""

import os

# One thread for each test process, because several run side by side. torch reads it when it is imported, which is later.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]
