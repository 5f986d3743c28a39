"""Thirty classes of diffusers and transformers in configurations that fit a test: a builder and an input for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

Inputs = Mapping[str, Any]
Entry = tuple[Callable[[], nn.Module], Callable[[], Inputs]]

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 8,
}
VAE_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4, "layers_per_block": 1}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens() -> Inputs:
    return {"input_ids": torch.arange(1, 9).view(1, 8)}


def image() -> Inputs:
    return {"sample": noise(1, 3, 16, 16)}


def clip() -> Inputs:
    return {"sample": noise(1, 3, 5, 16, 16)}


def step() -> Tensor:
    return torch.tensor([7])


def text_model(name: str, config: str, **settings: Any) -> Entry:
    def build() -> nn.Module:
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return build, tokens


def vision_model(name: str, config: str) -> Entry:
    def build() -> nn.Module:
        return getattr(transformers, name)(getattr(transformers, config)(**VISION))

    return build, lambda: {"pixel_values": noise(1, 3, 16, 16)}


def model(name: str, inputs: Callable[[], Inputs], /, **settings: Any) -> Entry:
    return lambda: getattr(diffusers, name)(**settings), inputs


def conditioned(sample: tuple[int, ...], width: int, /, **more: Any) -> Callable[[], Inputs]:
    """Inputs of a denoiser: a noisy sample, a time, and text of eight tokens."""
    return lambda: {
        "hidden_states": noise(*sample),
        "timestep": step(),
        "encoder_hidden_states": noise(1, 8, width),
        **{key: value() if callable(value) else value for key, value in more.items()},
    }


def unet(*sample: int, width: int = 16, **more: Any) -> Callable[[], Inputs]:
    return lambda: {"sample": noise(*sample), "timestep": step(), "encoder_hidden_states": noise(1, 8, width)} | more


ZOO: dict[str, Entry] = {
    # text encoders
    "CLIPTextModel": text_model("CLIPTextModel", "CLIPTextConfig", **TEXT),
    "CLIPTextModelWithProjection": text_model(
        "CLIPTextModelWithProjection", "CLIPTextConfig", **TEXT, projection_dim=8
    ),
    "T5EncoderModel": text_model("T5EncoderModel", "T5Config", **T5),
    "UMT5EncoderModel": text_model("UMT5EncoderModel", "UMT5Config", **T5),
    "LlamaModel": text_model("LlamaModel", "LlamaConfig", **TEXT),
    "Qwen2Model": text_model("Qwen2Model", "Qwen2Config", **TEXT),
    "Gemma2Model": text_model("Gemma2Model", "Gemma2Config", **TEXT),
    "MistralModel": text_model("MistralModel", "MistralConfig", **TEXT),
    "BertModel": text_model("BertModel", "BertConfig", **TEXT),
    "CLIPVisionModelWithProjection": vision_model("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
    "SiglipVisionModel": vision_model("SiglipVisionModel", "SiglipVisionConfig"),
    # DiTs
    "DiTTransformer2DModel": model(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": noise(1, 4, 8, 8),
            "timestep": step(),
            "class_labels": torch.tensor([1]),
        },
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
    ),
    "PixArtTransformer2DModel": model(
        "PixArtTransformer2DModel",
        conditioned((1, 4, 8, 8), 8, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        cross_attention_dim=24,
        caption_channels=8,
        in_channels=4,
        use_additional_conditions=False,
    ),
    "SD3Transformer2DModel": model(
        "SD3Transformer2DModel",
        conditioned((1, 4, 8, 8), 32, pooled_projections=lambda: noise(1, 64)),
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    ),
    "FluxTransformer2DModel": model(
        "FluxTransformer2DModel",
        conditioned(
            (1, 16, 4),
            32,
            pooled_projections=lambda: noise(1, 32),
            img_ids=lambda: noise(16, 3),
            txt_ids=lambda: noise(8, 3),
        ),
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ),
    "WanTransformer3DModel": model(
        "WanTransformer3DModel",
        conditioned((1, 4, 2, 8, 8), 16),
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ),
    "CogVideoXTransformer3DModel": model(
        "CogVideoXTransformer3DModel",
        conditioned((1, 2, 4, 8, 8), 8),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    ),
    "LTXVideoTransformer3DModel": model(
        "LTXVideoTransformer3DModel",
        conditioned(
            (1, 32, 4),
            16,
            encoder_attention_mask=lambda: torch.ones(1, 8, dtype=torch.bool),
            num_frames=2,
            height=4,
            width=4,
        ),
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    ),
    "AuraFlowTransformer2DModel": model(
        "AuraFlowTransformer2DModel",
        conditioned((1, 4, 8, 8), 16),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    ),
    "SanaTransformer2DModel": model(
        "SanaTransformer2DModel",
        conditioned((1, 4, 8, 8), 8),
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
    ),
    # UNets
    "UNet2DModel": model(
        "UNet2DModel",
        lambda: {**image(), "timestep": step()},
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet2DConditionModel": model(
        "UNet2DConditionModel",
        unet(1, 4, 16, 16),
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet3DConditionModel": model(
        "UNet3DConditionModel",
        unet(1, 4, 2, 16, 16),
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    "UNetSpatioTemporalConditionModel": model(
        "UNetSpatioTemporalConditionModel",
        unet(1, 2, 8, 16, 16, added_time_ids=torch.tensor([[6.0, 127.0, 0.02]])),
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=16,
        num_attention_heads=8,
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    ),
    # VAEs
    "AutoencoderKL": model(
        "AutoencoderKL",
        image,
        **VAE_BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "AsymmetricAutoencoderKL": model(
        "AsymmetricAutoencoderKL",
        image,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        down_block_out_channels=(8,),
        up_block_out_channels=(8,),
        norm_num_groups=4,
        latent_channels=4,
    ),
    "AutoencoderTiny": model(
        "AutoencoderTiny",
        image,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    ),
    "VQModel": model(
        "VQModel",
        image,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "AutoencoderKLWan": model(
        "AutoencoderKLWan",
        clip,
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "AutoencoderKLCogVideoX": model(
        "AutoencoderKLCogVideoX",
        clip,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=2,
        latent_channels=4,
        layers_per_block=1,
        temporal_compression_ratio=4,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
    ),
    "AutoencoderKLTemporalDecoder": model(
        "AutoencoderKLTemporalDecoder",
        lambda: {**image(), "num_frames": 1},
        block_out_channels=(32, 64),
        latent_channels=4,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
    ),
}
