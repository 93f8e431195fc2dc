"""Which experts a row takes, and how much of each. In: hidden rows. Out: experts and shares.

The law kept here: scores are fp32 (fp64 in an fp64 run), whatever the activations' dtype, and a row is routed by itself alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import accumulation_dtype
from milepost.models.spec import RouterSpec


class Router:
    """The `per_token` experts of the best scores; `bias` [experts] helps to choose and isn't part of the shares."""

    def __init__(self, spec: RouterSpec, per_token: int, scores: Linear, bias: Tensor | None = None) -> None:
        self.spec = spec
        self.per_token = per_token
        self.scores = scores
        self.bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] to experts [T, per_token] int64 and shares [T, per_token] in x's dtype."""
        logits = self.scores(x.to(self.scores.weight.dtype)).to(accumulation_dtype(x.dtype))
        scores = logits.softmax(-1) if self.spec.scores == "softmax" else logits.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        if self.spec.groups > 1:
            ranked = self._of_best_groups(ranked)
        chosen = ranked.topk(self.per_token, -1).indices
        shares = scores.gather(-1, chosen)
        if self.spec.normalise:
            shares = shares / (shares.sum(-1, keepdim=True) + self.spec.epsilon)
        return chosen, shares.mul_(self.spec.scaling).to(x.dtype)

    def _of_best_groups(self, ranked: Tensor) -> Tensor:
        """ranked [T, experts] with -inf for the experts of all but the best groups."""
        grouped = ranked.view(ranked.shape[0], self.spec.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(self.spec.best_groups, -1).indices
        lost = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
        return grouped.masked_fill(lost[..., None], float("-inf")).flatten(1)
