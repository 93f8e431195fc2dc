"""What vLLM 0.33.0 would do with a hybrid model. In: a spec, dtypes, bytes for caches, limits. Out: blocks, reserves, hits.

The law kept here: every rule names the file of vLLM that it was read in; where the golden file's rule is simpler than the
code, the golden rule gives the number and `block_tokens_of_code` what the code does on an H100.

Files, all of vLLM 0.33.0: platforms/interface.py (`_align_hybrid_block_size`: inflation, padding), v1/kv_cache_interface.py
(`MambaSpec`: reserve), v1/core/kv_cache_planning.py (groups, bytes of a block), v1/core/kv_cache_manager.py and
v1/core/single_type_kv_cache_manager.py (hits), v1/core/sched/scheduler.py (`_mamba_block_aligned_split`: where states are
kept), config/compilation.py (the check of max_num_seqs). The mode `all` (PR 25752) is gone in 0.33.0, which accepts
`--mamba-cache-mode` without effect; issue 52895 shows its branch as of August 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from milepost.errors import ConfigError
from milepost.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, RecurrentSpec
from milepost.plan.peers.figures import Flag, Shapes, as_json, ceil_div, require_positive, shapes_of
from milepost.plan.peers.vllm_mode import Mode, VllmMode
from milepost.state.layout import StateDTypes

VERSION = "0.33.0"
MODES: tuple[Mode, ...] = ("none", "align", "all")
KERNEL_BLOCK = 16
"""Tokens: what FlashAttention's blocks are multiples of, and the block before inflation (CacheConfig.DEFAULT_BLOCK_SIZE)."""
ABSENT = frozenset({"BambaForCausalLM", "RecurrentGemmaForCausalLM"})
"""Architectures of ours that model_executor/models/registry.py doesn't list (Bamba is among those of earlier versions)."""
CHUNK_WITHOUT_ONE = 2048
"""config/model.py, `get_mamba_chunk_size`: for a model that names no chunk."""


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """The three modes beside each other."""

    version: str
    architecture: str
    supported: bool
    """Whether this version's registry lists the architecture; the arithmetic is given either way."""
    none: VllmMode
    align: VllmMode
    all: VllmMode
    notes: tuple[str, ...]

    @property
    def modes(self) -> tuple[VllmMode, ...]:
        """In the order none, align, all."""
        return (self.none, self.align, self.all)

    def hit(self, mode: Mode, shared: int, prompt: int | None = None) -> int:
        """Tokens reused in a mode, at best: the staircase."""
        return self.modes[MODES.index(mode)].hit(shared, prompt)

    def to_json(self) -> dict[str, object]:
        """As plain values, every number of a mode as {"value", "origin", "source"}."""
        found: dict[str, object] = as_json(self)
        return found


def inflated_block(state_bytes: int, kv_bytes: int, multiple: int = KERNEL_BLOCK) -> int:
    """Tokens of an attention block that is as large as a layer's state: the smallest multiple whose KV holds it."""
    return multiple * ceil_div(state_bytes, multiple * kv_bytes)


