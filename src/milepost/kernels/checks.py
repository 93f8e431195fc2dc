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


def check_blocks(run: Run, window: int | None = None) -> None:
    """Raise ValueError if blocks that attention needs aren't there: those from the first key seen to the last token."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    for index, blocks in enumerate(run.blocks):
        end = run.positions[index] + run.length(index)
        if len(blocks) * run.block_size < end:
            raise ValueError(f"sequence {index} has {end} tokens but {len(blocks)} blocks of {run.block_size} tokens")
        first = first_seen(run.positions[index], window)
        if min(blocks[first // run.block_size : -(-end // run.block_size)]) < 0:
            raise ValueError(f"sequence {index} sees positions {first} to {end - 1}, but a block of them is gone: {blocks}")


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


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


def check_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, run: Run, *, by_channel: bool) -> None:
    """Raise ValueError unless the shapes are those of `KernelBackend.scan_gated_delta`, or `scan_kda` if `by_channel`."""
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k has {k.ndim} dimensions and v has {v.ndim}; both need 3")
    (key_heads, key_dim), (heads, value_dim) = k.shape[1:], v.shape[1:]
    _expect("q", q, (run.tokens, key_heads, key_dim))
    _expect("k", k, (run.tokens, key_heads, key_dim))
    _expect("v", v, (run.tokens, heads, value_dim))
    _expect("g", g, (run.tokens, heads, key_dim) if by_channel else (run.tokens, heads))
    _expect("beta", beta, (run.tokens, heads))
    _expect("pool", pool, (pool.shape[0], heads, key_dim, value_dim))
    if heads % key_heads or (by_channel and heads != key_heads):
        raise ValueError(f"key_heads={key_heads} doesn't fit heads={heads}: {'equal' if by_channel else 'a divisor'} wanted")
    _check_slots(pool, run)


def check_mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless the shapes are those that `KernelBackend.scan_mamba1` documents."""
    if a.ndim != 2:
        raise ValueError(f"a has {a.ndim} dimensions; it needs 2")
    channels, state_size = a.shape
    _expect("x", x, (run.tokens, channels))
    _expect("dt", dt, (run.tokens, channels))
    _expect("b", b, (run.tokens, state_size))
    _expect("c", c, (run.tokens, state_size))
    _expect("d", d, (channels,))
    _expect("pool", pool, (pool.shape[0], channels, state_size))
    _check_slots(pool, run)


def check_rglru(x: Tensor, log_a: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless the shapes are those that `KernelBackend.scan_rglru` documents."""
    if pool.ndim != 2:
        raise ValueError(f"pool has {pool.ndim} dimensions; it needs 2")
    _expect("x", x, (run.tokens, pool.shape[1]))
    _expect("log_a", log_a, (run.tokens, pool.shape[1]))
    _check_slots(pool, run)


def check_attention(q: Tensor, pool: Tensor, run: Run, window: int | None = None, softcap: float | None = None) -> None:
    """Raise ValueError unless q and the pool of KV fit the run, and the blocks that a query sees are there."""
    if q.ndim != 3 or pool.ndim != 5:
        raise ValueError(f"q has {q.ndim} dimensions (3 wanted) and the KV pool {pool.ndim} (5 wanted)")
    _expect("q", q, (run.tokens, q.shape[1], pool.shape[4]))
    _expect("pool", pool, (pool.shape[0], 2, run.block_size, pool.shape[3], pool.shape[4]))
    if q.shape[1] % pool.shape[3]:
        raise ValueError(f"kv_heads={pool.shape[3]} doesn't divide heads={q.shape[1]}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    check_blocks(run, window)


def check_write_kv(k: Tensor, v: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless k, v and the pool of KV fit the run, and the blocks written to are there."""
    if pool.ndim != 5:
        raise ValueError(f"the KV pool has {pool.ndim} dimensions (5 wanted)")
    _expect("pool", pool, (pool.shape[0], 2, run.block_size, pool.shape[3], pool.shape[4]))
    _expect("k", k, (run.tokens, pool.shape[3], pool.shape[4]))
    _expect("v", v, (run.tokens, pool.shape[3], pool.shape[4]))
    check_blocks(run, window=1)  # what lies before the run's first token isn't touched


def check_write_latent(latent: Tensor, pool: Tensor, run: Run) -> None:
    """Raise ValueError unless the rows and the pool of latents fit the run, and the blocks written to are there."""
    if pool.ndim != 3:
        raise ValueError(f"the pool of latents has {pool.ndim} dimensions (3 wanted)")
    _expect("pool", pool, (pool.shape[0], run.block_size, pool.shape[2]))
    _expect("latent", latent, (run.tokens, pool.shape[2]))
    check_blocks(run, window=1)


def check_latent(q: Tensor, pool: Tensor, run: Run, value_dim: int) -> None:
    """Raise ValueError unless q and the pool of latents fit the run."""
    if q.ndim != 3 or pool.ndim != 3:
        raise ValueError(f"q has {q.ndim} dimensions and the pool of latents {pool.ndim}; both need 3")
    _expect("q", q, (run.tokens, q.shape[1], pool.shape[2]))
    _expect("pool", pool, (pool.shape[0], run.block_size, pool.shape[2]))
    if not 1 <= value_dim <= pool.shape[2]:
        raise ValueError(f"value_dim={value_dim} is outside the latent's width of {pool.shape[2]}")
    check_blocks(run)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def _check_slots(pool: Tensor, run: Run) -> None:
    highest = max((*run.slots, *(capture.target for capture in run.captures)), default=-1)
    if highest >= pool.shape[0]:
        raise ValueError(f"index {highest} is outside a pool of {pool.shape[0]}")
