"""What the torch backend derives from a run, once: chunks, index arrays, and which rows go which way.

The law kept here: every decision is made on integers, before any array is touched, and depends on one sequence only:
its neighbours in the step change neither its chunks nor its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.checks import check_run
from milepost.kernels.protocol import Run


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [begin, end) of a sequence's run, and the indices that the state after them is captured to."""

    begin: int
    end: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A sequence's run of two or more tokens: rows [start, stop) of the step, cut into chunks."""

    sequence: int
    start: int
    stop: int
    slot: int
    fresh: bool
    captures: tuple[tuple[int, int], ...]
    """(offset, target), by offset."""
    chunks: tuple[Chunk, ...]
    first_rows: Tensor
    """[L] int64: the row, counted from `start`, at which each row's chunk begins."""
    chunk_of_row: Tensor
    """[L] int64: the chunk of each row."""
    chunk_ends: Tensor
    """[chunks] int64: the last row of each chunk."""


@dataclass(frozen=True, slots=True)
class Singles:
    """The sequences with one token in this step: they are updated as one batch."""

    sequences: tuple[int, ...]
    slots: tuple[int, ...]
    rows: Tensor
    """[count] int64: their rows in the step."""
    slot_index: Tensor
    """[count] int64."""
    fresh_index: Tensor | None
    """[fresh] int64: the slots to be taken as zeros; None if there are none."""
    capture_targets: Tensor | None
    """[captures] int64; None if there are none."""
    capture_sources: Tensor | None
    """[captures] int64: the live slot that each capture copies, after the update."""


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A prepared run."""

    run: Run
    stretches: tuple[Stretch, ...]
    singles: Singles | None
    mask: Tensor
    """[chunk, chunk] fp32: 0, and -inf above the diagonal."""
    block_index: tuple[Tensor, ...]
    """For each sequence: its blocks up to its last token, int64."""
    kv_blocks: Tensor
    """[tokens] int64: the block that each row's K and V go to; empty if no sequence has blocks."""
    kv_places: Tensor
    """[tokens] int64: their row within the block."""


def prepare(run: Run, mask: Tensor) -> TorchStep:
    """Check and lay out a run. `mask` is square, [chunk, chunk], and stands on the device of the run.

    Raises ValueError if the run contradicts itself.
    """
    check_run(run)
    device, captures = mask.device, _captures_by_sequence(run)
    lengths = [run.length(index) for index in range(run.sequences)]
    stretches = tuple(
        _stretch(run, index, captures[index], mask.shape[0], device) for index, size in enumerate(lengths) if size > 1
    )
    single = [index for index, length in enumerate(lengths) if length == 1]
    kv_blocks, kv_places = _kv_places(run, device)
    return TorchStep(
        run=run,
        stretches=stretches,
        singles=_singles(run, single, captures, device) if single else None,
        mask=mask,
        block_index=tuple(_index(list(_blocks_in_use(run, index)), device) for index in range(run.sequences)),
        kv_blocks=kv_blocks,
        kv_places=kv_places,
    )


def _captures_by_sequence(run: Run) -> list[list[tuple[int, int]]]:
    captures: list[list[tuple[int, int]]] = [[] for _ in range(run.sequences)]
    for capture in run.captures:
        captures[capture.sequence].append((capture.offset, capture.target))
    for of_sequence in captures:
        of_sequence.sort()
    return captures


def cut(length: int, captures: list[tuple[int, int]], chunk: int) -> tuple[Chunk, ...]:
    """Chunks of at most `chunk` rows over [0, length), cut at every capture; chunks start anew after a cut."""
    edges = sorted({offset for offset, _ in captures} | {length})
    chunks: list[Chunk] = []
    begin = 0
    for edge in edges:
        while begin < edge:
            end = min(begin + chunk, edge)
            targets = tuple(target for offset, target in captures if offset == end)
            chunks.append(Chunk(begin, end, targets))
            begin = end
    return tuple(chunks)


def _stretch(run: Run, index: int, captures: list[tuple[int, int]], chunk: int, device: torch.device) -> Stretch:
    chunks = cut(run.length(index), captures, chunk)
    sizes = _index([part.end - part.begin for part in chunks], device)
    order = torch.arange(len(chunks), device=device)
    chunk_of_row = torch.repeat_interleave(order, sizes)
    begins = _index([part.begin for part in chunks], device)
    return Stretch(
        sequence=index,
        start=run.starts[index],
        stop=run.starts[index + 1],
        slot=run.slots[index],
        fresh=run.fresh[index],
        captures=tuple(captures),
        chunks=chunks,
        first_rows=begins.index_select(0, chunk_of_row),
        chunk_of_row=chunk_of_row,
        chunk_ends=begins + sizes - 1,
    )


def _singles(run: Run, sequences: list[int], captures: list[list[tuple[int, int]]], device: torch.device) -> Singles:
    fresh = [run.slots[index] for index in sequences if run.fresh[index]]
    copies = [(target, run.slots[index]) for index in sequences for _, target in captures[index]]
    return Singles(
        sequences=tuple(sequences),
        slots=tuple(run.slots[index] for index in sequences),
        rows=_index([run.starts[index] for index in sequences], device),
        slot_index=_index([run.slots[index] for index in sequences], device),
        fresh_index=_index(fresh, device) if fresh else None,
        capture_targets=_index([target for target, _ in copies], device) if copies else None,
        capture_sources=_index([source for _, source in copies], device) if copies else None,
    )


def _blocks_in_use(run: Run, index: int) -> tuple[int, ...]:
    """The blocks that hold a token once this step is done; a sequence may own more."""
    end = run.positions[index] + run.length(index)
    return run.blocks[index][: -(-end // run.block_size)]


def _kv_places(run: Run, device: torch.device) -> tuple[Tensor, Tensor]:
    blocks: list[int] = []
    places: list[int] = []
    for index, owned in enumerate(run.blocks):
        first, length = run.positions[index], run.length(index)
        if len(owned) * run.block_size < first + length:
            return _index([], device), _index([], device)  # no KV in this run: `attention` refuses it
        for position in range(first, first + length):
            blocks.append(owned[position // run.block_size])
            places.append(position % run.block_size)
    return _index(blocks, device), _index(places, device)


def _index(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
