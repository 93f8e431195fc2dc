"""What a model is made of, as data: layers, the components that each remembers, dimensions, dtypes.

The law kept here: everything about a model's memory derives from these specs (pools, planner, doctor, wire layout),
and nothing in this file or in a family's parser imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milepost.models.recurrent import Component as Component
from milepost.models.recurrent import ComponentName as ComponentName
from milepost.models.recurrent import GateActivation as GateActivation
from milepost.models.recurrent import GatedDeltaSpec as GatedDeltaSpec
from milepost.models.recurrent import KdaSpec as KdaSpec
from milepost.models.recurrent import Mamba1Spec as Mamba1Spec
from milepost.models.recurrent import Mamba2Spec as Mamba2Spec
from milepost.models.recurrent import RecurrentSpec as RecurrentSpec
from milepost.models.recurrent import RgLruSpec as RgLruSpec
from milepost.models.recurrent import ShortConvSpec as ShortConvSpec

DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
    window: int | None = None
    """Tokens that a query sees, the last of them itself; None: all."""
    out_bias: bool | None = None
    """Of the output projection; None: as `bias`."""
    key_multiplier: float = 1.0
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    kind: Literal["attention"] = "attention"

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds: K and V."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def products_per_pair(self) -> int:
        """Multiply-adds for one query and one token that it sees: q k and the sum over v."""
        return 2 * self.heads * self.head_dim

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's KV in one block: K and V apart."""
        return (2, block_size, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv 2405.04434): all heads read one row a token, its latent | a shared key part.

    A head's key is `nope_dim` channels made from the latent of `rank`, and the `shared_dim` channels that all heads share;
    its value is `value_dim` channels made from the latent. Nothing is rotated. `query_rank`: q comes through a normed
    row of so many channels; None: straight from x. `norm_eps`: of the norms of that row and of the latent. `bias`: of the
    maps from x and of the output map.
    """

    heads: int
    rank: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    scale: float
    norm_eps: float
    query_rank: int | None = None
    bias: bool = False
    kind: Literal["latent_attention"] = "latent_attention"

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.shared_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds: the latent and the shared part of the key."""
        return self.rank + self.shared_dim

    @property
    def products_per_pair(self) -> int:
        """Multiply-adds for one query and one token that it sees, both as wide as the latent row."""
        return self.heads * (self.kv_elements_per_token + self.rank)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's KV in one block."""
        return (block_size, self.kv_elements_per_token)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward block without memory: down(act(up(x))), or down(act(gate(x)) * up(x)) if `gated`."""

    width: int
    bias: bool
    activation: Literal["relu2"] | GateActivation
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


AnyAttentionSpec = AttentionSpec | LatentAttentionSpec
"""Mixers that keep KV: each says how many numbers a token adds, and in what shape a block holds them."""
MixerSpec = RecurrentSpec | AnyAttentionSpec | MlpSpec
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
    def attention(self) -> AnyAttentionSpec | None:
        """The attention mixer of this layer, if it has one."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AnyAttentionSpec)), None)


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
    logits_soft_cap: float | None = None
    """Logits are cap * tanh(logits / cap), after they are divided; None: they aren't capped."""
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
    `parts`: names under which a checkpoint may hold equal pieces of it, in order, instead; each of `part_shape`, or, where
    that is (), a slice along the first axis.
    """

    name: str
    shape: tuple[int, ...]
    keep_precision: bool = False
    optional: bool = False
    parts: tuple[str, ...] = ()
    part_shape: tuple[int, ...] = ()

    @property
    def shape_of_part(self) -> tuple[int, ...]:
        """Shape of each of the parts."""
        return self.part_shape or self.shape[1:]
