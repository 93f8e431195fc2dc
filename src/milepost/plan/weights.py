"""How large a model's weights are, and how much of them one token touches. In: a spec, perhaps a checkpoint. Out: bytes.

The law kept here: a number says where it comes from: a checkpoint's headers, or the product of the shapes that the family asks
for. No torch, and no weight is read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from milepost.models.naming import attention_weights, mlp_weights
from milepost.models.registry import family_of, sized_only
from milepost.models.spec import DTYPE_BYTES, AttentionSpec, DType, LayerSpec, MlpSpec, ModelSpec, MoeSpec, WeightSpec
from milepost.models.weights import read_headers
from milepost.plan.figures import as_json, figure

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_ALL_EXPERTS = re.compile(r"\.experts\.\w+$|block_sparse_moe\.(in|out)put_linear\.weight$")


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters are counts, not bytes."""

    total_bytes: int = figure("shapes", "headers of the safetensors files where there are some, else shapes x dtype")
    parameters: int = figure("shapes", "sum over the tensors that the family asks for")
    matrices: int = figure("shapes", "products that every token passes, a shared block at each use; no embeddings, no experts")
    expert: int = figure("shapes", "parameters of one routed expert in all its layers; 0 without experts")
    experts: int = figure("shapes", "routed experts of a layer")
    experts_taken: int = figure("shapes", "experts that one token takes")
    bytes_each: int = figure("shapes", "of one parameter")

    @property
    def active(self) -> int:
        """Parameters of the products that one token passes."""
        return self.matrices + self.expert * self.experts_taken

    def touched(self, tokens: float) -> float:
        """Parameters that a batch of so many tokens reads; of experts, those expected if each token chooses evenly."""
        if not self.experts:
            return float(self.matrices)
        missed: float = (1 - self.experts_taken / self.experts) ** tokens
        return self.matrices + self.expert * self.experts * (1 - missed)

    def to_json(self) -> dict[str, object]:
        """As plain values, each number with its origin."""
        found: dict[str, object] = as_json(self)
        return found


def weights_of(spec: ModelSpec, dtype: DType, path: Path | None = None) -> Weights | None:
    """Count a model's weights; `path`: a directory that may hold safetensors. None for a model that is only sized.

    Raises ConfigError for files that can't be read.
    """
    if sized_only(spec) is not None:
        return None
    wanted = [tensor for tensor in family_of(spec).weights(spec) if not tensor.optional]
    each = DTYPE_BYTES[dtype]
    layers = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoeSpec)]
    moe = max(layers, key=lambda part: part.experts, default=None)
    count = moe.experts if moe else 0
    routed = sum(_size(tensor) for tensor in wanted if _is_routed(tensor))
    embeddings = _size(wanted[0])
    products = sum(_size(tensor) for tensor in wanted if len(tensor.shape) > 1) - routed
    matrices = products if spec.tie_embeddings else products - embeddings  # tied, the head reads the embeddings' matrix
    matrices += sum(_used_again(layer, spec.hidden_size) for layer in spec.layers)
    stored = read_headers(path) if path is not None and any(path.glob("*.safetensors*")) else None
    total = sum(tensor.end - tensor.begin for tensor in stored.values()) if stored else each * sum(map(_size, wanted))
    return Weights(
        total_bytes=total,
        parameters=sum(map(_size, wanted)),
        matrices=matrices,
        expert=routed // count if count else 0,
        experts=count,
        experts_taken=moe.per_token if moe else 0,
        bytes_each=each,
    )


def _used_again(layer: LayerSpec, hidden: int) -> int:
    """Parameters of a block that a layer takes from another one: passed once more, though stored once."""
    if layer.shares is None or layer.shares == layer.index:
        return 0
    tensors = attention_weights("", layer.attention, hidden) if isinstance(layer.attention, AttentionSpec) else []
    tensors += mlp_weights("", layer.feed_forward, hidden) if isinstance(layer.feed_forward, MlpSpec) else []
    return sum(map(_size, tensors))


def _is_routed(tensor: WeightSpec) -> bool:
    return bool(_ONE_EXPERT.search(tensor.name) or _ALL_EXPERTS.search(tensor.name))


def _size(tensor: WeightSpec) -> int:
    return math.prod(tensor.shape)
