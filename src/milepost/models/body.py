"""The body that most families share: layers of two residual blocks, a mixer and then a feed-forward, each after a norm.

In: a spec and how the family names its parts. Out: the tensors that a checkpoint must hold; `layers.stack.two_blocks` builds
the model by the same names. The law kept here: a name is said once, so what is loaded is what is read. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from milepost.models.naming import (
    attention_weights,
    expert_weights,
    frame_weights,
    kda_weights,
    latent_weights,
    mamba1_weights,
    mamba2_weights,
    mlp_weights,
    short_conv_weights,
)
from milepost.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    KdaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
    WeightSpec,
)

MixerWeights = Callable[[str, MixerSpec, int], list[WeightSpec]]
FeedForwardWeights = Callable[[str, FeedForwardSpec, int], list[WeightSpec]]


@dataclass(frozen=True, slots=True)
class Body:
    """How a family names what stands in `layers.N`: its norms, its mixers by kind, its feed-forward and router.

    `frame`: embeddings, last norm, head.
    """

    frame: tuple[str, str, str]
    norms: tuple[str, ...]
    mixers: Mapping[str, str]
    feed_forward: str
    router: str = "gate"


ONE_BLOCK = Body(
    frame=("embeddings.weight", "norm_f.weight", "lm_head.weight"),
    norms=("norm",),
    mixers={"mamba1": "mixer", "mamba2": "mixer"},
    feed_forward="",
)
"""A layer of one residual block around its mixer: pure Mamba."""


def mixer_weights(prefix: str, mixer: MixerSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of a mixer by the names that most families use. Raises TypeError for a kind that each stores in its own way."""
    match mixer:
        case Mamba2Spec():
            return mamba2_weights(prefix, mixer, hidden)
        case Mamba1Spec():
            return mamba1_weights(prefix, mixer, hidden)
        case ShortConvSpec():
            return short_conv_weights(prefix, mixer, hidden)
        case AttentionSpec():
            return attention_weights(prefix, mixer, hidden)
        case KdaSpec():
            return kda_weights(prefix, mixer, hidden)
        case LatentAttentionSpec():
            return latent_weights(prefix, mixer, hidden)
        case MlpSpec():
            return mlp_weights(prefix, mixer, hidden)
        case _:
            raise TypeError(f"each family names the tensors of a {mixer.kind} layer itself")


def body_weights(
    spec: ModelSpec,
    body: Body,
    *,
    mixer: MixerWeights = mixer_weights,
    feed_forward: FeedForwardWeights | None = None,
) -> tuple[WeightSpec, ...]:
    """Names and shapes of all tensors. `mixer`, `feed_forward`: for families that store those in their own way."""
    hidden, tensors = spec.hidden_size, frame_weights(spec, body.frame)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        tensors += [WeightSpec(f"{prefix}.{name}.weight", (hidden,)) for name in body.norms]
        for each in layer.mixers:
            tensors += mixer(f"{prefix}.{body.mixers[each.kind]}", each, hidden)
        if layer.feed_forward is not None:
            inner, part = f"{prefix}.{body.feed_forward}", layer.feed_forward
            tensors += feed_forward(inner, part, hidden) if feed_forward else _feed_forward(inner, part, hidden, body.router)
    return tuple(tensors)


def _feed_forward(prefix: str, part: FeedForwardSpec, hidden: int, router: str) -> list[WeightSpec]:
    match part:
        case MlpSpec():
            return mlp_weights(prefix, part, hidden)
        case MoeSpec():
            return expert_weights(prefix, part, hidden, router=router)
