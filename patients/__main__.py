"""``python -m patients``: the page ``docs/patients.md``, examined anew; with names of patients only their sections."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from .examination import verdicts_of
from .page import page, section
from .roster import PATIENTS


def main() -> None:
    names = sys.argv[1:] or list(PATIENTS)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(verdicts_of, (PATIENTS[name] for name in names)), strict=True))
    if sys.argv[1:]:
        print("\n".join(section(PATIENTS[name], verdicts) for name, verdicts in found.items()))
    else:
        print(page(found), end="")


if __name__ == "__main__":
    main()
