"""A small differentiable Nemotron-H for training: Mamba-2, attention and squared-ReLU layers by a pattern.

Parameter names are those of a Nemotron-H checkpoint (``backbone.layers.0.mixer.in_proj.weight`` and so on), so
the state dict is saved as it is. There is no cache: one forward pass takes whole sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class ClerkConfig:
    """Shapes of the model."""

    vocab_size: int = 261
    hidden_size: int = 128
    pattern: str = "M-M*M*-M*-"
    mamba_heads: int = 8
    mamba_head_dim: int = 32
    state_size: int = 32
    groups: int = 2
    conv_kernel: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    eps: float = 1e-5
    chunk: int = 32

    @property
    def inner(self) -> int:
        """Channels inside a Mamba-2 layer."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that pass through the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size


class RMSNorm(nn.Module):
    """Root-mean-square norm, over groups of channels where `groups` is above one."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        grouped = x.unflatten(-1, (self.groups, -1))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (grouped * scale).flatten(-2) * self.weight


def ssd(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Chunked state-space scan. x [n,t,h,p] (times dt), decay [n,t,h] (dt*A), b and c [n,t,g,s]; t % chunk == 0."""
    n, t, h, p = x.shape
    g, k = b.shape[2], t // chunk
    x = x.view(n, k, chunk, g, h // g, p)
    b, c = b.view(n, k, chunk, g, -1), c.view(n, k, chunk, g, -1)
    total = decay.view(n, k, chunk, g, h // g).permute(0, 1, 3, 4, 2).cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    segments = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    scores = torch.einsum("nkigs,nkjgs->nkgij", c, b).unsqueeze(3) * segments
    inside = torch.einsum("nkghij,nkjghp->nkighp", scores, x)
    to_end = (total[..., -1:] - total).exp()
    states = torch.einsum("nkjgs,nkghj,nkjghp->nkghps", b, to_end, x)
    whole = total[..., -1:, None].exp()
    carried = [torch.zeros_like(states[:, 0])]
    for factor, state in zip(whole.unbind(1)[:-1], states.unbind(1)[:-1], strict=True):
        carried.append(carried[-1] * factor + state)
    before = torch.stack(carried, 1)
    across = torch.einsum("nkigs,nkghps,nkghi->nkighp", c, before, total.exp())
    return (inside + across).reshape(n, t, h, p)


class CausalConv(torch.autograd.Function):
    """Depthwise causal convolution over [n,t,c], written out to spare the temporaries of autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        """taps [c,k], the last one for the position itself."""
        ctx.save_for_backward(x, taps)
        length, width = x.shape[1], taps.shape[1]
        out = torch.addcmul(bias, x, taps[:, -1])
        for back in range(1, width):
            out[:, back:].addcmul_(x[:, : length - back], taps[:, width - 1 - back])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, taps and bias."""
        x, taps = ctx.saved_tensors
        length, width = x.shape[1], taps.shape[1]
        grad_x = grad * taps[:, -1]
        grad_taps = [(grad * x).sum((0, 1))]
        for back in range(1, width):
            late, early = grad[:, back:], x[:, : length - back]
            grad_x[:, : length - back].addcmul_(late, taps[:, width - 1 - back])
            grad_taps.append((late * early).sum((0, 1)))
        return grad_x, torch.stack(grad_taps[::-1], 1), grad.sum((0, 1))


class Mamba2(nn.Module):
    """The Mamba-2 mixer: gate first, then the grouped norm."""

    def __init__(self, cfg: ClerkConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.in_proj = nn.Linear(cfg.hidden_size, cfg.inner + cfg.conv_channels + cfg.mamba_heads, bias=False)
        self.conv1d = nn.Conv1d(cfg.conv_channels, cfg.conv_channels, cfg.conv_kernel, groups=cfg.conv_channels, bias=True)
        dt = torch.exp(torch.empty(cfg.mamba_heads).uniform_(math.log(0.01), math.log(0.3)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1.0, 8.0, cfg.mamba_heads)))
        self.D = nn.Parameter(torch.ones(cfg.mamba_heads))
        self.norm = RMSNorm(cfg.inner, cfg.eps, cfg.groups)
        self.out_proj = nn.Linear(cfg.inner, cfg.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        """Mix along the sequence; u [n,t,d] with t a multiple of the chunk."""
        cfg = self.cfg
        n, t, _ = u.shape
        z, xbc, dt = self.in_proj(u).split([cfg.inner, cfg.conv_channels, cfg.mamba_heads], -1)
        xbc = F.silu(CausalConv.apply(xbc, self.conv1d.weight[:, 0], self.conv1d.bias))
        x, b, c = xbc.split([cfg.inner, cfg.groups * cfg.state_size, cfg.groups * cfg.state_size], -1)
        dt = F.softplus(dt + self.dt_bias)
        heads = x.reshape(n, t, cfg.mamba_heads, cfg.mamba_head_dim)
        b, c = (part.reshape(n, t, cfg.groups, cfg.state_size) for part in (b, c))
        y = ssd(heads * dt.unsqueeze(-1), -dt * self.A_log.exp(), b, c, cfg.chunk)
        y = (y + heads * self.D[:, None]).flatten(2)
        return self.out_proj(self.norm(y * F.silu(z)))


class Attention(nn.Module):
    """Causal grouped-query attention without positions; in training the first head's q and k stay readable."""

    def __init__(self, cfg: ClerkConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.hidden_size, bias=False)
        self.tap: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """Attend to this and earlier positions; with `columns` [n,p] only those positions are computed."""
        cfg = self.cfg
        n, t, _ = x.shape
        chosen = x if columns is None else x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
        q = self.q_proj(chosen).view(n, -1, cfg.heads, cfg.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(n, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(n, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        if self.training:
            self.tap = q[:, 0], k[:, 0]
        share = cfg.heads // cfg.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        if columns is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.arange(t) > columns[:, None, :, None]
            scores = (q @ k.transpose(-1, -2)) * cfg.head_dim**-0.5
            y = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Squared-ReLU feed-forward."""

    def __init__(self, cfg: ClerkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(relu(up(x))^2)."""
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Block(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, cfg: ClerkConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.eps)
        self.mixer = {"M": Mamba2, "*": Attention, "-": MLP}[kind](cfg)

    def forward(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """One residual layer; with `columns` an attention layer gives those positions only."""
        if columns is None:
            return x + self.mixer(self.norm(x))
        return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1])) + self.mixer(self.norm(x), columns)


class Backbone(nn.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, cfg: ClerkConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, kind) for kind in cfg.pattern)
        self.norm_f = RMSNorm(cfg.hidden_size, cfg.eps)

    def forward(self, ids: Tensor, columns: Tensor | None = None) -> Tensor:
        """Hidden states of ids [n,t], t a multiple of the chunk; with `columns` [n,p] those of these positions only.

        From the last attention layer on, the layers need only the chosen positions, for no Mamba-2 layer follows.
        """
        x = self.embeddings(ids)
        last = max(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention))
        for index, layer in enumerate(self.layers):
            x = layer(x, columns) if index == last and columns is not None else layer(x)
        return self.norm_f(x)


class ClerkModel(nn.Module):
    """The language model; `lm_head` is not tied to the embeddings."""

    def __init__(self, cfg: ClerkConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.backbone = Backbone(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.backbone.embeddings.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for name, weight in self.backbone.layers.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1] * len(self.cfg.pattern)))
            elif name.endswith("proj.weight"):
                nn.init.normal_(weight, std=1.0 / math.sqrt(weight.shape[1]))

    def hidden(self, ids: Tensor, columns: Tensor | None = None) -> Tensor:
        """Hidden states of ids [n,t] of any length, or of the positions `columns` [n,p] only."""
        length = ids.shape[1]
        padded = F.pad(ids, (0, -length % self.cfg.chunk))
        return self.backbone(padded)[:, :length] if columns is None else self.backbone(padded, columns)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ids [n,t]."""
        return self.lm_head(self.hidden(ids))
