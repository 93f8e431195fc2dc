"""A language model of pre-norm residual blocks, x + multiplier * part(norm(x)): token ids in, logits of the wanted rows out.

The law kept here: all rows of a step pass every layer as one ragged run; only the wanted rows reach the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import Run
from milepost.models.body import Body
from milepost.models.layers.attention import AttentionMixer
from milepost.models.layers.gated_delta import GatedDeltaMixer
from milepost.models.layers.kda import KdaMixer
from milepost.models.layers.latent import LatentAttentionMixer
from milepost.models.layers.linear import Linear
from milepost.models.layers.mamba1 import Mamba1Mixer
from milepost.models.layers.mamba2 import Mamba2Mixer
from milepost.models.layers.mlp import Experts, GatedMlp, Relu2Mlp
from milepost.models.layers.norm import accumulation_dtype, rms_norm
from milepost.models.layers.rglru import RgLruMixer
from milepost.models.layers.router import Router
from milepost.models.layers.short_conv import ShortConvMixer
from milepost.models.protocol import Backends, LayerMemory, Memory, ModelStep
from milepost.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    GatedDeltaSpec,
    KdaSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RgLruSpec,
    ShortConvSpec,
)


class Part(Protocol):
    """A mixer or a feed-forward: hidden rows [T, hidden] to hidden rows, with the layer's memory and the step."""

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden], already normed, to [T, hidden]; the layer's states and KV change in place."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """One residual block: of which layer, its norm's weight (None: it reads the stream as it is), its part."""

    layer: int
    norm: Tensor | None
    part: Part


class Stack:
    """Implements `models.protocol.Model`. A family adds its blocks in the order in which they run.

    `names` are the family's names for the embeddings, the last norm and the head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        backends: Backends,
        names: tuple[str, str, str] = ("embeddings.weight", "norm_f.weight", "lm_head.weight"),
    ) -> None:
        self.spec = spec
        self.recurrent_backend = backends.recurrent
        self.attention_backend = backends.attention
        self.blocks: list[Block] = []
        self._device = backends.device
        embeddings, norm, head = names
        self._embeddings = weights[embeddings]
        self._head = Linear(weights.get(head, self._embeddings))
        self._norm = weights[norm]

    def add(self, layer: int, norm: Tensor | None, part: Part) -> None:
        """Append a block."""
        self.blocks.append(Block(layer, norm, part))

    def prepare(self, run: Run) -> ModelStep:
        """Have each backend derive its index arrays, once per step."""
        recurrent = self.recurrent_backend.prepare(run, self._device)
        same = self.attention_backend is self.recurrent_backend
        attention = recurrent if same else self.attention_backend.prepare(run, self._device)
        return ModelStep(run, recurrent, attention, _positions(run, self._device))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, step: ModelStep, memory: Memory, rows: Tensor) -> Tensor:
        """Run one step: tokens [T], rows [R] to logits [R, vocab_size]; states and KV change in place."""
        if tokens.shape != (step.run.tokens,):
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, but the step has {step.run.tokens} tokens")
        spec = self.spec
        x = functional.embedding(tokens, self._embeddings)
        wide = accumulation_dtype(x.dtype)
        if spec.residual_in_fp32:
            x = x.to(wide)
        if spec.embedding_multiplier != 1.0:
            x = x * spec.embedding_multiplier
        x = self.run_blocks(x, step, memory)
        logits = self._head(rms_norm(x[rows], self._norm, spec.norm_eps, spec.norm_offset)).to(wide)
        logits = logits if spec.logits_divisor == 1.0 else logits.div_(spec.logits_divisor)
        cap = spec.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def run_blocks(self, x: Tensor, step: ModelStep, memory: Memory) -> Tensor:
        """The residual stream [T, hidden] from the embeddings to the last block."""
        spec = self.spec
        for block in self.blocks:
            read = x if block.norm is None else rms_norm(x, block.norm, spec.norm_eps, spec.norm_offset)
            added = block.part(read, memory[block.layer], step)
            x = x + added if spec.residual_multiplier == 1.0 else x.add(added, alpha=spec.residual_multiplier)
        return x


FirstPart = Callable[[LayerSpec, Mapping[str, Tensor], str, Stack], Part]
SecondPart = Callable[[FeedForwardSpec, Mapping[str, Tensor], str], Part]


