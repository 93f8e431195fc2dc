"""A language model of pre-norm residual layers, x + mixer(norm(x)): token ids in, logits of the wanted rows out.

The law kept here: all rows of a step pass every layer as one ragged run; only the wanted rows reach the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend, Run
from milepost.models.layers.attention import AttentionMixer
from milepost.models.layers.linear import Linear
from milepost.models.layers.mamba2 import Mamba2Mixer
from milepost.models.layers.mlp import Relu2Mlp
from milepost.models.layers.norm import accumulation_dtype, rms_norm
from milepost.models.protocol import LayerMemory, Memory, ModelStep
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, MlpSpec, ModelSpec

Mixer = Mamba2Mixer | AttentionMixer | Relu2Mlp


class ResidualStack:
    """Implements `models.protocol.Model` for families with one mixer a layer."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        recurrent: KernelBackend,
        attention: KernelBackend,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.recurrent_backend = recurrent
        self.attention_backend = attention
        self._device = device
        self._embeddings = weights["embeddings.weight"]
        self._head = Linear(weights.get("lm_head.weight", self._embeddings))
        self._norm = weights["norm_f.weight"]
        self._norms = [weights[f"layers.{layer.index}.norm.weight"] for layer in spec.layers]
        self._mixers = [self._mixer(layer, weights) for layer in spec.layers]

    def _mixer(self, layer: LayerSpec, weights: Mapping[str, Tensor]) -> Mixer:
        (mixer,) = layer.mixers
        prefix = f"layers.{layer.index}.mixer"
        match mixer:
            case Mamba2Spec():
                return Mamba2Mixer(mixer, weights, prefix, self.recurrent_backend)
            case AttentionSpec():
                return AttentionMixer(mixer, weights, prefix, self.attention_backend)
            case MlpSpec():
                return Relu2Mlp(weights, prefix)

    def prepare(self, run: Run) -> ModelStep:
        """Have each backend derive its index arrays, once per step."""
        recurrent = self.recurrent_backend.prepare(run, self._device)
        if self.attention_backend is self.recurrent_backend:
            return ModelStep(run, recurrent, recurrent)
        return ModelStep(run, recurrent, self.attention_backend.prepare(run, self._device))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, step: ModelStep, memory: Memory, rows: Tensor) -> Tensor:
        """Run one step: tokens [T], rows [R] to logits [R, vocab_size]; states and KV change in place."""
        if tokens.shape != (step.run.tokens,):
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, but the step has {step.run.tokens} tokens")
        x = functional.embedding(tokens, self._embeddings)
        wide = accumulation_dtype(x.dtype)
        if self.spec.residual_in_fp32:
            x = x.to(wide)
        for norm, mixer, layer in zip(self._norms, self._mixers, memory, strict=True):
            x = x + self._mix(mixer, rms_norm(x, norm, self.spec.norm_eps), layer, step)
        return self._head(rms_norm(x[rows], self._norm, self.spec.norm_eps)).to(wide)

    def _mix(self, mixer: Mixer, x: Tensor, layer: LayerMemory, step: ModelStep) -> Tensor:
        match mixer:
            case Mamba2Mixer():
                return mixer(x, layer.states, step.recurrent)
            case AttentionMixer():
                if layer.kv is None:
                    raise ValueError("an attention layer was given no KV pool")
                return mixer(x, layer.kv, step.attention)
            case Relu2Mlp():
                return mixer(x)
