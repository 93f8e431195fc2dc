"""Where a hybrid's memory overtakes others': its own KV, a dense baseline's, the same stack with attention everywhere.

In: specs and dtypes. Out: lengths in tokens and ratios, each with what was compared. The law kept here: planned = allocated
(law 9): sizes come from the layout of each model, windows included. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from milepost.models.spec import LayerSpec, ModelSpec
from milepost.plan.memory import Memory, memory_of, smaller_from, tokens_worth
from milepost.state.layout import StateDTypes, layout_of

CONTEXTS = (1024, 4096, 16384, 32768, 131072, 262144)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Bytes at a length: the hybrid's, the other's, and the other's over the hybrid's."""

    tokens: int
    hybrid_bytes: int
    other_bytes: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Against:
    """A model set beside another one. Lengths are exact fractions of tokens; None: it never comes to that."""

    name: str
    state_equals_kv_tokens: float | None
    """Length at which the other's KV alone is as large as our state."""
    smaller_from_tokens: float | None
    """Length from which the whole of ours, state and KV, is smaller than the whole of the other."""
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Crossovers:
    """`own_kv_tokens`: length at which a model's own KV has grown as large as its state; None without attention."""

    own_kv_tokens: float | None
    everywhere: Against | None
    """Against the same stack with an attention layer in place of each recurrent one; None without attention."""
    baseline: Against | None

    def to_json(self) -> dict[str, object]:
        """BENCHES.md's keys, in whole tokens, and the exact lengths and ratios beside them."""
        baseline = self.baseline
        return {
            "own_kv_tokens": _whole(self.own_kv_tokens),
            "baseline_state_tokens": _whole(baseline.state_equals_kv_tokens) if baseline else None,
            "baseline_whole_tokens": _whole(baseline.smaller_from_tokens) if baseline else None,
            "exact": asdict(self),
        }


def crossovers_of(
    spec: ModelSpec,
    dtypes: StateDTypes,
    baseline: tuple[str, ModelSpec, StateDTypes] | None = None,
    contexts: Iterable[int] = CONTEXTS,
) -> Crossovers:
    """Compare a model with itself, with its all-attention twin and with a baseline (name, spec, dtypes)."""
    memory, contexts = _memory(spec, dtypes), tuple(contexts)
    twin = attention_everywhere(spec)
    return Crossovers(
        own_kv_tokens=tokens_worth(memory.state_bytes, memory) if memory.growth else None,
        everywhere=None if twin is None else _against("attention in every layer", memory, _memory(twin, dtypes), contexts),
        baseline=None if baseline is None else _against(baseline[0], memory, _memory(*baseline[1:]), contexts),
    )


def attention_everywhere(spec: ModelSpec) -> ModelSpec | None:
    """The same stack with the model's own attention in place of every recurrent mixer; None if it has no attention.

    A layer that has both keeps its own attention alone.
    """
    mixer = next((layer.attention for layer in spec.attention_layers if layer.attention is not None), None)
    if mixer is None:
        return None

    def attended(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixers=(layer.attention or mixer,)) if layer.components else layer

    return replace(spec, layers=tuple(map(attended, spec.layers)))


def _memory(spec: ModelSpec, dtypes: StateDTypes) -> Memory:
    return memory_of(spec, layout_of(spec, dtypes, 1))


def _against(name: str, memory: Memory, other: Memory, contexts: tuple[int, ...]) -> Against:
    ratios = tuple(Ratio(t, memory.at(t), other.at(t), other.at(t) / memory.at(t)) for t in contexts)
    return Against(name, tokens_worth(memory.state_bytes, other), smaller_from(memory, other), ratios)


def _whole(tokens: float | None) -> int | None:
    return None if tokens is None else round(tokens)