def plan_vllm(
    spec: ModelSpec,
    dtypes: StateDTypes,
    *,
    max_model_len: int,
    memory_bytes: int,
    max_num_seqs: int = 1024,
    draft_tokens: int = 0,
    chunk_tokens: int | None = None,
    block_size: int | None = None,
    match_unit: int | None = None,
    drafter_drops: bool = True,
) -> VllmPlan:
    """What vLLM would do with a model (one rank's shard of it) and `memory_bytes` for its caches.

    `chunk_tokens`: the config's mamba_chunk_size, which only the mode `all` reads. `max_num_seqs`: 1,024 is vLLM's default
    on devices of 70 GB and more. `match_unit`: --prefix-match-unit. `drafter_drops`: the draft tokens come from EAGLE or MTP.
    Raises ConfigError naming a value that can't be.
    """
    require_positive(max_model_len=max_model_len, memory_bytes=memory_bytes, max_num_seqs=max_num_seqs)
    require_positive(chunk_tokens=chunk_tokens, block_size=block_size, match_unit=match_unit)
    if draft_tokens < 0:
        raise ConfigError(f"draft_tokens={draft_tokens} must be at least 0", field="draft_tokens")
    if block_size is not None and block_size % KERNEL_BLOCK:
        raise ConfigError(f"block_size={block_size} must be a multiple of {KERNEL_BLOCK} (FlashAttention)", field="block_size")
    shapes = shapes_of(spec, dtypes, draft_tokens)
    asked = _Asked(spec, dtypes, shapes, max_model_len, memory_bytes, max_num_seqs, draft_tokens, block_size or KERNEL_BLOCK)
    unit = match_unit if shapes.kv and shapes.state else None
    drops = drafter_drops and draft_tokens > 0
    return VllmPlan(
        version=VERSION,
        architecture=spec.architecture,
        supported=spec.architecture not in ABSENT,
        none=_mode("none", asked, None, None, False),
        align=_mode("align", asked, None, unit, drops),
        all=_mode("all", asked, chunk_tokens or CHUNK_WITHOUT_ONE, None, drops),
        notes=_notes(spec, shapes, chunk_tokens),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    spec: ModelSpec
    dtypes: StateDTypes
    shapes: Shapes
    max_model_len: int
    memory: int
    max_num_seqs: int
    draft_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class _Grid:
    """The sizes that a mode settles first. `states`: of one recurrent layer, for one request, at most."""

    block: int | None
    block_of_code: int | None
    state_block: int
    step: int | None
    page: int
    layers: int
    attention_groups: int
    state_groups: int
    states: int


def _grid(mode: Mode, asked: _Asked, chunk: int | None, unit: int | None) -> _Grid:
    shapes, longest = asked.shapes, asked.max_model_len
    block, of_code = _blocks(mode, asked, chunk)
    state_block = longest if mode == "none" else block or chunk or asked.block_size
    step = None if mode == "none" else unit or state_block
    if step is not None and state_block % step:
        raise ConfigError(f"match_unit={unit} must divide the block of {state_block} tokens", field="match_unit")
    layers, groups = _groups(([len(shapes.kv)] if shapes.kv else []) + list(shapes.kinds))
    kept = 1 + (mode == "align") + (mode == "align" and _exports(asked.spec)) + asked.draft_tokens
    return _Grid(
        block=block,
        block_of_code=of_code,
        state_block=state_block,
        step=step,
        page=block * shapes.largest_kv if block else shapes.largest_state,
        layers=layers,
        attention_groups=groups[0] if shapes.kv else 0,
        state_groups=sum(groups[1:] if shapes.kv else groups),
        states=(ceil_div(longest, state_block) if mode == "all" else kept) if shapes.state else 0,
    )


def _mode(mode: Mode, asked: _Asked, chunk: int | None, unit: int | None, drops: bool) -> VllmMode:
    grid, state = _grid(mode, asked, chunk, unit), asked.shapes.largest_state
    block_bytes = grid.layers * grid.page
    blocks = asked.memory // block_bytes if block_bytes else 0
    padding = grid.page - state if state else 0
    dropped = grid.step or 0 if drops else 0
    found = VllmMode(
        mode=mode,
        in_version=mode != "all",
        max_model_len=asked.max_model_len,
        max_num_seqs=asked.max_num_seqs,
        draft_tokens=asked.draft_tokens,
        block_tokens_before=asked.block_size if grid.block else None,
        block_tokens=grid.block,
        block_tokens_of_code=grid.block_of_code,
        state_block_tokens=grid.state_block,
        state_bytes=state,
        page_bytes=grid.page,
        padding_bytes=padding,
        padding_percent=100 * padding / state if state else 0.0,
        layers_per_group=grid.layers,
        attention_groups=grid.attention_groups,
        state_groups=grid.state_groups,
        block_bytes=block_bytes,
        states_per_request=grid.states,
        state_reserve_bytes=grid.state_groups * grid.states * block_bytes,
        state_bytes_per_request=grid.states * sum(asked.shapes.widened),
        state_bytes_per_request_padded=grid.states * len(asked.shapes.state) * grid.page,
        request_blocks_at_max_len=0,
        request_bytes_at_max_len=0,
        blocks=blocks,
        start_limit=blocks,
        refused_at_start=False,
        sequences_at_max_len=0,
        sequences_short=0,
        hit_step=grid.step,
        shortest_hit=None if grid.step is None else grid.step + dropped + 1,
        dropped_tokens=dropped,
        flags=(),
    )
    return _filled(found, asked, unit)


def _filled(found: VllmMode, asked: _Asked, unit: int | None) -> VllmMode:
    """What follows from the blocks of a request, which the mode itself counts."""
    needed = found.request_blocks(found.max_model_len)
    return replace(
        found,
        request_blocks_at_max_len=needed,
        request_bytes_at_max_len=needed * found.block_bytes,
        refused_at_start=found.max_num_seqs > found.blocks or needed > found.blocks,
        sequences_at_max_len=found.sequences(found.max_model_len),
        sequences_short=found.sequences(1),
        flags=_flags(found, asked, unit),
    )


def _blocks(mode: Mode, asked: _Asked, chunk: int | None) -> tuple[int | None, int | None]:
    """The attention block by the golden rule, and as the code rounds it on an H100."""
    state, kv, given = asked.shapes.largest_state, asked.shapes.largest_kv, asked.block_size
    if not kv:
        return None, None
    if not state:
        return given, given
    multiple = max(KERNEL_BLOCK, given)
    if mode == "all":
        multiple = math.lcm(chunk or CHUNK_WITHOUT_ONE, multiple)
    of_code = multiple
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in asked.spec.attention_layers):
        of_code = max(of_code, 128)
    if mode == "align" and _exports(asked.spec) and "gated_delta" in _kinds(asked.spec):
        of_code = math.lcm(of_code, 64)
    return inflated_block(state, kv, multiple), inflated_block(state, kv, of_code)


