"""One tensor-parallel rank of a model, as a spec of its own. In: a ModelSpec and a count of ranks. Out: the rank's ModelSpec.

The law kept here: a shard is a spec like any other, so its memory derives from the same layout (law 9). Heads are split; what
several heads read (a group's B and C, a key head, a KV head) is kept by each rank that needs it; a latent row is kept by all.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.errors import ConfigError
from milepost.models.spec import (
    AttentionSpec,
    Component,
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


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a component's first axis that a rank keeps, of one of its blocks (x, B, C, …): start..start + length."""

    block: str
    start: int
    length: int


def shard_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """What each of `ranks` ranks runs; all ranks are alike. Raises ConfigError naming the field whose count can't be split."""
    if ranks < 1:
        raise ConfigError(f"tensor_parallel_size={ranks} is less than 1", field="tensor_parallel_size")
    if ranks == 1:
        return spec
    return replace(spec, layers=tuple(_layer(layer, ranks) for layer in spec.layers))


def slices(whole: Component, shard: Component, ranks: int, rank: int) -> tuple[Slice, ...]:
    """Where a rank's rows stand in the whole component, block by block: x, B and C are split one by one.

    A block that fewer than `ranks` parts make up is kept by several ranks: rank r has part r * parts // ranks.
    """
    found, first = [], 0
    for (name, size), (_, own) in zip(whole.blocks, shard.blocks, strict=True):
        parts = size // own
        found.append(Slice(name, first + rank * parts // ranks * own, own))
        first += size
    return tuple(found)


def _layer(layer: LayerSpec, ranks: int) -> LayerSpec:
    feed_forward = None if layer.feed_forward is None else _feed_forward(layer.feed_forward, ranks)
    return replace(layer, mixers=tuple(_mixer(mixer, ranks) for mixer in layer.mixers), feed_forward=feed_forward)


def _mixer(mixer: MixerSpec, ranks: int) -> MixerSpec:
    match mixer:
        case Mamba2Spec():
            groups = _kept(mixer.groups, ranks, "groups")
            return replace(mixer, heads=_split(mixer.heads, ranks, "Mamba heads"), groups=groups)
        case Mamba1Spec():
            return replace(mixer, inner=_split(mixer.inner, ranks, "Mamba channels"))
        case GatedDeltaSpec():
            keys = _kept(mixer.key_heads, ranks, "key heads")
            return replace(mixer, heads=_split(mixer.heads, ranks, "value heads"), key_heads=keys)
        case KdaSpec():
            return replace(mixer, heads=_split(mixer.heads, ranks, "KDA heads"))
        case ShortConvSpec():
            return replace(mixer, channels=_split(mixer.channels, ranks, "convolution channels"))
        case RgLruSpec():
            heads = _split(mixer.heads, ranks, "RG-LRU heads")
            return replace(mixer, heads=heads, width=mixer.width // mixer.heads * heads)
        case AttentionSpec():
            kept = _kept(mixer.kv_heads, ranks, "KV heads")
            return replace(mixer, heads=_split(mixer.heads, ranks, "attention heads"), kv_heads=kept)
        case LatentAttentionSpec():
            return replace(mixer, heads=_split(mixer.heads, ranks, "attention heads"))
        case MlpSpec():
            return _mlp(mixer, ranks)


def _feed_forward(part: FeedForwardSpec, ranks: int) -> FeedForwardSpec:
    match part:
        case MlpSpec():
            return _mlp(part, ranks)
        case MoeSpec():
            shared = _split(part.shared_width, ranks, "shared expert's channels")
            return replace(part, width=_split(part.width, ranks, "expert channels"), shared_width=shared)


def _mlp(mlp: MlpSpec, ranks: int) -> MlpSpec:
    return replace(mlp, width=_split(mlp.width, ranks, "feed-forward channels"))


def _split(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise ConfigError(f"tensor_parallel_size={ranks} doesn't divide {count} {what}", field="tensor_parallel_size")
    return count // ranks


def _kept(count: int, ranks: int, what: str) -> int:
    """Of what several heads read: an even share, or one that ranks / count ranks keep alike."""
    if count % ranks and ranks % count:
        raise ConfigError(
            f"tensor_parallel_size={ranks} neither divides {count} {what} nor is a multiple of them",
            field="tensor_parallel_size",
        )
    return max(1, count // ranks)
