"""Mixers that keep a state, as data: dimensions, and the components that one sequence is remembered in.

The law kept here: what a recurrent layer remembers is what its spec declares, and nothing else. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ComponentName = Literal["window", "recurrent"]
GateActivation = Literal["silu", "gelu", "gelu_tanh"]
"""What a gate passes; "gelu_tanh" is gelu by its tanh approximation (arXiv 1606.08415)."""


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of a recurrent layer's state, for one sequence.

    `blocks` are the parts along the first axis that tensor-parallel shards slice one by one (x | B | C).
    """

    name: ComponentName
    shape: tuple[int, ...]
    blocks: tuple[tuple[str, int], ...]

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A Mamba-2 mixer (arXiv 2405.21060): `heads` x `head_dim` channels, B and C shared by `groups`.

    `norm`: y is gated by silu(z) and then normed over each group, or the other way round, or only gated.
    `out_bias`: of the output projection; None: as `proj_bias`. `section_multipliers`: of z, x, B, C and dt, after in_proj.
    The input and output multipliers scale what a mixer beside others in its layer reads and gives.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    dt_min: float
    dt_max: float
    norm_eps: float
    norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    out_bias: bool | None = None
    section_multipliers: tuple[float, ...] | None = None
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    kind: Literal["mamba2"] = "mamba2"

    @property
    def inner(self) -> int:
        """Channels of x: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution over x | B | C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [conv_channels, conv_kernel - 1] and recurrent matrix [heads, head_dim, state_size]."""
        group_width = self.groups * self.state_size
        return (
            Component(
                "window",
                (self.conv_channels, self.conv_kernel - 1),
                (("x", self.inner), ("B", group_width), ("C", group_width)),
            ),
            Component("recurrent", (self.heads, self.head_dim, self.state_size), (("heads", self.heads),)),
        )


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): out_proj(C * conv(B * x)). Its whole state is the window of B * x."""

    channels: int
    kernel: int
    bias: bool
    kind: Literal["short_conv"] = "short_conv"

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [channels, kernel - 1] and no recurrent matrix."""
        return (Component("window", (self.channels, self.kernel - 1), (("x", self.channels),)),)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net (arXiv 2412.06464): `heads` value heads share `key_heads` key heads. No bias anywhere.

    `beta_scale` 2 lets the write strength reach 2, so that the transition may have negative eigenvalues.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    beta_scale: float = 1.0
    kind: Literal["gated_delta"] = "gated_delta"

    @property
    def key_width(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of v, of the gate, and of what comes out."""
        return self.heads * self.value_dim

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [q | k | v, conv_kernel - 1] and recurrent matrix [heads, key_dim, value_dim]."""
        return _delta_components(self)


@dataclass(frozen=True, slots=True)
class KdaSpec:
    """Kimi delta attention (arXiv 2510.26692): a delta rule whose decay is of each key channel. No bias in its projections.

    `rank`: of the low-rank maps that give the decays and the output gate.
    """

    heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    rank: int
    norm_eps: float
    kind: Literal["kda"] = "kda"

    @property
    def key_width(self) -> int:
        """Channels of q, of k, and of the decay."""
        return self.heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of v, of the gate, and of what comes out."""
        return self.heads * self.value_dim

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [q | k | v, conv_kernel - 1] and recurrent matrix [heads, key_dim, value_dim]."""
        return _delta_components(self)


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """A Mamba-1 mixer (arXiv 2312.00752). `norm_eps`: RMS norms stand on dt, B and C (Jamba); None: they don't."""

    inner: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    norm_eps: float | None = None
    kind: Literal["mamba1"] = "mamba1"

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [inner, conv_kernel - 1] and recurrent matrix [inner, state_size]."""
        blocks = (("x", self.inner),)
        return (
            Component("window", (self.inner, self.conv_kernel - 1), blocks),
            Component("recurrent", (self.inner, self.state_size), blocks),
        )


@dataclass(frozen=True, slots=True)
class RgLruSpec:
    """A recurrent block of Griffin (arXiv 2402.19427): a convolution and an RG-LRU over `width` channels, times a gate.

    The gates inside the recurrence are block-diagonal maps: `heads` blocks of width / heads channels. Every map has a bias.
    """

    width: int
    heads: int
    conv_kernel: int
    activation: GateActivation = "gelu_tanh"
    kind: Literal["rglru"] = "rglru"

    @property
    def components(self) -> tuple[Component, ...]:
        """Window [width, conv_kernel - 1] and recurrent state [width]; a shard takes whole heads of both."""
        blocks = (("x", self.width),)
        return (
            Component("window", (self.width, self.conv_kernel - 1), blocks),
            Component("recurrent", (self.width,), blocks),
        )


RecurrentSpec = Mamba2Spec | ShortConvSpec | GatedDeltaSpec | Mamba1Spec | KdaSpec | RgLruSpec
"""Mixers that keep a state: each declares its `components`."""


def _delta_components(mixer: GatedDeltaSpec | KdaSpec) -> tuple[Component, ...]:
    """What a delta rule remembers, whatever its decay: the last columns of q, k and v, and a matrix for each value head."""
    key, value = mixer.key_width, mixer.value_width
    return (
        Component("window", (2 * key + value, mixer.conv_kernel - 1), (("q", key), ("k", key), ("v", value))),
        Component("recurrent", (mixer.heads, mixer.key_dim, mixer.value_dim), (("heads", mixer.heads),)),
    )
