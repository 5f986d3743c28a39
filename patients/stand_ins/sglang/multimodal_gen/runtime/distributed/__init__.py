"""Instead of sglang's own, which imports kernels and communicators: one process, and the platform's current device."""

import torch
from sglang.multimodal_gen.runtime.platforms import current_platform


def get_local_torch_device() -> torch.device:
    return current_platform.get_local_torch_device()
