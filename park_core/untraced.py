"""Apart from ``torch.compile`` and ``torch.func``: work in a forward, and a module before it was compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = ["uncompiled", "untraced"]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` made a compiled one of; any other module itself."""
    return getattr(module, "_orig_mod", module)


def untraced(work: Callable[..., object], *args: Any) -> None:
    """Do the work as if the caller was not inside of ``torch.compile``, ``torch.func.grad``, ``jvp`` or ``vmap``."""
    if "torch._dynamo" in sys.modules:  # otherwise nobody compiles, and it takes seconds to import
        torch.compiler.disable(_untransformed)(work, *args)
    else:
        _untransformed(work, *args)


def _untransformed(work: Callable[..., object], *args: Any) -> None:
    with temporarily_clear_interpreter_stack():  # inside of a transform torch.empty gives tensors without a storage
        work(*args)
