"""``torch.fakegpu.amp``: mixed precision that knows its device, as accelerate asks of a back end from outside."""

from __future__ import annotations

from typing import Any

import torch


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("fakegpu", …)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__("fakegpu", *args, **options)


class autocast(torch.amp.autocast):
    """``torch.amp.autocast("fakegpu", …)``, with the defaults of ``torch.cuda.amp.autocast``."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool | None = True
    ) -> None:
        super().__init__("fakegpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
