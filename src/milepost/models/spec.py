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
    """A Mamba-2 mixer (arXiv 2405.21060): `heads` x `head_dim` channels, B and C shared by `groups`."""

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
    activation: Literal["relu2", "silu"]
    gated: bool = False
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts of which each token takes `per_token`, beside a shared one of `shared_width` that all take (0: none).

    Weights of the chosen are the softmax over their own router logits.
    """

    experts: int
    per_token: int
    width: int
    shared_width: int
    kind: Literal["moe"] = "moe"


MixerSpec = Mamba2Spec | AttentionSpec | MlpSpec
FeedForwardSpec = MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its index, its mixers (several run in parallel in some families), the feed-forward after them."""

    index: int
    mixers: tuple[MixerSpec, ...]
    feed_forward: FeedForwardSpec | None = None

    @property
    def components(self) -> tuple[Component, ...]:
        """State components of this layer, in layout order; empty if the layer has none."""
        return tuple(c for mixer in self.mixers if isinstance(mixer, Mamba2Spec) for c in mixer.components)

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
    """

    name: str
    shape: tuple[int, ...]
    keep_precision: bool = False
    optional: bool = False
