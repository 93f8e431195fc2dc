"""Who computes how many tokens in the next step. In: sequences and the state store. Out: a plan of integers and handles.

A step has a token budget: decodes first, then prompts in chunks, then new requests while slots and bytes last.
The laws kept here: shortage is not death (7): a request that finds no room waits, a running one gives way by turning its live
state into a checkpoint. A rejected admission leaves nothing behind. Nothing in this file knows an array from a tensor.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from milepost.engine.sequence import Sequence
from milepost.state.arena import BlockHandle, StateHandle
from milepost.state.placement import Reason, Spot, spots
from milepost.state.store import Match, StateStore


@dataclass(frozen=True, slots=True)
class Planned:
    """A capture: the state after `offset` tokens of the share goes to `target`."""

    offset: int
    target: StateHandle
    reason: Reason


@dataclass(slots=True)
class Share:
    """What one sequence computes in one step: tokens start..start + length."""

    sequence: Sequence
    start: int
    length: int
    captures: list[Planned] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """One step. Restores and block copies come first, then the shares run as one batch."""

    shares: list[Share] = field(default_factory=list)
    restores: list[tuple[Sequence, Match]] = field(default_factory=list)
    copies: list[tuple[BlockHandle, BlockHandle]] = field(default_factory=list)
    """(source, target); the source is held until the copy was made."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(share.length for share in self.shares)


