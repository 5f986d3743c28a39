"""Three models at the sizes at which their own libraries test them: hardly any arithmetic, so overhead shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Model:
    """A *module* on the host, and how to run it on the device where a copy of it is."""

    module: nn.Module
    run: Callable[[Any, torch.device | str], torch.Tensor]


def clip_text() -> Model:
    transformers = pytest.importorskip("transformers", reason="the CLIP text encoder comes from transformers")
    config = transformers.CLIPTextConfig(
        bos_token_id=0, eos_token_id=2, hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=5, pad_token_id=1, vocab_size=1000,
    )  # fmt: skip
    return Model(
        transformers.CLIPTextModel(config).eval(),
        lambda module, device: module(torch.arange(77, device=device)[None]).last_hidden_state,
    )


def unet() -> Model:
    diffusers = pytest.importorskip("diffusers", reason="the UNet comes from diffusers")
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=32, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )  # fmt: skip
    return Model(
        module.eval(),
        lambda module, device: (
            module(
                torch.ones(2, 4, 32, 32, device=device),
                torch.tensor([3], device=device),
                torch.ones(2, 77, 32, device=device),
            ).sample
        ),
    )


def wan_vae() -> Model:
    diffusers = pytest.importorskip("diffusers", reason="the Wan VAE comes from diffusers")
    module = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return Model(module.eval(), lambda module, device: module.decode(torch.ones(1, 16, 3, 4, 4, device=device)).sample)


MODELS = {"CLIP text": clip_text, "UNet": unet, "Wan VAE": wan_vae}
