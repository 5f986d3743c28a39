"""Where something happened: noted in less than a microsecond, looked up in the source when somebody wants to read it.

The sanitizer notes a stack for every kernel. torch has the tool: it takes the code and the instruction of every frame
without asking for names and lines, and keeps no frame, and so no local variable, alive (``torch.utils._traceback``).
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from torch._C._profiler import gather_traceback, symbolize_tracebacks

_HERE = os.path.dirname(__file__) + os.sep


def capture() -> Any:
    """The Python stack as it is now, for `Stack`."""
    return gather_traceback(python=True, script=False, cpp=False)


def frames(captured: Any) -> list[dict[str, Any]]:
    """What was captured as ``{"filename": …, "line": …, "name": …}``, the innermost first, without our own frames."""
    if captured is None:
        return []
    (found,) = symbolize_tracebacks([captured])
    while found and found[0]["filename"].startswith(_HERE):
        del found[0]
    return found


class Stack:
    """A captured stack, to be printed as in a traceback; without one, the place is not known."""

    def __init__(self, captured: Any) -> None:
        self._captured = captured

    def format(self) -> list[str]:
        """A text for each frame, the outermost first, up to the call that reached the fake device."""
        places = [(f["filename"], int(f["line"]), f["name"], None) for f in reversed(frames(self._captured))]
        return traceback.StackSummary.from_list(places).format()
