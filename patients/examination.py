"""One patient under the contract, in a process of its own: releases of one package cannot be imported side by side."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

from pytest_park.contract import Parkable, Verdict, examine
from pytest_park.fakegpu import activate

from .roster import PATIENTS, ROOT, Patient


def verdicts_of(patient: Patient) -> list[Verdict]:
    """Examined in a new process. Raises if that fails, with what it said."""
    path = [str(ROOT), *map(str, patient.path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "patients.examination", patient.name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the examination of {patient.name} failed:\n{done.stderr}")
    return [Verdict(**found) for found in json.loads(done.stdout.splitlines()[-1])]


def _examine_here(patient: Patient) -> list[dict[str, Any]]:
    if patient.project != "sglang" and importlib.metadata.version(patient.project) != patient.version:
        installed = importlib.metadata.version(patient.project)
        raise RuntimeError(f"{patient.project} {installed} is installed, the verdicts are on {patient.version}")
    component = importlib.import_module(patient.module).component
    with activate(memory="2 GiB", count=2) as gpu:

        def make() -> Parkable:
            return replace(component(gpu), fake_device=gpu)

        found = examine(make)
    return [asdict(_judged(verdict, patient)) for verdict in found]


def _judged(verdict: Verdict, patient: Patient) -> Verdict:
    reason = next((why for start, why in patient.unjudged.items() if verdict.check.startswith(start)), None)
    if reason is not None:
        verdict = replace(verdict, outcome="not applicable", reason=reason)
    return replace(verdict, finding=None)  # its reason says what was seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_examine_here(PATIENTS[sys.argv[1]])) + "\n")
