"""The shapes that both peers size their pools from. In: a spec. Out: bytes by layer.

The law kept here: planned = allocated (law 9): every byte is a part of `layout_of`, the layout that our pools are built from.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import ConfigError
from milepost.models.spec import DTYPE_BYTES, ModelSpec, RecurrentSpec
from milepost.plan.figures import as_json, figure
from milepost.state.layout import StateDTypes, layout_of

__all__ = ["Flag", "Shapes", "as_json", "ceil_div", "figure", "longest_reusable", "require_positive", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line flag of the peer to set. `value` None: the flag stands alone."""

    name: str
    value: str | None
    why: str

    @property
    def text(self) -> str:
        """As typed."""
        return self.name if self.value is None else f"{self.name} {self.value}"


@dataclass(frozen=True, slots=True)
class Shapes:
    """Bytes of what one sequence remembers, layer by layer. `kinds` counts the recurrent layers of each set of shapes."""

    state: tuple[int, ...]
    """One state of each recurrent layer."""
    widened: tuple[int, ...]
    """The same with the windows that draft tokens lengthen, by one column each."""
    kinds: tuple[int, ...]
    kv: tuple[int, ...]
    """KV of one token in each attention layer."""

    @property
    def largest_state(self) -> int:
        """Bytes of the largest layer's state, draft tokens counted; 0 without recurrent layers."""
        return max(self.widened, default=0)

    @property
    def largest_kv(self) -> int:
        """Bytes of a token's KV in the largest attention layer; 0 without attention."""
        return max(self.kv, default=0)


def shapes_of(spec: ModelSpec, dtypes: StateDTypes, draft_tokens: int = 0) -> Shapes:
    """Read a model's bytes off its layout. Draft tokens lengthen the windows of Mamba-2, gated delta and KDA layers only."""
    layout = layout_of(spec, dtypes, 1)
    state: dict[int, int] = {}
    extra: dict[int, int] = {}
    forms: dict[int, tuple[object, ...]] = {}
    longer = {
        layer.index
        for layer in spec.recurrent_layers
        for mixer in layer.mixers
        if isinstance(mixer, RecurrentSpec) and mixer.kind in ("mamba2", "gated_delta", "kda")
    }
    for part in layout.state:
        state[part.layer] = state.get(part.layer, 0) + part.nbytes
        forms[part.layer] = (*forms.get(part.layer, ()), part.name, part.shape)
        if part.name == "window" and part.layer in longer:
            extra[part.layer] = part.shape[0] * draft_tokens * DTYPE_BYTES[part.dtype]
    counts: dict[tuple[object, ...], int] = {}
    for form in forms.values():
        counts[form] = counts.get(form, 0) + 1
    return Shapes(
        state=tuple(state.values()),
        widened=tuple(nbytes + extra.get(layer, 0) for layer, nbytes in state.items()),
        kinds=tuple(counts.values()),
        kv=tuple(part.nbytes for part in layout.block),
    )


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def require_positive(**values: int | None) -> None:
    """Raise ConfigError naming the first value that is not above zero; None passes."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value} must be at least 1", field=name)


def longest_reusable(shared: int, prompt: int | None) -> int:
    """Most tokens of a shared prefix that a prompt may take from a cache: its last token is always computed.

    `prompt` None: one token longer than the shared prefix. Raises ConfigError if it is shorter than that prefix.
    """
    if shared < 0 or (prompt is not None and prompt < shared):
        raise ConfigError(f"a prompt of {prompt} tokens can't share {shared} of them", field="shared")
    return shared if prompt is None else max(0, min(shared, prompt - 1))
