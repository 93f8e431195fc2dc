"""What a step must do: floating point operations and bytes moved, by phase. In: a spec and counts. Out: pure numbers.

The law kept here: each count is of what the algorithm needs, not of what a kernel does; a multiply-add is two operations.

Operations of one token on one element of a recurrent matrix (S is decayed, written to and read out):
  mamba2       S <- a S + (dt x) b^T, y = S c           decay 1, outer product 1, add 1, read-out 2            = 5
  mamba1       the same, with a = exp(dt A) per element  product and exponential 2 more                         = 7
  gated_delta  S <- g S + k (beta (v - S^T k))^T, S^T q  decay 1, S^T k 2, outer product and add 2, read-out 2  = 7
  kda          as gated_delta, decay per key channel                                                            = 7
  rglru        h <- a h + m x                            3 and the two gates' maps, which count as matrices     = 3
A count that sees only S <- a S + u, one multiply-add, has 2: over 8 bytes read and written in fp32, 0.25 operations a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from milepost.models.spec import AttentionSpec, ModelSpec, RecurrentSpec
from milepost.plan.memory import Memory
from milepost.plan.weights import Weights

SIMPLE = 2
FULL = {"mamba2": 5, "mamba1": 7, "gated_delta": 7, "kda": 7, "rglru": 3, "short_conv": 0}


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step. `flops` and `bytes` are sums of their parts."""

    weight_bytes: float
    kv_bytes: float
    state_bytes: float
    matrix_flops: float
    attention_flops: float
    recurrent_flops: float

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    @property
    def flops(self) -> float:
        """All operations."""
        return self.matrix_flops + self.attention_flops + self.recurrent_flops


def recurrent_flops(spec: ModelSpec, *, simple: bool = False) -> int:
    """Operations of all recurrent updates for one token, convolutions included (2 x width each) unless `simple`."""
    count = 0
    for layer in spec.recurrent_layers:
        for mixer in layer.mixers:
            if not isinstance(mixer, RecurrentSpec):
                continue
            for component in mixer.components:
                if component.name == "recurrent":
                    count += component.elements * (SIMPLE if simple else FULL[mixer.kind])
                elif not simple:
                    count += 2 * component.shape[0] * (component.shape[1] + 1)
    return count


def update_intensity(spec: ModelSpec, recurrent_bytes: int, *, simple: bool) -> float | None:
    """Operations a byte of the recurrent update alone, its matrices read and written once; None without one."""
    matrices = sum(
        component.elements for layer in spec.recurrent_layers for component in layer.components if component.name == "recurrent"
    )
    return recurrent_flops(spec, simple=simple) / (2 * recurrent_bytes) if matrices and recurrent_bytes else None


def decode(spec: ModelSpec, weights: Weights, memory: Memory, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences of `context` tokens."""
    return Work(
        weight_bytes=weights.touched(batch) * weights.bytes_each,
        kv_bytes=batch * (memory.kv_at(context) + memory.bytes_per_token),
        state_bytes=batch * 2.0 * memory.state_bytes,
        matrix_flops=2.0 * weights.active * batch,
        attention_flops=2.0 * batch * _pairs(spec, context),
        recurrent_flops=float(batch * recurrent_flops(spec)),
    )


def prefill(
    spec: ModelSpec, weights: Weights, memory: Memory, tokens: int, chunk: int, update: int | None = None
) -> Work:
    """A prompt of `tokens` in chunks of at most `chunk`: weights and KV so far are read once a chunk, states once in and out.

    The head's product is counted for every token, though only the last one's is needed: at most the head's share too much.
    `update`: what `recurrent_flops(spec)` gives, where a caller asks for many lengths.
    """
    chunks = max(1, math.ceil(tokens / chunk))
    return Work(
        weight_bytes=chunks * weights.touched(min(tokens, chunk)) * weights.bytes_each,
        kv_bytes=float(_seen(memory, tokens, chunk) + memory.bytes_per_token * tokens),
        state_bytes=chunks * 2.0 * memory.state_bytes,
        matrix_flops=2.0 * weights.active * tokens,
        attention_flops=2.0 * _prompt_pairs(spec, tokens),
        recurrent_flops=float(tokens * (recurrent_flops(spec) if update is None else update)),
    )


def _seen(memory: Memory, tokens: int, chunk: int) -> int:
    """Bytes of KV read by a prompt in chunks, each of which reads what stands when it is done, up to each layer's window."""
    whole, rest, total = tokens // chunk, tokens % chunk, 0
    for each in memory.growth:
        window = tokens if each.window is None else min(each.window, tokens)
        growing = min(whole, window // chunk)
        read = chunk * growing * (growing + 1) // 2 + (whole - growing) * window + (window if rest else 0)
        total += each.bytes_per_token * read
    return total


def _pairs(spec: ModelSpec, context: int) -> float:
    """Multiply-adds of attention for one query that sees `context` tokens, or its window of them."""
    return float(sum(products * min(context, window) for products, window in _attentions(spec, context)))


def _prompt_pairs(spec: ModelSpec, tokens: int) -> float:
    """Multiply-adds of attention for all queries of a prompt, each of which sees the tokens up to itself."""
    total = 0.0
    for products, window in _attentions(spec, tokens):
        full = min(tokens, window)
        total += products * (full * (full + 1) / 2 + (tokens - full) * window)
    return total


def _attentions(spec: ModelSpec, context: int) -> list[tuple[int, int]]:
    """(multiply-adds for a pair, window) of each attention layer; a layer that sees all has a window of `context`."""
    found = []
    for layer in spec.attention_layers:
        attention = layer.attention
        if attention is not None:
            window = attention.window if isinstance(attention, AttentionSpec) else None
            found.append((attention.products_per_pair, window or context))
    return found
