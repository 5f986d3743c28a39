"""Classes of transformers. The rule makes their configurations; what it cannot know is said beside the name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import nn

from .tiny import SIZES, TOKENS, Row, noise, row, tiny

#: Of these nothing needs to be said.
NAMES = """
    AlbertModel BeitModel BertForMaskedLM BertModel BlipTextModel CLIPModel CLIPTextModel CLIPTextModelWithProjection
    CLIPVisionModelWithProjection ClapTextModelWithProjection ConvNextModel DebertaV2Model
    Dinov2WithRegistersModel DistilBertModel FalconModel GPT2LMHeadModel GPT2Model GPTNeoXModel Gemma2ForCausalLM
    Gemma2Model Gemma3TextModel GemmaModel GlmModel HubertModel LlamaModel MPNetModel MT5EncoderModel MambaModel
    MistralModel ModernBertModel OPTModel Phi3Model PhiModel Qwen2Model Qwen3Model Qwen3VLTextModel
    ResNetModel RobertaModel SiglipTextModel SiglipVisionModel SmolLM3Model T5EncoderModel
    UMT5EncoderModel ViTModel XLMRobertaModel"""

FIRST_TOKENS = torch.ones(1, 4, dtype=torch.long)

ROWS: dict[str, Row] = dict.fromkeys(NAMES.split(), row()) | {
    "MixtralModel": row(experts_implementation="eager"),  # the other way counts with a kernel that the CPU has not
    "Qwen3MoeModel": row(num_experts_per_tok=2, experts_implementation="eager"),
    "Qwen2_5_VLTextModel": row(rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}),
    "T5ForConditionalGeneration": row(inputs={"decoder_input_ids": FIRST_TOKENS}),
    "WhisperModel": row(
        max_source_positions=TOKENS,
        decoder_start_token_id=1,
        inputs={"input_features": noise(1, 32, 2 * TOKENS), "decoder_input_ids": FIRST_TOKENS},
    ),
    "SpeechT5HifiGan": row(
        model_in_dim=16,
        upsample_initial_channel=32,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        inputs={"spectrogram": noise(1, TOKENS, 16)},
    ),
    "EncodecModel": row(
        num_filters=4,
        upsampling_ratios=[2, 2],
        codebook_size=16,
        codebook_dim=32,
        inputs={"input_values": noise(1, 1, 64)},
    ),
    "DacModel": row(
        encoder_hidden_size=8,
        decoder_hidden_size=16,
        downsampling_ratios=[2, 2],
        upsampling_ratios=[2, 2],
        codebook_size=16,
        inputs={"input_values": noise(1, 1, 64)},
    ),
}


def build(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    return kind(tiny_config(kind.config_class, ROWS[name].settings))  # type: ignore[no-any-return]


def tiny_config(kind: type[transformers.PretrainedConfig], settings: dict[str, Any]) -> transformers.PretrainedConfig:
    default = kind()
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    tiny_parts = {name: tiny_config(type(part), {}).to_dict() for name, part in parts.items() if part is not None}
    return kind(**tiny(default.to_dict()) | tiny_parts | settings)


def inputs(name: str, module: nn.Module) -> dict[str, Any]:
    """What the forward is given: tokens, a picture, a sound."""
    size = SIZES["image_size"]
    known = {
        "input_ids": torch.arange(1, TOKENS + 1).view(1, TOKENS),
        "pixel_values": noise(1, 3, size, size),
        "input_values": noise(1, 800),
    }
    expected = inspect.signature(module.forward).parameters
    return {key: value for key, value in known.items() if key in expected} | ROWS[name].inputs
