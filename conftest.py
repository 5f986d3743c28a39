"""Settings of the repository's own test suite."""

import os

# One thread for each test process, because several run side by side. torch, imported later, reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where somebody has set torch's allocator up for a GPU, the fake one would follow.
for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
    os.environ.pop(name, None)

pytest_plugins = ["pytester"]
