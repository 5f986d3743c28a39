"""Settings of the repository's own test suite."""

import os

# One thread for each test process, because several run side by side. torch, imported later, reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]
