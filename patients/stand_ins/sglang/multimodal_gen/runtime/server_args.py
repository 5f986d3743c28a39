"""Instead of sglang's own, which imports every model and server: the three arguments that the mixin reads."""

from dataclasses import dataclass
from typing import Any


@dataclass
class ServerArgs:
    """*tuning* is what ``layerwise_tuning_for`` of the release gives: prefetch, resident layers, policy, and more."""

    tuning: tuple[Any, ...] = ()
    performance_mode: str = "memory"
    pin_cpu_memory: bool = True

    def layerwise_tuning_for(self, component_name: str | None, *, dit_group: bool) -> tuple[Any, ...]:
        return self.tuning