def _exports(spec: ModelSpec) -> bool:
    """Whether every recurrent kernel hands out a state from inside a chunk: mamba_mixer2.py; Qwen's GDN with FlashInfer."""
    kinds = _kinds(spec)
    return kinds == {"mamba2"} or (kinds == {"gated_delta"} and spec.architecture.startswith("Qwen3"))


def _kinds(spec: ModelSpec) -> set[str]:
    return {mixer.kind for layer in spec.recurrent_layers for mixer in layer.mixers if isinstance(mixer, RecurrentSpec)}


def _groups(counts: list[int]) -> tuple[int, list[int]]:
    """kv_cache_planning.py, `_get_kv_cache_groups_uniform_page_size`: layers of a group, and groups of each kind."""
    if not counts:
        return 0, []
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return size, [ceil_div(count, size) for count in counts]


def _flags(mode: VllmMode, asked: _Asked, unit: int | None) -> tuple[Flag, ...]:
    """The flags that give this mode, and those that its limits call for."""
    runs = max(1, min(asked.max_num_seqs, mode.start_limit, mode.sequences(1)))
    flags = []
    if mode.mode == "none":
        flags.append(Flag("--no-enable-prefix-caching", None, "hybrids cache prefixes by default; without it, no hit ever"))
    else:
        flags.append(
            Flag("--enable-prefix-caching", None, "gives align; the default for hybrids, not for pure recurrent models")
        )
    if mode.mode == "all":
        flags.append(Flag("--mamba-cache-mode", "all", "only before 0.33.0, where this flag has no effect"))
        why = "only before 0.33.0: align takes the attention block whatever this says"
        flags.append(Flag("--mamba-block-size", str(mode.state_block_tokens), why))
    if mode.mode == "align" and mode.block_tokens and asked.shapes.state:
        why = f"hits at the end of an earlier prompt within a block of {mode.block_tokens:,}; must divide the block"
        flags.append(Flag("--prefix-match-unit", str(unit or KERNEL_BLOCK), why))
    if mode.block_tokens:
        why = f"raised to {mode.block_tokens:,} in any case, so that a block holds a state" if asked.shapes.state else "default"
        flags.append(Flag("--block-size", str(asked.block_size), why))
    if asked.shapes.state:
        flags.append(Flag("--mamba-cache-dtype", asked.dtypes.window, "of the windows"))
        flags.append(Flag("--mamba-ssm-cache-dtype", asked.dtypes.recurrent, "of the recurrent matrices"))
    why = f"no more run at once: {mode.blocks:,} blocks, {mode.request_blocks(1)} at least for each request"
    flags.append(Flag("--max-num-seqs", str(runs), why))
    flags.append(Flag("--max-model-len", str(asked.max_model_len), "as asked"))
    return tuple(flags)


def _notes(spec: ModelSpec, shapes: Shapes, chunk_tokens: int | None) -> tuple[str, ...]:
    """What a reader must know before believing the numbers."""
    notes = []
    if spec.architecture in ABSENT:
        notes.append(f"vLLM {VERSION} doesn't list {spec.architecture}: the numbers are what its rules would give")
    if not shapes.kv:
        notes.append("no attention, so no block to inflate; prefix caching is off by default for such models")
    if not shapes.state:
        notes.append("no recurrent layer: blocks stay as they are, and every one of them can be hit")
    if any(isinstance(layer.attention, AttentionSpec) and layer.attention.window for layer in spec.attention_layers):
        notes.append("sliding windows are counted as attention to all tokens")
    if chunk_tokens is None:
        notes.append(f"the mode all is worked out with a chunk of {CHUNK_WITHOUT_ONE}, as for a model that names none")
    return tuple(notes)
