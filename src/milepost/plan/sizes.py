"""What a model's memory comes to, before a weight is loaded. In: a spec and its settings. Out: bytes and limits.

The law kept here: planned = allocated (law 9): every number here is read off the layout and the geometry that the pools use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from milepost.engine.settings import Settings
from milepost.models.spec import ModelSpec
from milepost.state.layout import Layout, StateDTypes

_STATES = ("window", "recurrent")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes by layer, token and sequence. The keys of `milepost doctor --json`."""

    attention_layers: int
    recurrent_layers: int
    kv_bytes_per_token: int
    kv_bytes_per_token_per_layer: int
    state_bytes_per_layer: int
    state_bytes_per_sequence: int
    window_bytes_per_sequence: int
    recurrent_bytes_per_sequence: int
    dtypes: StateDTypes
    attention_window: int | None
    """Tokens whose KV a sequence keeps at most; None: all."""

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What one layer remembers: bytes of a sequence's state, and of a token's KV (at most `window` tokens of it)."""

    layer: int
    kinds: tuple[str, ...]
    window_bytes: int
    recurrent_bytes: int
    kv_bytes_per_token: int

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of one length run at once, and what stops the next one."""

    context: int
    sequences: int
    bound_by: str


def sizes_of(spec: ModelSpec, settings: Settings) -> Sizes:
    """Sizes of a model. Per layer: of the largest layer of that kind (in most models all are equal)."""
    layout = settings.layout
    window = sum(part.nbytes for part in layout.state if part.name == "window")
    recurrent = sum(part.nbytes for part in layout.state if part.name == "recurrent")
    by_layer: dict[int, int] = {}
    for part in layout.state:
        by_layer[part.layer] = by_layer.get(part.layer, 0) + part.nbytes
    return Sizes(
        attention_layers=len(spec.attention_layers),
        recurrent_layers=len(spec.recurrent_layers),
        kv_bytes_per_token=layout.kv_bytes_per_token,
        kv_bytes_per_token_per_layer=max((part.nbytes for part in layout.block), default=0) // layout.block_size,
        state_bytes_per_layer=max(by_layer.values(), default=0),
        state_bytes_per_sequence=layout.state_bytes,
        window_bytes_per_sequence=window,
        recurrent_bytes_per_sequence=recurrent,
        dtypes=settings.dtypes,
        attention_window=layout.window,
    )


def layers_of(spec: ModelSpec, layout: Layout) -> tuple[LayerSizes, ...]:
    """Every layer that remembers something."""
    found = []
    for layer in spec.layers:
        own = {name: sum(p.nbytes for p in layout.state if (p.layer, p.name) == (layer.index, name)) for name in _STATES}
        kv = sum(part.nbytes for part in layout.block if part.layer == layer.index) // layout.block_size
        if kv or any(own.values()):
            kinds = tuple(mixer.kind for mixer in layer.mixers)
            found.append(LayerSizes(layer.index, kinds, own["window"], own["recurrent"], kv))
    return tuple(found)


def fits(settings: Settings, max_num_seqs: int, step: int) -> tuple[Fit, ...]:
    """Concurrency at a few lengths up to the longest, in steps of at most `step` tokens: the frontier of one budget."""
    longest = settings.max_model_len
    contexts = sorted({length for length in (1024, 4096, 16384, 65536, 262144) if length < longest} | {longest})
    found = []
    for context in contexts:
        room = settings.geometry.sequences(settings.layout, context, step)
        bound = "max_num_seqs" if room >= max_num_seqs else "kv_cache_memory_bytes"
        found.append(Fit(context, min(room, max_num_seqs), bound))
    return tuple(found)
