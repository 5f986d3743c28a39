"""The patients: which release of which project, and what was done to have it here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Patient:
    """A release. *module* has the function ``component(gpu) -> Parkable``; *about* is for the page.

    *unjudged* are checks, by the beginning of their names, whose verdict would be one on the fake device, and why.
    """

    project: str
    version: str
    module: str
    about: str
    unjudged: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.project} {self.version}"

    @property
    def path(self) -> list[Path]:
        """Folders that must be on the path of the process that examines it. Raises if the release is not there."""
        if self.project != "sglang":
            return []
        folder = Path(os.environ.get("PARK_PATIENTS", "")) / f"sglang-{self.version}"
        if not (folder / "sglang").is_dir():
            raise FileNotFoundError(
                f"no {self.name} in {folder}: use tox -e patients, or set PARK_PATIENTS to a folder after "
                f"pip install --no-deps --target $PARK_PATIENTS/{folder.name} sglang=={self.version}"
            )
        return [ROOT / "patients" / "stand_ins", folder]


_SGLANG = """\
`LayerwiseOffloadableModuleMixin` and `LayerwiseOffloadStrategy` of `multimodal_gen/runtime/managers/memory_managers`,
with `performance_mode="memory"` and the defaults of a component that is not a DiT. Park and restore are
`park_non_layer_weights()` and `restore_non_layer_weights()`; begin and end of a use are the strategy's. Four modules
have stand-ins in `patients/stand_ins`, because they import sglang's whole runtime: `sglang`, `sglang.multimodal_gen`,
`runtime.distributed` and `runtime.server_args`. The platform is a subclass of sglang's `Platform` for the fake device.
"""
_ONE_DEVICE = {"c26_the_headroom_is": "a process of sglang has one device, and it is the current one"}

PATIENTS = {
    patient.name: patient
    for patient in (
        Patient(
            "sglang",
            "0.5.19",
            "patients.sglang_layerwise",
            f"{_SGLANG}It is the first release that parks. It asks for torch 2.13.0.",
            _ONE_DEVICE,
        ),
        Patient(
            "sglang",
            "0.5.20",
            "patients.sglang_layerwise",
            f"""{_SGLANG}It has the fix of issue 38166: a park that finds room brings the weights back before it
drops the copies. It asks for torch 2.13.0.""",
            _ONE_DEVICE,
        ),
        Patient(
            "sglang",
            "0.5.23",
            "patients.sglang_layerwise",
            f"""{_SGLANG}A second restore does nothing. Host copies can be pinned; the default, which is tested here,
is not to. The copy back is asked for as asynchronous although its source is pageable, because `is_pinned` is not
called; on CUDA a `synchronize()` follows, so that there it does no harm. It asks for torch 2.14.1.""",
            _ONE_DEVICE,
        ),
        Patient(
            "diffusers",
            "0.42.1",
            "patients.diffusers_group_offloading",
            """\
`apply_group_offloading` with `offload_type="block_level"`, one block in a group, without streams. Blocks are streamed;
the rest is one group, which the forward of the component brings and takes away. Park and restore are `offload_()` and
`onload_()` of that group. After each forward it is brought back, so that there is something to park: in diffusers
itself it is away whenever no forward runs. Wrapper subclasses of torchao are known to it by name; the one here is
another. Nothing is replaced.""",
        ),
        Patient(
            "accelerate",
            "1.15.0",
            "patients.accelerate_cpu_offload",
            """\
`cpu_offload_with_hook`: the whole component is moved. Park is `hook.offload()`, restore is what the hook does before a
forward, `hook.hook.pre_forward(module)`. There are no placeholders: a parked weight is on the host as it is, and a
forward of the component brings it back. Nothing is replaced.""",
        ),
    )
}
