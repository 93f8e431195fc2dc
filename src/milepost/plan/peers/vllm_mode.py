"""One cache mode of vLLM 0.33.0: its numbers, and where its prefix hits fall. In: what `plan_vllm` worked out. Out: hits.

The law kept here: a number stands beside the file of vLLM that its rule was read in. `hit` is what the mode can give at best,
`hit_after` what one earlier prompt leaves: in `align` a prefix shared by different prompts has no state at its end until a
second prompt has shown where they part (v1/core/kv_cache_manager.py, `shared_prefix_boundary`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milepost.plan.peers.figures import Flag, as_json, ceil_div, figure, longest_reusable, require_positive

Mode = Literal["none", "align", "all"]


@dataclass(frozen=True, slots=True)
class VllmMode:
    """One cache mode. Bytes are of one tensor-parallel rank. `None`: the model has nothing that the number speaks of."""

    mode: Mode
    in_version: bool
    """Whether 0.33.0 still has the mode."""
    flags: tuple[Flag, ...]
    max_model_len: int = figure("asked", "max_model_len")
    max_num_seqs: int = figure("asked", "max_num_seqs")
    draft_tokens: int = figure("asked", "draft_tokens")
    block_tokens_before: int | None = figure("rule", "block before inflation: --block-size, 16 if it isn't given")
    block_tokens: int | None = figure("rule", "platforms/interface.py: smallest multiple whose KV holds one layer's state")
    block_tokens_of_code: int | None = figure(
        "assumed", "the same as 0.33.0 rounds on an H100: 128 with MLA, 64 with Qwen's GDN"
    )
    state_block_tokens: int = figure("rule", "tokens from one kept state to the next; max_model_len without caching")
    state_bytes: int = figure("shapes", "largest layer's window and recurrent matrix, window + 1 column for each draft token")
    page_bytes: int = figure("rule", "one block of one layer: KV of block_tokens, and the size that a state is padded to")
    padding_bytes: int = figure("rule", "page_bytes - state_bytes, for each kept state of each layer")
    padding_percent: float = figure("rule", "padding_bytes / state_bytes, as vLLM logs it")
    layers_per_group: int = figure("rule", "kv_cache_planning.py: the fewer of both kinds; the more if under 1.5 times as many")
    attention_groups: int = figure("rule", "attention layers / layers_per_group, rounded up")
    state_groups: int = figure("rule", "recurrent layers / layers_per_group, rounded up, for each set of shapes")
    block_bytes: int = figure("rule", "layers_per_group x page_bytes: what one block id of the shared pool costs")
    states_per_request: int = figure(
        "rule", "MambaSpec: 1 + draft; align 2 + draft + 1 where kernels export a state; all: len / block"
    )
    state_reserve_bytes: int = figure("rule", "state_groups x states_per_request x block_bytes: with what fills up groups")
    state_bytes_per_request: int = figure("shapes", "states_per_request of all layers, without padding")
    state_bytes_per_request_padded: int = figure("rule", "the same with padding: x page_bytes")
    request_blocks_at_max_len: int = figure("rule", "kv_cache_utils.py: blocks of all groups for max_model_len tokens")
    request_bytes_at_max_len: int = figure("rule", "request_blocks_at_max_len x block_bytes")
    blocks: int = figure("rule", "kv_cache_planning.py: memory / block_bytes, rounded down; one of them is the null block")
    start_limit: int = figure("rule", "compilation.py: start is refused if max_num_seqs is above this (full CUDA graphs)")
    refused_at_start: bool = figure("rule", "max_num_seqs > start_limit, or not one request of max_model_len fits")
    sequences_at_max_len: int = figure("rule", "(blocks - 1) / request_blocks_at_max_len: the true limit at max_model_len")
    sequences_short: int = figure(
        "rule", "(blocks - 1) / blocks of a request of one token: no more run whatever max_num_seqs says"
    )
    hit_step: int | None = figure("rule", "hits end at multiples of this; None: no hit ever")
    shortest_hit: int | None = figure("rule", "shortest prompt that can ever hit: the last token is always computed")
    dropped_tokens: int = figure("rule", "speculative.py: an EAGLE or MTP drafter drops the last matching block or unit")

    def request_blocks(self, tokens: int) -> int:
        """Blocks that one request of so many tokens holds at most, KV and states: within its first block, no second state."""
        kv = self.attention_groups * ceil_div(tokens, self.block_tokens) if self.block_tokens else 0
        return kv + self.state_groups * min(
            self.states_per_request, ceil_div(tokens, self.state_block_tokens) + self.draft_tokens
        )

    def sequences(self, tokens: int) -> int:
        """Requests of so many tokens that run at once, max_num_seqs left aside."""
        return max(0, self.blocks - 1) // max(1, self.request_blocks(tokens))

    def hit(self, shared: int, prompt: int | None = None) -> int:
        """Tokens reused, at best, by a prompt that shares its first `shared` tokens with earlier ones.

        At best: a state was kept wherever the mode can keep one. `hit_after` says what one earlier prompt leaves.
        """
        limit = longest_reusable(shared, prompt)
        if self.hit_step is None:
            return 0
        return max(0, limit // self.hit_step * self.hit_step - self.dropped_tokens)

    def kept(self, prompt: int, step_tokens: int, answer: int = 0) -> tuple[int, ...]:
        """Positions whose states stay behind after a cold prompt, computed `step_tokens` at a time, and its answer."""
        require_positive(prompt=prompt, step_tokens=step_tokens)
        block, unit = self.state_block_tokens, self.hit_step
        if unit is None:
            return ()
        crossed = range(prompt // block * block + block, prompt + max(0, answer - 1) + 1, block)
        if self.mode == "all" or not self.state_bytes:
            return (*range(block, prompt + 1, block), *crossed)
        tail = self._last(prompt, unit)
        ends, start = [], 0
        while start < prompt:
            start = self._chunk_end(start, prompt, step_tokens, tail)
            if start % block == 0 or start == tail:
                ends.append(start)
        return (*ends, *crossed)

    def _chunk_end(self, start: int, prompt: int, step_tokens: int, tail: int) -> int:
        """scheduler.py, `_mamba_block_aligned_split`: chunks end at block boundaries, and at the prompt's last state.

        Kernels that hand out a state from inside a chunk leave out the last of these stops; they keep the same last state.
        """
        block = self.state_block_tokens
        end = min(start + step_tokens, prompt)
        aligned = end // block * block
        if end < prompt and (aligned > start or block <= step_tokens):
            end = aligned
        last = self._last(prompt, block)
        stops = [last, *([tail] if tail > last else ()), *([start // block * block + block] if start % block else ())]
        return min((stop for stop in stops if start < stop < end), default=end)

    def _last(self, prompt: int, unit: int) -> int:
        """kv_cache_interface.py, `get_mamba_prefill_checkpoint_position`: where a prompt's last reusable state may lie."""
        return prompt // unit * unit - unit if self.dropped_tokens else (prompt - 1) // unit * unit

    def hit_after(self, earlier: int, shared: int, prompt: int, step_tokens: int, answer: int = 0) -> int:
        """Tokens reused by the first prompt that shares `shared` tokens with one earlier prompt of `earlier` tokens."""
        limit = self.hit(min(shared, earlier + answer), prompt)
        return max((position for position in self.kept(earlier, step_tokens, answer) if position <= limit), default=0)

    def to_json(self) -> dict[str, object]:
        """Every number as {"value", "origin", "source"}."""
        found: dict[str, object] = as_json(self)
        return found
