"""A component as it was before a project set itself up: where setting up begins with a park, that park is undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def first_state_kept(module: nn.Module, streamed: Sequence[str] = ()) -> Iterator[None]:
    """At the end, all tensors but those of streamed layers and those that wrap others lie where they lay.

    The contract looks at a component after it was set up, and would not see what the first park does to its views.
    """
    layers = tuple(f"{name}." for name in streamed)
    parameters = {
        parameter: parameter.data
        for name, parameter in module.named_parameters()
        if not (layers and name.startswith(layers)) and not hasattr(type(parameter), "__tensor_flatten__")
    }
    buffers = [
        (owner, name, buffer, buffer.data)
        for path, owner in module.named_modules()
        if not (layers and f"{path}.".startswith(layers))
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    yield
    for parameter, data in parameters.items():
        parameter.data = data
    for owner, name, buffer, data in buffers:
        buffer.data = data
        setattr(owner, name, buffer)
