"""What a model is made of, as data: layers, the components that each remembers, dimensions, dtypes.

The law kept here: everything about a model's memory derives from these specs (pools, planner, doctor, wire layout),
and nothing in this file or in a family's parser imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

ComponentName = Literal["window", "recurrent"]


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
        key, value = self.key_width, self.value_width
        return (
            Component("window", (2 * key + value, self.conv_kernel - 1), (("q", key), ("k", key), ("v", value))),
            Component("recurrent", (self.heads, self.key_dim, self.value_dim), (("heads", self.heads),)),
        )


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
class NormSpec:
    """An RMS norm of q and k, of each head by itself or of all together.

    `offset` is added to the stored weight: 1 where weights are stored around zero.
    """

    eps: float
    offset: float = 0.0
    per_head: bool = True


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (arXiv 2104.09864) over the first `dim` channels of a head, halves paired."""

    dim: int
    theta: float


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention with grouped heads. `rotary` None: no position embedding (Nemotron-H)."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    scale: float
    rotary: RotarySpec | None = None
    qk_norm: NormSpec | None = None
    """A norm on q and k before they are rotated."""
    gated: bool = False
    """Multiply what comes out by the sigmoid of a gate that q_proj gives beside each head's query."""
    input_width: int | None = None
    """Channels that q, k and v are projected from; None: the model's hidden size."""
    adapter_rank: int = 0
    """Of the low-rank maps that each use of shared weights adds to q, k and v; 0: none."""
    key_multiplier: float = 1.0
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    kind: Literal["attention"] = "attention"

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds: K and V."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward block without memory: down(act(up(x))), or down(act(gate(x)) * up(x)) if `gated`."""

    width: int
    bias: bool
    activation: Literal["relu2", "silu", "gelu"]
    gated: bool = False
    adapter_rank: int = 0
    """Of the low-rank map that each use of shared weights adds to gate and up; 0: none."""
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    """Of gate(x) before its activation, and of what comes out of down."""
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How experts are chosen and weighed: by softmax or sigmoid scores, the best with `bias` added (to choose only).

    `normalise`: divide the chosen scores by their sum + `epsilon`; then times `scaling`. With `groups` of experts, only
    the `best_groups` whose two best biased scores sum highest may be chosen from.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    bias: bool = False
    scaling: float = 1.0
    epsilon: float = 0.0
    groups: int = 1
    best_groups: int = 1


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts of which each token takes `per_token`, beside a shared one of `shared_width` that all take (0: none).

    `shared_gate`: the shared one is multiplied by the sigmoid of a score of its own. "relu2" experts have no gate
    projection. `latent`: the width that rows are mapped to before the experts, and back after; None: they aren't.
    `bias`: of the shared one and of those maps.
    """

    experts: int
    per_token: int
    width: int
    shared_width: int
    router: RouterSpec = RouterSpec()
    shared_gate: bool = False
    activation: Literal["silu", "relu2"] = "silu"
    latent: int | None = None
    bias: bool = False
    kind: Literal["moe"] = "moe"


RecurrentSpec = Mamba2Spec | ShortConvSpec | GatedDeltaSpec | Mamba1Spec
"""Mixers that keep a state: each declares its `components`."""
MixerSpec = RecurrentSpec | AttentionSpec | MlpSpec
FeedForwardSpec = MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its index, its mixers (several run in parallel in some families), the feed-forward after them."""

    index: int
    mixers: tuple[MixerSpec, ...]
    feed_forward: FeedForwardSpec | None = None
    shares: int | None = None
    """The layer that holds the weights of this one's attention and feed-forward; None: they are its own."""

    @property
    def components(self) -> tuple[Component, ...]:
        """State components of this layer, in layout order; empty if the layer has none."""
        return tuple(c for mixer in self.mixers if isinstance(mixer, RecurrentSpec) for c in mixer.components)

    @property
    def attention(self) -> AttentionSpec | None:
        """The attention mixer of this layer, if it has one."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)), None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A parsed `config.json`."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_embeddings: bool
    max_position_embeddings: int
    dtype: DType
    """dtype that the checkpoint declares."""
    recurrent_dtype: DType
    """What `auto` means for the recurrent matrix in this family."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    residual_in_fp32: bool = False
    """Keep the residual stream in fp32 whatever the weights' dtype."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Each layer adds this much of what its mixer, and its feed-forward, gave."""
    logits_divisor: float = 1.0
    norm_offset: float = 0.0
    """Added to the stored weights of the norms between blocks: 1 where they are stored around zero."""

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that keep KV."""
        return tuple(layer for layer in self.layers if layer.attention is not None)

    @property
    def recurrent_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that keep a state."""
        return tuple(layer for layer in self.layers if layer.components)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor that a checkpoint must hold, under the name that the model knows it by.

    `keep_precision`: stays fp32 (fp64 in an fp64 run) whatever the run's dtype. `optional`: used if it is there.
    `parts`: names under which a checkpoint may hold the slices along the first axis one by one instead.
    """

    name: str
    shape: tuple[int, ...]
    keep_precision: bool = False
    optional: bool = False
    parts: tuple[str, ...] = ()