def two_blocks(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    backends: Backends,
    body: Body,
    *,
    first: FirstPart | None = None,
    second: SecondPart | None = None,
) -> Stack:
    """A stack of two residual blocks a layer: the mixer, then the feed-forward or the experts.

    `first` (its prefix is the layer's) and `second` (its prefix is the feed-forward's): for parts that a family makes itself.
    """
    stack = Stack(spec, weights, backends, body.frame)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        norms = [weights[f"{prefix}.{name}.weight"] for name in body.norms]
        if first is None:
            mixer = mixer_of(layer.mixers[0], weights, f"{prefix}.{body.mixers[layer.mixers[0].kind]}", stack)
        else:
            mixer = first(layer, weights, prefix, stack)
        stack.add(layer.index, norms[0], mixer)
        if layer.feed_forward is None:
            raise ValueError(f"layer {layer.index} has no feed-forward")
        inner = f"{prefix}.{body.feed_forward}"
        given = second or partial(feed_forward_of, router=body.router)
        stack.add(layer.index, norms[1], given(layer.feed_forward, weights, inner))
    return stack


def one_block(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends, body: Body) -> Stack:
    """A stack of one residual block a layer, around its mixer."""
    stack = Stack(spec, weights, backends, body.frame)
    for layer in spec.layers:
        prefix, (mixer,) = f"layers.{layer.index}", layer.mixers
        part = mixer_of(mixer, weights, f"{prefix}.{body.mixers[mixer.kind]}", stack)
        stack.add(layer.index, weights[f"{prefix}.{body.norms[0]}.weight"], part)
    return stack


def feed_forward_of(part: FeedForwardSpec, weights: Mapping[str, Tensor], prefix: str, router: str = "gate") -> Part:
    """A gated feed-forward, or experts stored one by one under `experts.N` with their router beside them."""
    match part:
        case MlpSpec():
            return gated_mlp_of(part, weights, prefix)
        case MoeSpec():
            bias = weights.get(f"{prefix}.expert_bias")
            chooses = Router(part.router, part.per_token, Linear.of(weights, f"{prefix}.{router}"), bias)
            return Experts.of(weights, f"{prefix}.experts", chooses, part.experts)


def gated_mlp_of(mlp: MlpSpec, weights: Mapping[str, Tensor], prefix: str) -> GatedMlp:
    """A gated feed-forward with its own activation and multipliers. Raises ValueError for one without a gate."""
    if mlp.activation == "relu2" or not mlp.gated:
        raise ValueError(f"{prefix} has no gate")
    return GatedMlp.of(weights, prefix, (mlp.gate_multiplier, mlp.down_multiplier), mlp.activation)


def mixer_of(mixer: MixerSpec, weights: Mapping[str, Tensor], prefix: str, stack: Stack) -> Part:
    """The run-time part of a mixer whose tensors stand under `prefix`."""
    match mixer:
        case Mamba2Spec():
            return Mamba2Mixer(mixer, weights, prefix, stack.recurrent_backend)
        case Mamba1Spec():
            return Mamba1Mixer(mixer, weights, prefix, stack.recurrent_backend)
        case GatedDeltaSpec():
            return GatedDeltaMixer(mixer, weights, prefix, stack.recurrent_backend)
        case KdaSpec():
            return KdaMixer(mixer, weights, prefix, stack.recurrent_backend)
        case ShortConvSpec():
            return ShortConvMixer(mixer, weights, prefix, stack.recurrent_backend)
        case RgLruSpec():
            return RgLruMixer(mixer, weights, prefix, stack.recurrent_backend)
        case AttentionSpec():
            return AttentionMixer(mixer, weights, prefix, stack.attention_backend)
        case LatentAttentionSpec():
            return LatentAttentionMixer(mixer, weights, prefix, stack.attention_backend)
        case MlpSpec():
            return GatedMlp.of(weights, prefix) if mixer.gated else Relu2Mlp(weights, prefix)


def _positions(run: Run, device: torch.device) -> Tensor:
    """The absolute position of each row, [T] int64."""
    parts = [torch.arange(start, start + run.length(i)) for i, start in enumerate(run.positions)]
    return torch.cat(parts).to(device)
