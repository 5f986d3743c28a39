"""Classes of torch that come in one kind per device, and that only C++ back ends can add a kind to."""

from __future__ import annotations

from typing import Any

import torch


def named_device(device: Any) -> torch.device | None:
    """The device that an argument names; ``None`` when it names none. An int is an index of the current accelerator."""
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        return torch.device("fakegpu", device)
    return torch.device(device)


class ByDevice(type):
    """Metaclass of a stand-in for a class of torch: calling it makes *fake* for device type ``fakegpu``, else *native*;
    *unnamed* is the one that torch makes when no device is named. ``isinstance`` and ``issubclass`` answer as for
    *native*."""

    native: type
    fake: type
    unnamed: type

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kinds: type) -> ByDevice:
        return super().__new__(mcs, name, bases, {**namespace, **kinds})

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kinds: type) -> None:
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "device_type" in kwargs:  # by the numbers that torch knows an existing one by
            return cls.native(*args, **kwargs)
        device = kwargs.get("device", args[0] if args else None)
        if device is None:
            return cls.unnamed(*args, **kwargs)
        named = named_device(device) if isinstance(device, int | str | torch.device) else None
        return (cls.fake if named is not None and named.type == "fakegpu" else cls.native)(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.native)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.native)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native, name)
