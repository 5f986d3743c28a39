"""What can go wrong with parking, each with what to do about it in its message."""

from __future__ import annotations

__all__ = ["LayerNameError", "ParkError", "StaleMappingError", "WeightsParkedError"]


class ParkError(RuntimeError):
    """Parking, restoring or streaming could not do what it was asked; nothing was changed."""


class LayerNameError(ParkError, ValueError):
    """A layer name does not lead to a list of modules."""


class StaleMappingError(ParkError):
    """A checkpoint file that serves as the host copy of a weight changed or vanished."""


class WeightsParkedError(ParkError):
    """A weight was used while only its host copy exists.

    Attributes:
        component: name of the component that owns the weight.
        parameter: dotted name of the weight inside the component.
        remedy: the call that brings the weight back.
    """

    def __init__(self, component: str, parameter: str, *, operation: str, remedy: str) -> None:
        self.component, self.parameter, self.remedy = component, parameter, remedy
        super().__init__(
            f"{operation} needs {parameter!r} of component {component!r} on the device, but only its host copy exists; "
            f"call {remedy} first, or run the component inside ComponentResidencyManager.use({component!r})"
        )

    def __reduce__(self) -> tuple[type[ParkError], tuple[str]]:
        return ParkError, (str(self),)
