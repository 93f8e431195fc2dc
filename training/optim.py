"""Muon for the weight matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrix, roughly, by a quintic Newton-Schulz iteration."""
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for matrices."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                buffer = state["momentum"]
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def make_optimisers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Split the parameters between Muon (projections of the layers) and AdamW."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        (matrices if name.endswith("proj.weight") else others).append(weight)
    return [
        Muon(matrices, lr=muon_lr),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
