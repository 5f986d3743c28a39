"""`activate`: fake devices exist from here to the end of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_park.sizes import parse_size

from . import active, allocator_settings, device_module, kernels, patches, registration
from .device import FakeDevice
from .sanitizer import Sanitizer


@contextmanager
def activate(
    memory: int | str = "8 GiB", *, count: int = 1, data: bool = True, expandable_segments: bool | None = None
) -> Iterator[FakeDevice]:
    """Make *count* fake accelerators of device type ``fakegpu`` with *memory* bytes each exist within the context.

    With ``data=False`` they hold shapes and bytes but no values, so that a card larger than the host can be had; what
    needs a value raises ``NotImplementedError``, and copies to the host leave the host's memory as it was.

    With ``expandable_segments=True`` their allocators take memory as torch's do with that setting; by default as the
    environment says (``PYTORCH_ALLOC_CONF``, ``PYTORCH_CUDA_ALLOC_CONF``).

    Yields the first of them. Everything that is patched is put back at the end, whatever happens inside. Raises
    ``ValueError`` for sizes and counts that make no sense and ``RuntimeError`` when fake devices are active already, or
    another package is in the place of the back end (see `registration`).
    """
    nbytes = parse_size(memory)
    if nbytes <= 0:
        raise ValueError(f"a fake device needs memory; got {memory!r}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"the number of fake devices is a positive integer; got {count!r}")
    if expandable_segments is None:
        expandable_segments = allocator_settings.expandable_segments_of_environment()
    elif not isinstance(expandable_segments, bool):
        raise ValueError(f"expandable_segments is True, False or None; got {expandable_segments!r}")
    if active.cards:
        raise RuntimeError(
            f"{len(active.cards)} fake device(s) are active already; end that context first (activate(count=...) makes"
            " several at once)"
        )
    registration.register(device_module, active.is_available)
    kernels.install()
    sanitizer = Sanitizer()
    active.without_data = not data
    active.cards[:] = [
        FakeDevice(index, nbytes, sanitizer, data=data, expandable_segments=expandable_segments)
        for index in range(count)
    ]
    active.make_current(0)
    try:
        with patches.applied():
            yield active.cards[0]
    finally:
        for card in active.cards:
            card.retire()
        sanitizer.let_go()
        active.forget()
