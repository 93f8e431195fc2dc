"""What SGLang 0.5.23 would do with a hybrid model. In: a spec, dtypes, bytes for caches, limits. Out: slots, tokens, hits.

The law kept here: every rule names the file of SGLang that it was read in.

Files, all of SGLang 0.5.23 under srt: mem_cache/kv_cache_configurator.py (`_handle_max_mamba_cache`: the split by ratio,
`_calculate_mamba_ratio`: slots of a request, `resolve_max_num_reqs`), mem_cache/allocation_sizing.py (tracking slots),
arg_groups/overrides.py (`_mamba_radix_cache_resolution`: the strategy; `mamba_cache_chunk_size`), runtime_context.py
(`mamba_checkpoint_grid`, `mamba_track_grid`), managers/schedule_batch.py (`_mamba_radix_cache_v2_req_prepare_for_extend`:
where a prompt's states are kept), mem_cache/unified_cache/components/mamba.py (what a match may use).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from milepost.errors import ConfigError
from milepost.models.spec import ModelSpec
from milepost.plan.peers.figures import Flag, as_json, ceil_div, figure, longest_reusable, require_positive, shapes_of
from milepost.state.layout import StateDTypes

VERSION = "0.5.23"
Strategy = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy", "off"]
"""How the prefix tree keeps states; "off": --disable-radix-cache."""
KERNEL_CHUNK = 64
"""Tokens: the chunk of flash-linear-attention, for models whose config names none."""
DRAFTING_REQUESTS = 48
"""arg_groups/speculative_hook.py: max_running_requests while drafting, if it isn't given."""
ABSENT = frozenset(
    {"BambaForCausalLM", "JambaForCausalLM", "OlmoHybridForCausalLM", "RecurrentGemmaForCausalLM", "Zamba2ForCausalLM"}
)
"""Architectures of ours for which srt/models has no class."""
EXTRA_BUFFER = frozenset(
    {
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "KimiLinearForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Architectures of ours that may keep states while running; the others keep those of a sequence's end only."""


@dataclass(frozen=True, slots=True)
class SglangPlan:
    """Bytes are of one tensor-parallel rank. `None`: the model has nothing that the number speaks of."""

    version: str
    architecture: str
    supported: bool
    """Whether this version has a class for the architecture; the arithmetic is given either way."""
    flags: tuple[Flag, ...]
    notes: tuple[str, ...]
    strategy: Strategy = figure("rule", "overrides.py: extra_buffer for architectures that support it, else no_buffer")
    max_model_len: int = figure("asked", "max_model_len")
    ratio: float = figure("asked", "--mamba-full-memory-ratio, 0.9 by default: bytes of states to bytes of KV")
    slot_bytes: int = figure("shapes", "all recurrent layers' windows and recurrent matrices: one state")
    slots_per_request: int = figure(
        "rule", "kv_cache_configurator.py: 3, + 2 tracking slots with extra_buffer (1 lazy); off: 1"
    )
    request_state_bytes: int = figure("rule", "slots_per_request x slot_bytes, and the states of draft tokens")
    state_budget_bytes: int = figure("rule", "memory x ratio / (1 + ratio)")
    slots: int = figure("rule", "max_mamba_cache_size: the budget in slots, one more being padding")
    state_pool_bytes: int = figure("rule", "(slots + 1) x slot_bytes, and the states of draft tokens")
    kv_bytes_per_token: int = figure("shapes", "KV of all attention layers")
    kv_tokens: int | None = figure("rule", "what is left, in tokens, whole pages")
    max_running_requests: int = figure("rule", "resolve_max_num_reqs: least of asked, slots / slots_per_request, kv_tokens / 2")
    bound_by: str = figure("rule", "which of the three that is")
    requests_at_max_len: int = figure("rule", "max_running_requests, or fewer if kv_tokens hold fewer of max_model_len")
    states_beside_running: int = figure("rule", "slots left for the prefix tree while max_running_requests run")
    page_tokens: int = figure("asked", "--page-size, 1 by default")
    chunk_tokens: int = figure("rule", "mamba_chunk_size of the config, 64 without one; at least a page")
    grid_tokens: int = figure("rule", "states of prompts lie at multiples of lcm(chunk, page); no_buffer: at sequence ends")
    decode_grid_tokens: int = figure("rule", "states of answers: lcm(grid, --mamba-track-interval), 256 by default")
    hit_step: int | None = figure("rule", "hits end at multiples of this; None: no hit ever")
    shortest_hit: int | None = figure("rule", "shortest prompt that can ever hit: the last token is always computed")

    def hit(self, shared: int, prompt: int | None = None) -> int:
        """Tokens reused, at best, by a prompt that shares its first `shared` tokens with earlier ones.

        At best: a state was kept wherever the strategy can keep one, chunks starting on the grid. `hit_after` says what one
        earlier prompt leaves; where its chunks start off the grid, its states lie off the grid too.
        """
        limit = longest_reusable(shared, prompt)
        return 0 if self.hit_step is None else limit // self.hit_step * self.hit_step

    def kept(self, prompt: int, step_tokens: int, answer: int = 0) -> tuple[int, ...]:
        """Positions whose states stay behind after a cold prompt, computed `step_tokens` at a time, and its answer.

        With the extra buffer: of each chunk as long as the grid, the deepest point of the grid counted from its start; of
        the answer, the last multiple of the decode grid. Without: where each chunk, and the sequence, ends.
        """
        require_positive(prompt=prompt, step_tokens=step_tokens)
        if self.hit_step is None:
            return ()
        written = prompt + max(0, answer - 1)
        if not self.slot_bytes:
            return tuple(range(self.page_tokens, written + 1, self.page_tokens))
        step = max(self.page_tokens, step_tokens // self.page_tokens * self.page_tokens)
        found = []
        for start in range(0, prompt, step):
            size = min(step, prompt - start)
            if self.strategy == "no_buffer":
                found.append(start + size)
            elif size >= self.grid_tokens:
                found.append(start + size // self.grid_tokens * self.grid_tokens)
        last = written if self.strategy == "no_buffer" else written // self.decode_grid_tokens * self.decode_grid_tokens
        return (*found, last) if last > prompt else tuple(found)

    def hit_after(self, earlier: int, shared: int, prompt: int, step_tokens: int, answer: int = 0) -> int:
        """Tokens reused by the first prompt that shares `shared` tokens with one earlier prompt of `earlier` tokens."""
        limit = longest_reusable(min(shared, earlier + answer), prompt)
        return max((position for position in self.kept(earlier, step_tokens, answer) if position <= limit), default=0)

    def to_json(self) -> dict[str, object]:
        """As plain values, every number as {"value", "origin", "source"}."""
        found: dict[str, object] = as_json(self)
        return found


def plan_sglang(
    spec: ModelSpec,
    dtypes: StateDTypes,
    *,
    max_model_len: int,
    memory_bytes: int,
    max_running_requests: int | None = None,
    draft_tokens: int = 0,
    chunk_tokens: int | None = None,
    page_size: int = 1,
    ratio: float = 0.9,
    track_interval: int = 256,
    strategy: Strategy | Literal["auto"] = "auto",
    overlap: bool = True,
) -> SglangPlan:
    """What SGLang would do with a model (one rank's shard of it) and `memory_bytes` for its caches.

    `chunk_tokens`: the config's mamba_chunk_size. `overlap`: not --disable-overlap-schedule; it costs a tracking slot.
    SGLang verifies one token more than it drafts. Raises ConfigError naming a value that can't be.
    """
    require_positive(max_model_len=max_model_len, memory_bytes=memory_bytes, max_running_requests=max_running_requests)
    require_positive(chunk_tokens=chunk_tokens, page_size=page_size, track_interval=track_interval)
    _require_shares(draft_tokens, ratio)
    chosen = _strategy(strategy, spec, page_size, overlap)
    chunk = _chunk(chosen, chunk_tokens, page_size)
    verified = draft_tokens + 1 if draft_tokens else 0
    asked = max_running_requests or (DRAFTING_REQUESTS if draft_tokens else None)
    shapes = shapes_of(spec, dtypes)
    slot, kv = sum(shapes.state), sum(shapes.kv)
    each = _slots_per_request(chosen, overlap) if slot else 0
    budget, slots, pool = _split(memory_bytes, Fraction(str(ratio)), slot, each, verified, asked, chosen == "off")
    tokens = (memory_bytes - pool) // kv // page_size * page_size if kv else None
    running, bound = _running(asked, slots if slot else None, each, tokens, max_model_len)
    longest, grid = ceil_div(max_model_len, page_size), math.lcm(chunk, page_size)
    step = None if chosen == "off" else grid if slot and chosen != "no_buffer" else page_size
    return SglangPlan(
        version=VERSION,
        architecture=spec.architecture,
        supported=spec.architecture not in ABSENT,
        strategy=chosen,
        max_model_len=max_model_len,
        ratio=ratio,
        slot_bytes=slot,
        slots_per_request=each,
        request_state_bytes=slot * (each + verified),
        state_budget_bytes=budget,
        slots=slots,
        state_pool_bytes=pool,
        kv_bytes_per_token=kv,
        kv_tokens=tokens,
        max_running_requests=running,
        bound_by=bound,
        requests_at_max_len=running if tokens is None else min(running, tokens // page_size // longest),
        states_beside_running=max(0, slots - running * each),
        page_tokens=page_size,
        chunk_tokens=chunk,
        grid_tokens=grid,
        decode_grid_tokens=math.lcm(grid, track_interval),
        hit_step=step,
        shortest_hit=None if step is None else step + 1,
        flags=_flags(chosen, page_size, ratio, running, track_interval, dtypes, slot),
        notes=_notes(spec, chosen, chunk_tokens),
    )


def _require_shares(draft_tokens: int, ratio: float) -> None:
    if draft_tokens < 0:
        raise ConfigError(f"draft_tokens={draft_tokens} must be at least 0", field="draft_tokens")
    if ratio <= 0:
        raise ConfigError(f"ratio={ratio} must be above 0", field="ratio")


def _strategy(asked: Strategy | Literal["auto"], spec: ModelSpec, page_size: int, overlap: bool) -> Strategy:
    """What `auto` means; no_buffer can't page, because the only state is the one at the sequence's end."""
    able = spec.architecture in EXTRA_BUFFER
    if asked == "auto":
        asked = "extra_buffer" if able and (overlap or page_size > 1) else "no_buffer"
    elif asked.startswith("extra") and not able:
        raise ConfigError(f"strategy={asked} is not for {spec.architecture} (supported: no_buffer)", field="strategy")
    if asked == "no_buffer" and page_size > 1 and spec.recurrent_layers:
        raise ConfigError(f"page_size={page_size} is not for no_buffer (supported: 1)", field="page_size")
    if asked == "extra_buffer_lazy" and not overlap:
        raise ConfigError("extra_buffer_lazy needs the overlap schedule", field="strategy")
    return asked


def _chunk(strategy: Strategy, asked: int | None, page_size: int) -> int:
    """Tokens from one state that a prompt's kernel hands out to the next that the tree can name."""
    kernel = asked or KERNEL_CHUNK
    if strategy.startswith("extra") and max(kernel, page_size) % min(kernel, page_size):
        raise ConfigError(f"page_size={page_size} and the chunk of {kernel} must divide one another", field="page_size")
    return max(kernel, page_size)


def _slots_per_request(strategy: Strategy, overlap: bool) -> int:
    """_calculate_mamba_ratio: three, and those that states are tracked in; one if there is no tree."""
    tracking = {"extra_buffer": 2 if overlap else 1, "extra_buffer_lazy": 1}.get(strategy, 0)
    return 1 if strategy == "off" else 3 + tracking


def _split(
    memory: int, ratio: Fraction, slot: int, each: int, verified: int, asked: int | None, off: bool
) -> tuple[int, int, int]:
    """Bytes for states, slots, bytes that they take; drafted tokens take a state each, beside the slots.

    Without a prefix tree, and with max_running_requests given, there is a slot for each request and the ratio isn't read.
    Raises ConfigError if that leaves no slot, or nothing for KV, as SGLang refuses to start.
    """
    if not slot:
        return 0, 0, 0
    budget = math.floor(memory * ratio / (1 + ratio))
    slots = math.floor((budget - slot * (1 + verified)) / (slot * (1 + Fraction(verified, each))))
    if off and asked:
        slots = asked
    pool = (slots + 1) * slot + slot * (min(asked or slots, slots // each) + 1) * verified
    if slots <= 0 or pool >= memory:
        raise ConfigError(f"memory_bytes={memory} holds no state of {slot} bytes beside KV", field="memory_bytes")
    return budget, slots, pool


def _running(asked: int | None, slots: int | None, each: int, tokens: int | None, longest: int) -> tuple[int, str]:
    """resolve_max_num_reqs: how many requests run at once, and what stops the next one."""
    estimate = 4096 if tokens is None else max(2048, min(4096, tokens * 512 // longest))
    limits = {"max_running_requests": asked or estimate}
    if tokens is not None:
        limits["kv_tokens"] = tokens // 2
    if slots is not None:
        limits["slots"] = slots // each
    bound = min(limits, key=lambda name: limits[name])
    return limits[bound], bound


def _flags(
    strategy: Strategy, page: int, ratio: float, running: int, interval: int, dtypes: StateDTypes, slot: int
) -> tuple[Flag, ...]:
    flags = [Flag("--max-running-requests", str(running), "no more run at once")]
    if strategy == "off":
        flags.append(Flag("--disable-radix-cache", None, "one slot a request, and no hit ever"))
    else:
        flags.append(Flag("--page-size", str(page), "states of prompts lie on the lcm of the chunk and this"))
    if slot:
        flags.append(Flag("--mamba-full-memory-ratio", str(ratio), "fixed at start: neither pool can lend to the other"))
        flags.append(Flag("--mamba-ssm-dtype", dtypes.recurrent, "of the recurrent matrices; windows are bfloat16"))
    if slot and strategy != "off":
        flags.append(Flag("--mamba-radix-cache-strategy", strategy, "slots of a request, and where states are kept"))
    if slot and strategy.startswith("extra"):
        flags.append(Flag("--mamba-track-interval", str(interval), "states of answers are kept this far apart"))
    return tuple(flags)


def _notes(spec: ModelSpec, strategy: Strategy, chunk_tokens: int | None) -> tuple[str, ...]:
    notes = []
    if spec.architecture in ABSENT:
        notes.append(f"SGLang {VERSION} has no class for {spec.architecture}: the numbers are what its rules would give")
    if strategy == "no_buffer" and spec.recurrent_layers:
        notes.append(
            "no_buffer keeps the state at a sequence's end only: an identical prompt, or one that parts earlier, misses"
        )
    if chunk_tokens is None and strategy.startswith("extra"):
        notes.append(f"the grid is worked out with a chunk of {KERNEL_CHUNK}, as for a model that names none")
    return tuple(notes)
