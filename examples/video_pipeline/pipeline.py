"""The pipeline: text-encode, denoise, decode, each while its component is in use and the others are idle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from examples.video_pipeline.components import LAYERS, Components
from park_core import ComponentResidencyManager, OffloadConfig, layerwise_offloadable

#: Given the names of a stage and of its component, a context in which the stage runs.
StageObserver = Callable[[str, str], AbstractContextManager[object]]

#: Prompts are padded or cut to this length.
MAX_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class VideoRequest:
    """One video to make: ``frames`` must be 4 n + 1, ``height`` and ``width`` multiples of 16, as Wan has it."""

    prompt: str
    negative_prompt: str = ""
    frames: int = 9
    height: int = 128
    width: int = 128
    steps: int = 4
    guidance_scale: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.frames < 1 or self.frames % 4 != 1:
            raise ValueError(
                f"frames must be 4 n + 1 (1, 5, 9, …), because the VAE packs 4 into one; got {self.frames}"
            )
        if self.height < 16 or self.height % 16 or self.width < 16 or self.width % 16:
            raise ValueError(f"height and width must be multiples of 16 pixels; got {self.height} x {self.width}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}")


class VideoPipeline:
    """Makes videos on one device that need not hold all components at once.

    The layers of the text encoder and of the DiT are streamed. Those of the VAE's decoder are resident while it is in
    use: it runs once for every four frames, and would otherwise stream all of them each time. ``config`` says what
    happens to the non-layer weights of a component between its uses.
    """

    def __init__(self, components: Components, device: torch.device | str, config: OffloadConfig) -> None:
        self.components = components
        self.device = torch.device(device)
        self.observe: StageObserver = lambda stage, component: nullcontext()
        config = replace(config, components={"vae": {"resident_layers": 1.0}, **config.components})
        for name, module in components.modules.items():
            layerwise_offloadable(module, LAYERS[name])
        self.residency = ComponentResidencyManager(components.modules, config=config, device=self.device)

    @torch.no_grad()
    def __call__(self, request: VideoRequest) -> torch.Tensor:
        """The frames on the host: float32 in [-1, 1] of shape (3, frames, height, width)."""
        self.residency.begin_request()
        try:
            with self.observe("text-encode", "text_encoder"):
                prompt_embeds = self._encode(request)
            with self.observe("denoise", "transformer"):
                latents = self._denoise(request, prompt_embeds)
            del prompt_embeds
            with self.observe("decode", "vae"):
                return self._decode(latents)
        finally:
            self.residency.finish_request()

    def _encode(self, request: VideoRequest) -> torch.Tensor:
        """Embeddings of the negative prompt and of the prompt, as one batch of two."""
        tokens = self.components.tokenizer(
            [request.negative_prompt, request.prompt],
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(self.device)
        with self.residency.use("text_encoder") as text_encoder:
            hidden = text_encoder(**tokens).last_hidden_state
        return hidden * tokens.attention_mask.unsqueeze(-1)  # the DiT has no mask for padding; Wan zeroes it

    def _denoise(self, request: VideoRequest, prompt_embeds: torch.Tensor) -> torch.Tensor:
        config = self.components.transformer.config
        # A scheduler of our own: it keeps tensors on the device for as long as it lives.
        scheduler = self.components.scheduler.from_config(self.components.scheduler.config)
        shape = (1, config.in_channels, request.frames // 4 + 1, request.height // 8, request.width // 8)
        # On the host, so that every device starts from the same noise.
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed)).to(self.device)
        scheduler.set_timesteps(request.steps, device=self.device)
        with self.residency.use("transformer") as transformer:
            for timestep in scheduler.timesteps:
                unconditional, conditional = transformer(
                    torch.cat([latents, latents]), timestep.expand(2), prompt_embeds, return_dict=False
                )[0].chunk(2)
                noise = unconditional + request.guidance_scale * (conditional - unconditional)
                latents = scheduler.step(noise, timestep, latents, return_dict=False)[0]
        return latents

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.components.vae.config
        mean = torch.tensor(config.latents_mean, device=self.device).view(1, -1, 1, 1, 1)
        std = torch.tensor(config.latents_std, device=self.device).view(1, -1, 1, 1, 1)
        with self.residency.use("vae") as vae:
            try:
                frames = vae.decode(latents * std + mean, return_dict=False)[0]
            finally:
                # A decode that fails leaves the feature maps of its convolutions in the VAE, on the device.
                vae.clear_cache()
        return frames[0].cpu()
