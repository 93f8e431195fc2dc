"""Checks of what an operation is given: a run that contradicts itself, or arrays that don't fit together, raise.

The law kept here: a wrong index raises ValueError before any state is written.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.protocol import Run


def check_run(run: Run) -> None:
    """Raise ValueError, naming the sequence, if a run's parts don't fit together."""
    count = run.sequences
    for name, length in (
        ("starts", len(run.starts) - 1),
        ("positions", len(run.positions)),
        ("fresh", len(run.fresh)),
        ("blocks", len(run.blocks)),
    ):
        if length != count:
            raise ValueError(f"run.{name} describes {length} sequences, but slots has {count}")
    if run.starts[0] != 0 or run.block_size < 1:
        raise ValueError(f"run.starts must begin with 0 (got {run.starts[0]}), block_size={run.block_size} must be >= 1")
    for index in range(count):
        length, position = run.length(index), run.positions[index]
        if length < 1 or position < 0:
            raise ValueError(f"sequence {index} has {length} tokens at position {position}; at least one token at 0")
        if run.fresh[index] and position:
            raise ValueError(f"sequence {index} is fresh at position {position}; only position 0 starts from zeros")
    if len(set(run.slots)) != count:
        raise ValueError(f"run.slots={run.slots} gives one slot to two sequences")
    _check_captures(run)


def _check_captures(run: Run) -> None:
    targets = set(run.slots)
    for capture in run.captures:
        if not 0 <= capture.sequence < run.sequences:
            raise ValueError(f"{capture} names a sequence that isn't there ({run.sequences} in the run)")
        if not 1 <= capture.offset <= run.length(capture.sequence):
            raise ValueError(f"{capture} is outside its sequence's {run.length(capture.sequence)} tokens")
        if capture.target in targets:
            raise ValueError(f"{capture} writes to an index that is a live slot or another capture's target")
        targets.add(capture.target)


def check_blocks(run: Run) -> None:
    """Raise ValueError if a sequence's blocks don't reach to its last token (attention only)."""
    for index, blocks in enumerate(run.blocks):
        end = run.positions[index] + run.length(index)
        if len(blocks) * run.block_size < end:
            raise ValueError(f"sequence {index} has {end} tokens but {len(blocks)} blocks of {run.block_size} tokens")


def check_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless the shapes are those that `KernelBackend.convolution` documents."""
    channels, width = weight.shape
    _expect("x", x, (run.tokens, channels))
    _expect("pool", pool, (pool.shape[0], channels, width - 1))
    if bias is not None:
        _expect("bias", bias, (channels,))
    _check_slots(pool, run)


def check_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless the shapes are those that `KernelBackend.scan_mamba2` documents."""
    if x.ndim != 3 or b.ndim != 3:
        raise ValueError(f"x has {x.ndim} dimensions and b has {b.ndim}; both need 3")
    heads, head_dim, (groups, state_size) = x.shape[1], x.shape[2], b.shape[1:]
    _expect("x", x, (run.tokens, heads, head_dim))
    _expect("dt", dt, (run.tokens, heads))
    _expect("a", a, (heads,))
    _expect("d", d, (heads,))
    _expect("b", b, (run.tokens, groups, state_size))
    _expect("c", c, (run.tokens, groups, state_size))
    _expect("pool", pool, (pool.shape[0], heads, head_dim, state_size))
    if heads % groups:
        raise ValueError(f"groups={groups} doesn't divide heads={heads}")
    _check_slots(pool, run)


def check_attention(q: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless q and the pool of KV fit the run."""
    if q.ndim != 3 or pool.ndim != 5:
        raise ValueError(f"q has {q.ndim} dimensions (3 wanted) and the KV pool {pool.ndim} (5 wanted)")
    _expect("q", q, (run.tokens, q.shape[1], pool.shape[4]))
    _expect("pool", pool, (pool.shape[0], 2, run.block_size, pool.shape[3], pool.shape[4]))
    if q.shape[1] % pool.shape[3]:
        raise ValueError(f"kv_heads={pool.shape[3]} doesn't divide heads={q.shape[1]}")
    check_blocks(run)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def _check_slots(pool: Tensor, run: Run) -> None:
    highest = max((*run.slots, *(capture.target for capture in run.captures)), default=-1)
    if highest >= pool.shape[0]:
        raise ValueError(f"index {highest} is outside a pool of {pool.shape[0]}")
