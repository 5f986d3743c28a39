"""The case that parking was invented for, at its true size, on a host that could not hold a tenth of it.

A card under a cap of 12 GiB. The DiT has 2.09 GB of non-layer weights, the text encoder 1.40 GB, the VAE is resident
while it decodes, with 9 GB. The decode makes 124 frames of 864x480 in chunks, and does not get to the last of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from park_core import ComponentResidencyManager, OffloadConfig, ParkReport, layerwise_offloadable
from pytest_park.fakegpu import activate
from pytest_park.sizes import GiB, KiB, MiB

GB = 10**9
CAP = 12 * GiB
WIDTH, HEIGHT, LATENT_FRAMES = 864, 480, 31


class Layer(nn.Module):
    """A streamed layer of a transformer: 0.25 GB in bfloat16."""

    def __init__(self, width: int = 5120, inner: int = 12288) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Transformer(nn.Module):
    """Streamed layers behind non-layer weights of *size* bytes: the text encoder and the DiT."""

    def __init__(self, size: float, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(int(size) // 5120 // 2, 5120)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """One of the VAE's: 0.25 GB."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        return x + self.second(nn.functional.silu(inner))


class VAE(nn.Module):
    """Decodes latents of 16 channels, at an eighth of width and height and a fourth of the frames, chunk by chunk."""

    def __init__(self, channels: int = 1520) -> None:
        super().__init__()
        self.conv_in = nn.Conv3d(16, channels, 1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(36))
        self.head = nn.Conv3d(channels, 3 * 8 * 8 * 4, 1)

    def decode(self, latents: Tensor) -> list[Tensor]:
        return [self._chunk(chunk) for chunk in latents.split(2, dim=2)]

    def _chunk(self, latents: Tensor) -> Tensor:
        x = self.conv_in(latents.to(torch.bfloat16))
        for block in self.blocks:
            x = block(x)
        return self.head(x).view(3, -1, HEIGHT, WIDTH).to(torch.uint8)


def on_the_host(build: type[nn.Module], *arguments: float) -> nn.Module:
    """A component in bfloat16 in host memory that nobody writes to, so that the host does not have to have it."""
    with torch.device("meta"):
        return build(*arguments).to(torch.bfloat16).to_empty(device="cpu").eval().requires_grad_(False)


class Pipeline:
    """Text-encode, denoise, decode, with layerwise offload. *parking* as `OffloadConfig` has it."""

    def __init__(self, parking: str) -> None:
        self.components = {
            "text_encoder": layerwise_offloadable(on_the_host(Transformer, 1.40 * GB, 4), ["layers"]),
            "dit": layerwise_offloadable(on_the_host(Transformer, 2.09 * GB, 6), ["layers"]),
            "vae": layerwise_offloadable(on_the_host(VAE), ["blocks"]),
        }
        config = OffloadConfig(
            performance_mode="memory",
            parking=parking,
            immutable_weights=True,  # no values, no changes to look for
            components={"vae": {"resident_layers": 1.0}},
        )
        self.residency = ComponentResidencyManager(self.components, config=config, device="fakegpu")

    @torch.no_grad()
    def __call__(self) -> list[Tensor]:
        self.residency.begin_request()
        tokens = torch.zeros(1, 256, dtype=torch.int64, device="fakegpu")
        with self.residency.use("text_encoder") as text_encoder:
            text_encoder(tokens)
        with self.residency.use("dit") as dit:
            for _ in range(2):
                dit(tokens)
        latents = torch.empty(1, 16, LATENT_FRAMES, HEIGHT // 8, WIDTH // 8, device="fakegpu")
        with self.residency.use("vae") as vae:
            return vae.decode(latents)


def request(parking: str, cap: int) -> dict[str, Any]:
    """What one request comes to on a card with this cap."""
    with activate(memory="24 GiB", data=False) as card:
        card.set_cap(cap)
        pipeline = Pipeline(parking)
        found: dict[str, Any] = {"frames": None, "error": None}
        try:
            chunks = pipeline()
        except torch.OutOfMemoryError as error:
            found["error"] = str(error)
        else:
            found["frames"] = [3, sum(chunk.shape[1] for chunk in chunks), *chunks[0].shape[2:]]
        reports = [report for report in pipeline.residency.reports if isinstance(report, ParkReport)]
        found["freed"] = {report.component: report.bytes_freed for report in reports}
        found["peak_reserved"] = torch.fakegpu.max_memory_reserved()
        return found


def peak_of_this_process() -> int:
    """Resident bytes at the most. Not ``ru_maxrss``, which a process takes over from the one that started it."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * KiB


def story() -> None:
    runs = {
        "without parking": request("never", CAP),
        "without parking, 30 MiB more": request("never", CAP + 30 * MiB),
        "with parking": request("auto", CAP),
        "host": peak_of_this_process(),
        "seconds": time.process_time(),
    }
    sys.stdout.write(json.dumps(runs))


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """Of a process of its own, because what the host needed at the most is counted by process."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_components_have_the_sizes_of_the_case() -> None:
    with torch.device("meta"):
        text_encoder, dit, vae = (
            module.to(torch.bfloat16) for module in (Transformer(1.40 * GB, 4), Transformer(2.09 * GB, 6), VAE())
        )
    assert text_encoder.embedding.weight.nbytes == pytest.approx(1.40 * GB, rel=0.001)
    assert dit.embedding.weight.nbytes == pytest.approx(2.09 * GB, rel=0.001)
    assert sum(weight.nbytes for weight in vae.parameters()) == pytest.approx(9 * GB, rel=0.01)


def test_without_parking_the_decode_runs_out_of_memory(runs: dict[str, Any]) -> None:
    failed = runs["without parking"]
    assert failed["frames"] is None
    assert "out of memory. Tried to allocate 38.00 MiB" in failed["error"]
    assert failed["freed"] == {"text_encoder": 0, "dit": 0, "vae": 0}


def test_it_misses_by_less_than_30_mib(runs: dict[str, Any]) -> None:
    lucky = runs["without parking, 30 MiB more"]
    assert lucky["frames"] == [3, 124, 480, 864]
    assert 0 < lucky["peak_reserved"] - CAP < 30 * MiB


def test_with_parking_it_fits(runs: dict[str, Any]) -> None:
    parked = runs["with parking"]
    assert parked["error"] is None
    assert parked["frames"] == [3, 124, 480, 864]
    assert parked["freed"]["text_encoder"] == pytest.approx(1.40 * GB, rel=0.001)
    assert parked["freed"]["dit"] == pytest.approx(2.09 * GB, rel=0.001)
    assert parked["peak_reserved"] < CAP - 2 * GiB


def test_the_host_needs_less_than_one_gib_for_all_of_this(runs: dict[str, Any]) -> None:
    assert runs["host"] < GiB


def test_it_takes_less_than_a_minute_of_the_machines_time(runs: dict[str, Any]) -> None:
    """All three runs and the imports. A hard limit, which no other test has: that nobody waits for a card of this size
    is what is promised. It is time of the processor, so that a busy machine is not slower."""
    assert runs["seconds"] < 60


if __name__ == "__main__":
    story()