@dataclass(slots=True)
class Tally:
    """What the scheduler did, for metrics."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    queries: int = 0
    hits: int = 0
    lost_hits: int = 0
    preemptions: int = 0
    bound_by: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)


class Scheduler:
    """Waiting and running sequences, each in order of service."""

    def __init__(self, store: StateStore, *, max_running: int, token_budget: int, interval: int | None) -> None:
        self.store = store
        self.max_running = max_running
        self.token_budget = token_budget
        self.interval = interval
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.tally = Tally()

    def add(self, sequence: Sequence) -> None:
        """A new request waits."""
        insort(self.waiting, sequence, key=lambda s: s.key)

    def schedule(self) -> Plan:
        """Plan a step. Everything that it takes is either in the plan or held by a sequence."""
        plan = Plan()
        for decoding in (True, False):
            for sequence in list(self.running):
                if (sequence.remaining == 1) is decoding and sequence.slot is not None:
                    self._extend(sequence, plan)
        while self.waiting and self._admit(self.waiting[0], plan):
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda s: s.key)
        return plan

    def commit(self, plan: Plan) -> None:
        """The step ran: take positions from the states that it wrote, publish its captures, let go of what it pinned."""
        self._unpin(plan)
        for share in plan.shares:
            sequence = share.sequence
            if sequence.slot is None:
                continue
            tag = self.store.arena.tag(sequence.slot)
            sequence.computed = sequence.computed if tag is None else tag.position
            prompt_part = min(share.start + share.length, sequence.prompt_tokens) - min(share.start, sequence.prompt_tokens)
            self.tally.computed_prompt_tokens += prompt_part
            sequence.fed = max(sequence.fed, sequence.computed)
            for capture in share.captures:
                self._publish(sequence, capture.target, capture.reason)
            self._slide(sequence)

    def cancel(self, plan: Plan) -> None:
        """The step failed: undo what it took. The sequences are the caller's to finish."""
        self._unpin(plan)
        for share in plan.shares:
            for capture in share.captures:
                self.store.give_slot(capture.target)

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        """A request ended: its last state becomes a checkpoint if it is worth keeping; all else is given back."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._vacate(sequence, "answer_end" if keep else None)

    def preempt(self, sequence: Sequence, plan: Plan | None = None) -> None:
        """Take a running sequence off: its live state becomes a checkpoint, from which it resumes if that still stands."""
        if plan is not None:
            for share in [share for share in plan.shares if share.sequence is sequence]:
                plan.shares.remove(share)
                for capture in share.captures:
                    self.store.give_slot(capture.target)
        self.running.remove(sequence)
        self._vacate(sequence, "preempted")
        self.tally.preemptions += 1
        self.add(sequence)

    # --- one sequence -----------------------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, plan: Plan) -> None:
        """Give a running sequence its share. It may end up preempted, or preempt a younger one."""
        length = min(sequence.remaining, self.token_budget - plan.tokens)
        if length <= 0:
            return
        while not self._grow(sequence, sequence.computed + length):
            victim = self.running[-1]
            self.preempt(victim, plan)
            if victim is sequence:
                return
        self._share(sequence, length, plan)

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Let a waiting sequence in, with the longest prefix that can be reused; or leave no trace."""
        if len(self.running) >= self.max_running:
            return self._refuse("max_num_seqs")
        if plan.tokens >= self.token_budget:
            return self._refuse("max_num_batched_tokens")
        if self.running and self.store.arena.geometry.state_pages > self.store.available_pages():
            return self._refuse("kv_cache_memory_bytes")
        read = sequence.request.params.prompt_logprobs is None
        match = self.store.match(sequence.tokens, sequence.chain, read=read, again=sequence.refused)
        sequence.refused = True
        if not self._enter(sequence, match, plan):
            self._retreat(sequence, match)
            if self.running:
                return self._refuse("kv_cache_memory_bytes")
            # Alone and still no room: the hit itself is in the way (its state beside the live slot). Start cold.
            match = Match(match.tree, shared=match.shared, held=match.held)
            if not self._enter(sequence, match, plan):
                self._retreat(sequence, match)
                return self._refuse("kv_cache_memory_bytes")
        sequence.refused = False
        self._account(sequence, match)
        sequence.computed = match.position
        sequence.spots = self._spots(sequence, match)
        sequence.covered = match.position
        plan.restores.append((sequence, match))
        self._share(sequence, min(sequence.remaining, self.token_budget - plan.tokens), plan)
        return True

    def _enter(self, sequence: Sequence, match: Match, plan: Plan) -> bool:
        """Take a slot and the blocks of the first share; False if the whole prompt would not find room beside the others."""
        geometry, layout = self.store.arena.geometry, self.store.layout
        shared = match.position // layout.block_size if match.blocks else 0
        gone = min(shared, layout.first_block(match.position))
        needed = layout.blocks_at_once([each.next_length for each in (*self.running, sequence)], self.token_budget)
        missing = max(0, needed - (shared - gone) - sum(other.held for other in self.running))
        if geometry.state_pages + missing * geometry.block_pages > self.store.available_pages():
            return False
        sequence.slot = self.store.take_slot()
        if sequence.slot is None:
            return False
        partial = match.blocks[shared] if shared < len(match.blocks) else None
        sequence.blocks, sequence.gone = match.blocks[:shared], gone
        end = match.position + min(sequence.length - match.position, self.token_budget - plan.tokens)
        if not self._grow(sequence, end):
            return False
        own = sequence.blocks[shared] if partial is not None else None
        if partial is not None and own is not None:
            plan.copies.append((partial, own))
        return True

    def _retreat(self, sequence: Sequence, match: Match) -> None:
        """Undo `_enter` and the match: nothing of a rejected admission stays."""
        matched = set(match.blocks)
        self.store.give_blocks([*match.blocks, *(block for block in sequence.blocks if block not in matched)])
        self.store.release(match)
        if sequence.slot is not None:
            self.store.give_slot(sequence.slot)
        sequence.slot, sequence.blocks, sequence.gone = None, [], 0

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens; False if there is none to be had (those that were taken stay)."""
        wanted = self.store.layout.blocks_for(tokens)
        while len(sequence.blocks) < wanted:
            block = self.store.take_block()
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _slide(self, sequence: Sequence) -> None:
        """Give back the blocks that lie behind every window."""
        self.store.give_blocks(sequence.pass_blocks(self.store.layout.first_block(sequence.computed)))

    def _share(self, sequence: Sequence, length: int, plan: Plan) -> None:
        share = Share(sequence, sequence.computed, length)
        plan.shares.append(share)
        end = share.start + length
        while sequence.spots and sequence.spots[0].position <= end:
            spot, *rest = sequence.spots
            sequence.spots = tuple(rest)
            target = self.store.take_capture(sequence.covered, spot.position)
            if target is None:
                self.store.counts.skipped["no_room"] += 1
                continue
            sequence.covered = spot.position
            share.captures.append(Planned(spot.position - share.start, target, spot.reason))

    def _spots(self, sequence: Sequence, match: Match) -> tuple[Spot, ...]:
        if not self.store.caching:
            return ()
        return spots(
            prompt_tokens=sequence.prompt_tokens,
            resumed_at=match.position,
            boundaries=[(boundary.position, boundary.reason) for boundary in sequence.request.boundaries],
            shared_tokens=match.shared,
            present=match.present,
            interval=self.interval,
        )

    def _publish(self, sequence: Sequence, handle: StateHandle, reason: Reason) -> None:
        self.store.publish(handle, sequence.request.id, sequence.tokens, sequence.chain, sequence.blocks, reason)

    def _vacate(self, sequence: Sequence, reason: Reason | None) -> None:
        """Part with slot and blocks; with a reason, the live state becomes a checkpoint."""
        if sequence.slot is None:
            return
        if reason is None or not sequence.computed:
            self.store.give_slot(sequence.slot)
        else:
            self._publish(sequence, sequence.slot, reason)
        self.store.give_blocks(sequence.blocks)
        sequence.slot, sequence.blocks, sequence.gone, sequence.computed, sequence.spots = None, [], 0, 0, ()

    def _refuse(self, limit: str) -> bool:
        self.tally.bound_by[limit] += 1
        return False

    def _unpin(self, plan: Plan) -> None:
        for _, match in plan.restores:
            self.store.release(match)
        self.store.give_blocks([source for source, _ in plan.copies])

    def _account(self, sequence: Sequence, match: Match) -> None:
        """Say why tokens are computed that were computed before (law 10)."""
        again: Counter[str] = Counter()
        if sequence.admitted:
            again["preempted"] = max(0, sequence.fed - match.position)
        else:
            reusable = min(match.shared, sequence.prompt_tokens - 1)
            held = min(match.held, reusable)
            reason = "prompt_logprobs" if sequence.request.params.prompt_logprobs is not None else "no_checkpoint"
            again[reason] = max(0, held - match.position)
            again["evicted"] = reusable - max(held, match.position)
            again["last_token"] = int(match.shared >= sequence.prompt_tokens)
            sequence.cached_tokens = match.position
            self.tally.prompt_tokens += sequence.prompt_tokens
            self.tally.queries += sequence.prompt_tokens
            self.tally.hits += match.position
            self.tally.lost_hits += max(0, held - match.position)
        sequence.admitted = True
        for name, count in again.items():
            if count:
                sequence.recomputed[name] += count
                self.tally.recomputed[name] += count
