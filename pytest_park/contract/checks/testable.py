"""Whether the parkable can be tested at all. Runs first; where it fails, nothing else is worth reading."""

from __future__ import annotations

from ..case import Case, adopt
from ..parkable import Parkable
from ..probes import plain
from ..registry import promise
from ..verdict import NotApplicable, Untestable, error_text


@promise(
    0,
    "a parkable with weights on a device, a forward that repeats itself, a park that frees memory, and a restore",
    cause="",
)
def check_the_parkable_can_be_tested(case: Case) -> None:
    buffers = dict(case.module.named_buffers())
    if changed := buffers.keys() & {line.split(":")[0] for line in case.changes()}:
        raise Untestable(
            f"the forward changes {', '.join(sorted(changed))}, so that nobody can tell what parking changes: call "
            "module.eval()"
        )
    case.park()
    case.restore()
    if case.parkable.adopt is not None:
        expect_adoption(case.parkable)


def expect_adoption(parkable: Parkable) -> None:
    """What ``adopt`` makes of two plain layers can be tested, too: many checks need a module that the user's is not."""
    probe = plain(parkable.device)
    try:
        with Case(adopt(parkable, probe.module, probe.inputs, probe.streamed)) as case:
            case.park()
            case.restore()
    except NotApplicable:
        pass
    except Exception as error:
        text = str(error) if isinstance(error, Untestable) else error_text(error)
        raise Untestable(f"Parkable(adopt=...) was given two linear layers, and then: {text}") from error
