"""The rule that makes a configuration tiny, of whatever class it is: sizes are known by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM
TOKENS = 8

_NAMES = {
    WIDTH: """
        adaln_lora_dim addition_time_embed_dim approximator_hidden_dim cap_feat_dim caption_channels
        caption_projection_dim condition_dim context_in_dim conv_dim cross_attention_dim
        cross_attention_dim_t5 cross_attention_input_dim d_model decoder_hidden_size dim embed_dim
        embedding_dim embedding_size encoder_hidden_size freq_dim global_states_input_dim hidden_dim
        hidden_size hidden_sizes image_embed_dim image_size in_text_dim in_text_dim2 inner_dim
        joint_attention_dim model_dim n_embd num_mel_bins pooled_projection_dim projection_dim text_dim
        text_emb_dim text_embed_2_dim text_embed_dim time_dim time_embed_dim time_proj_dim
        timestep_guidance_channels""",
    2 * WIDTH: """
        d_ff decoder_ffn_dim encoder_ffn_dim ff_dim ffn_dim intermediate_size max_position_embeddings
        moe_intermediate_size n_positions shared_expert_intermediate_size vocab_size""",
    HEAD_DIM: """
        approximator_num_channels attention_head_dim cross_attention_head_dim d_kv head_dim multiple_of
        pos_embed_max_size rope_max_seq_len sample_height sample_size sample_width""",
    TOKENS: """
        base_dim block_out_channels channels decode_block_out_channels decoder_block_out_channels
        down_block_out_channels encoder_block_out_channels max_sequence_length max_text_seq_length patch_size
        text_len text_len_t5 up_block_out_channels""",
    5: "sample_frames",
    4: """
        in_channels in_visual_dim latent_channels norm_num_groups num_experts num_local_experts out_channels
        out_visual_dim z_dim""",
    HEADS: """
        approximator_layers bos_token_id decoder_attention_heads decoder_layers depth depths
        encoder_attention_heads encoder_layers eos_token_id mmdit_layers n_head n_heads n_kv_heads n_layer
        n_layers num_attention_heads num_cross_attention_heads num_heads num_hidden_layers
        num_key_value_attention_heads num_key_value_heads num_kv_heads num_layers num_mmdit_layers
        num_single_dit_layers num_single_layers num_text_blocks num_visual_blocks pad_token_id""",
    1: "dim_mult layers_per_block n_refiner_layers num_refiner_layers num_res_blocks",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}


def tiny(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What to change in a configuration: each size of a known name that is larger than it need be."""
    return {
        name: shrunk
        for name, default in defaults.items()
        if name in SIZES and (shrunk := _shrunk(default, SIZES[name])) != default
    }


def _shrunk(value: Any, most: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_shrunk(part, most) for part in value)
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) else value


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Row:
    """What is to be said of a class beside the rule: settings of its configuration, arguments of its forward."""

    sample: Any
    settings: dict[str, Any]
    inputs: dict[str, Any]


def row(sample: Any = None, *, inputs: Mapping[str, Any] | None = None, **settings: Any) -> Row:
    return Row(sample, settings, dict(inputs or {}))
