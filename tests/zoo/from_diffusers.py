"""Classes of diffusers. The rule makes their settings from the signatures of their constructors, and the names of most
arguments of a forward say what they are. What neither can know is said beside the class."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from .tiny import TOKENS, WIDTH, Row, noise, row, tiny

PICTURE, FRAMES = noise(1, 3, 16, 16), noise(1, 3, 5, 16, 16)
LATENT, CLIP = noise(1, 4, 16, 16), noise(1, 4, 2, 16, 16)
#: A latent picture as a sequence of sixteen patches, and where each one is.
PATCHES = noise(1, 16, 4)
PLACES = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], -1)
TEXT, POOLED = noise(1, TOKENS, WIDTH), noise(1, WIDTH)
EVERY_TOKEN = torch.ones(1, TOKENS, dtype=torch.bool)
STEP, CONTINUOUS_STEP = torch.tensor([7]), torch.tensor([7.0])

#: Arguments of forwards.
KNOWN: dict[str, Any] = {
    "crop_coords": torch.tensor([[0.0, 0.0]]),
    "encoder_attention_mask": EVERY_TOKEN,
    "encoder_hidden_states": TEXT,
    "encoder_hidden_states_mask": EVERY_TOKEN,
    "img_ids": PLACES,
    "img_shapes": [(1, 4, 4)],
    "original_size": torch.tensor([[16.0, 16.0]]),
    "pooled_projections": POOLED,
    "target_size": torch.tensor([[16.0, 16.0]]),
    "timestep": STEP,
    "txt_ids": torch.zeros(TOKENS, 3),
}


def build(name: str) -> nn.Module:
    kind = getattr(diffusers, name)
    defaults = {key: given.default for key, given in inspect.signature(kind.__init__).parameters.items()}
    axes = {key: AXES[len(value)] for key, value in defaults.items() if key in AXES_NAMES and value}
    return kind(**tiny(defaults) | axes | ROWS[name].settings)  # type: ignore[no-any-return]


#: The width of a head is split over the axes of its rotary embedding, by their number.
AXES = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}
AXES_NAMES = {"axes_dim_rope", "axes_dims", "axes_dims_rope", "rope_axes_dim", "axes_dim"}


def inputs(name: str, module: Any) -> dict[str, Any]:
    first, *others = inspect.signature(module.forward).parameters
    known = KNOWN | ({"guidance": torch.tensor([3.5])} if module.config.get("guidance_embeds") else {})
    return {first: ROWS[name].sample} | {key: known[key] for key in others if key in known} | ROWS[name].inputs


def classes(sample: Tensor, names: str) -> dict[str, Row]:
    """Classes of which nothing needs to be said but what the sample is."""
    return dict.fromkeys(names.split(), row(sample))


def unet(sample: Tensor, kind: str, channels: int = 8, **more: Any) -> Row:
    """Two levels, with cross attention in the first one."""
    return row(
        sample,
        down_block_types=(f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"),
        up_block_types=(f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"),
        block_out_channels=(channels, channels),
        **more,
    )


def control(sample: Tensor, condition: Tensor, **settings: Any) -> Row:
    return row(sample, inputs={"controlnet_cond": condition}, **settings)


DENOISERS = {
    **classes(
        LATENT,
        """CogView3PlusTransformer2DModel CogView4Transformer2DModel Lumina2Transformer2DModel PixArtTransformer2DModel
        SD3Transformer2DModel SanaTransformer2DModel""",
    ),
    **classes(
        CLIP,
        """AllegroTransformer3DModel ChronoEditTransformer3DModel HunyuanVideoTransformer3DModel MochiTransformer3DModel
        MotifVideoTransformer3DModel SanaVideoTransformer3DModel SkyReelsV2Transformer3DModel WanTransformer3DModel""",
    ),
    **classes(
        PATCHES,
        """BriaTransformer2DModel ChromaTransformer2DModel FluxTransformer2DModel LongCatImageTransformer2DModel
        OvisImageTransformer2DModel""",
    ),
    **classes(noise(1, 2, 4, 16, 16), "CogVideoXTransformer3DModel ConsisIDTransformer3DModel"),
    "AuraFlowTransformer2DModel": row(LATENT, pos_embed_max_size=64),
    "CosmosTransformer3DModel": row(CLIP, concat_padding_mask=False),
    "DiTTransformer2DModel": row(LATENT, inputs={"class_labels": torch.tensor([1])}),
    "Flux2Transformer2DModel": row(PATCHES, inputs={"img_ids": noise(16, 4), "txt_ids": noise(TOKENS, 4)}),
    "HunyuanImageTransformer2DModel": row(LATENT, inputs={"timestep": CONTINUOUS_STEP}),
    "Kandinsky5Transformer3DModel": row(
        noise(1, 2, 16, 16, 4),
        inputs={
            "visual_rope_pos": [torch.arange(2), torch.arange(8), torch.arange(8)],
            "text_rope_pos": torch.arange(TOKENS),
        },
    ),
    "LTXVideoTransformer3DModel": row(noise(1, 32, 4), inputs={"num_frames": 2, "height": 4, "width": 4}),
    "PRXTransformer2DModel": row(LATENT, axes_dim=[8, 8]),
    "PriorTransformer": row(POOLED, num_embeddings=TOKENS, inputs={"proj_embedding": POOLED}),
    "QwenImageTransformer2DModel": row(noise(1, 16, 4), in_channels=4, out_channels=1),
    "StableAudioDiTModel": row(noise(1, 4, 16), inputs={"global_hidden_states": noise(1, 1, WIDTH)}),
    "Transformer2DModel": row(LATENT, in_channels=4, cross_attention_dim=WIDTH),
    "WanVACETransformer3DModel": row(
        CLIP, vace_layers=[0, 1], vace_in_channels=4, inputs={"control_hidden_states": CLIP}
    ),
    "ZImageTransformer2DModel": row(
        [noise(4, 1, 16, 16)], inputs={"t": torch.tensor([0.5]), "cap_feats": [noise(TOKENS, WIDTH)]}
    ),
    # UNets
    "AudioLDM2UNet2DConditionModel": unet(LATENT, "2D", attention_head_dim=4),
    "I2VGenXLUNet": unet(
        CLIP,
        "3D",
        attention_head_dim=4,
        inputs={"fps": torch.tensor([8]), "image_latents": CLIP, "image_embeddings": POOLED},
    ),
    "UNet1DModel": row(noise(1, 2, 32), block_out_channels=(32, 32, 64), extra_in_channels=64),
    "UNet2DConditionModel": unet(LATENT, "2D", attention_head_dim=4),
    "UNet2DModel": row(
        PICTURE,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 8),
        attention_head_dim=4,
    ),
    "UNet3DConditionModel": unet(CLIP, "3D", attention_head_dim=4),
    "UNetSpatioTemporalConditionModel": unet(
        noise(1, 2, 8, 16, 16),
        "SpatioTemporal",
        channels=32,
        num_attention_heads=(2, 2),
        in_channels=8,
        projection_class_embeddings_input_dim=96,
        inputs={"added_time_ids": torch.tensor([[6.0, 127.0, 0.02]])},
    ),
    # what stands beside a denoiser
    "ControlNetModel": control(
        LATENT, noise(1, 3, 32, 32), conditioning_embedding_out_channels=(4, 8), attention_head_dim=4
    ),
    "FluxControlNetModel": control(PATCHES, PATCHES),
    "QwenImageControlNetModel": control(PATCHES, PATCHES, out_channels=1),
    "SD3ControlNetModel": control(LATENT, LATENT),
    "SanaControlNetModel": control(LATENT, LATENT),
    "UNetControlNetXSModel": control(
        LATENT, noise(1, 3, 32, 32), ctrl_conditioning_embedding_out_channels=(4, 8), ctrl_max_norm_num_groups=4
    ),
    "ReduxImageEncoder": row(TEXT, redux_dim=WIDTH, txt_in_features=WIDTH),
    "T2IAdapter": row(PICTURE),
}

AUTOENCODERS = {
    **classes(PICTURE, "AsymmetricAutoencoderKL AutoencoderKL AutoencoderKLFlux2 AutoencoderTiny VQModel"),
    **classes(
        FRAMES,
        """AutoencoderKLCogVideoX AutoencoderKLCosmos AutoencoderKLHunyuanImageRefiner AutoencoderKLHunyuanVideo
        AutoencoderKLHunyuanVideo15 AutoencoderKLLTXVideo AutoencoderKLMagvit
        AutoencoderKLQwenImage AutoencoderKLWan""",
    ),
    "AutoencoderDC": row(noise(1, 3, 32, 32)),
    "AutoencoderKLHunyuanImage": row(
        PICTURE,
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
    ),
    "AutoencoderKLLTX2Audio": row(noise(1, 2, 16, 16), base_channels=8, ch_mult=(1, 2), in_channels=2),
    "AutoencoderKLMochi": row(
        FRAMES, in_channels=15, encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4
    ),
    "AutoencoderKLTemporalDecoder": row(
        PICTURE, down_block_types=("DownEncoderBlock2D",) * 2, block_out_channels=(32, 32), inputs={"num_frames": 1}
    ),
    "AutoencoderOobleck": row(
        noise(1, 2, 64),
        encoder_hidden_size=8,
        downsampling_ratios=[2, 2],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
    ),
}

ROWS = DENOISERS | AUTOENCODERS
