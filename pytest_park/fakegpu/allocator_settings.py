"""Settings of the allocator in the form in which torch takes them: ``"expandable_segments:True,…"``."""

from __future__ import annotations

import os
import warnings

#: Where torch looks, the first that is set counts (``c10/core/AllocatorConfig.cpp``).
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expandable_segments(settings: str) -> bool | None:
    """What *settings* say about expandable segments, if anything. Raises ``NotImplementedError`` for other settings,
    which the model of the allocator does not have, and ``ValueError`` for what is no setting."""
    found, unknown = _read(settings)
    if unknown:
        raise NotImplementedError(f"fakegpu's allocator has the setting expandable_segments only, not {unknown}")
    return found


def expandable_segments_of_environment() -> bool:
    """The same as the environment has it for torch's own allocators; others than this one are warned about."""
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None:
        return False
    try:
        found, unknown = _read(os.environ[name])
    except ValueError as error:
        raise ValueError(f"{name} in the environment: {error}") from None
    if unknown:
        warnings.warn(f"{name}: fakegpu's allocator does not have {unknown}; these are ignored", stacklevel=4)
    return bool(found)


def _read(settings: str) -> tuple[bool | None, str]:
    found: bool | None = None
    unknown = []
    for setting in filter(None, settings.replace(" ", "").split(",")):
        name, _, value = setting.partition(":")
        if name != "expandable_segments":
            unknown.append(setting)
        elif value not in ("True", "False"):
            raise ValueError(f"expandable_segments is True or False; got {setting!r}")
        else:
            found = value == "True"
    return found, ", ".join(unknown)
