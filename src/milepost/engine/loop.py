"""The engine: one thread that plans a step, runs it, picks tokens and tells each client.

In: requests, from any thread. Out: deltas, through each request's sink, from the engine's thread.
The law kept here: one thread owns state and policy; others only leave messages. A step that fails ends its requests with an
error and gives all they held back; the engine goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from milepost.clock import Clock, RealClock
from milepost.config import EngineConfig
from milepost.engine.assembly import Parts, assemble
from milepost.engine.client import Client
from milepost.engine.runner import Ran
from milepost.engine.scheduler import Plan
from milepost.engine.sequence import Sequence
from milepost.engine.stats import Pools as PoolStats
from milepost.engine.stats import Stats, Timing
from milepost.errors import Overloaded, RequestError
from milepost.request import Delta, FinishReason, Request
from milepost.state.audit import Finding, check

T = TypeVar("T")
Sink = Callable[[Delta], None]
log = logging.getLogger("milepost.engine")
_STATS_SECONDS = 0.5
"""How long a scrape waits for the step that is under way; a long prompt on a small machine takes seconds."""
_FAILURES_TO_DIE = 3
"""Steps in a row that may fail before the engine calls itself unhealthy."""


@dataclass(frozen=True, slots=True)
class _Call:
    action: Callable[[], Any]
    answer: Future[Any]


class Engine:
    """Serves one model. `submit`, `abort`, `stats`, `audit` and `reset_prefix_cache` may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
        clock: Clock | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Load the model. Raises ConfigError and UnsupportedModel before a weight is read, where that can be known."""
        self.config = config
        self.parts = parts or assemble(config, progress=progress)
        self.spec = self.parts.spec
        self.max_model_len = self.parts.max_model_len
        self.vocab_size = self.spec.vocab_size
        self.scheduler = self.parts.scheduler
        self.store = self.parts.store
        self.clock = clock or RealClock()
        self._clients: dict[str, Client] = {}
        self._wake = threading.Condition()
        self._inbox: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._order = 0
        self._failures = 0
        self._steps = 0
        self._generated = 0
        self._finished: Counter[str] = Counter()
        self._latest = self._stats()

    # --- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread. Without it, `step` drives the engine by hand."""
        if self._thread is None:
            self._stopping = self._closed = False
            self._thread = threading.Thread(target=self._serve, name="milepost-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Abort what runs, answer every client, end the thread."""
        with self._wake:
            thread = self._thread
            self._stopping = True
            self._wake.notify()
        if thread is not None:
            thread.join()

    @property
    def healthy(self) -> bool:
        """False once the engine's thread ended or its steps fail one after another."""
        return self._thread is not None and self._thread.is_alive() and self._failures < _FAILURES_TO_DIE

    def submit(self, request: Request, sink: Sink, on_finish: Callable[[Timing], None] | None = None) -> None:
        """Queue a request. Raises RequestError (empty, too long, bad ids) and Overloaded; else the sink gets its deltas."""
        if self._closed:
            raise Overloaded("the engine has stopped")
        self._refuse(request)
        client = Client(request, sink, on_finish, arrival=self.clock.now())
        self._call(lambda: self._add(client), wait=False)

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets a last delta. Unknown ids (ended already) are ignored."""
        self._call(lambda: self._abort(request_id), wait=False)

    def audit(self) -> list[Finding]:
        """Does every byte add up? Empty if it does."""
        return self._call(self._audit)

    def reset_prefix_cache(self) -> None:
        """Forget every checkpoint that nobody uses at this moment."""
        self._call(self.store.clear)

    def stats(self) -> Stats:
        """Totals since the start, and what holds now; what held after the last step if this one takes long."""
        try:
            return self._call(self._stats, patience=_STATS_SECONDS)
        except TimeoutError:
            return self._latest

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan, run, pick, tell. False: there was nothing to do."""
        plan = self.scheduler.schedule()
        if not plan.shares:
            return False
        for sequence, _ in plan.restores:
            client = self._clients[sequence.request.id]
            client.admitted = self.clock.now() if client.admitted is None else client.admitted
        try:
            ran = self.parts.runner.run(plan)
        except Exception as error:
            self._fail(plan, error)
            return True
        self._failures = 0
        self._steps += 1
        self.scheduler.commit(plan)
        self._tell(ran)
        return True

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # a bug of ours: no client may be left waiting for an engine that is gone
            log.exception("the engine's thread ends; its requests end with an error")
            self._failures = _FAILURES_TO_DIE
            self._close("error", "the engine stopped on an internal error")

    def _turn(self) -> bool:
        """Wait for work, do a step. False: the engine is to stop, and everybody was told."""
        with self._wake:
            while not self._inbox and not self._stopping and self.idle:
                self._wake.wait()
            stopping = self._stopping
        self._drain()
        if stopping:
            self._close("abort", None)
            return False
        if not self.step() and not self.idle:
            # Only reachable if a waiting request fits in an empty arena by the check at start, yet was not admitted.
            self._fail_waiting()
        self._latest = self._stats()
        return True

    def _close(self, reason: FinishReason, error: str | None) -> None:
        """Answer every client and every caller; whoever asks later does so in their own thread."""
        with self._wake:
            self._thread = None
            self._closed = True
        self._drain()
        for client in list(self._clients.values()):
            if reason == "abort":
                self._finish(client, reason, keep=False)
            client.tell(reason, self.clock.now(), error=error)
        self._clients.clear()

    def _drain(self) -> None:
        while True:
            with self._wake:
                if not self._inbox:
                    return
                call = self._inbox.popleft()
            try:
                call.answer.set_result(call.action())
            except Exception as error:
                call.answer.set_exception(error)

    def _call(self, action: Callable[[], T], *, wait: bool = True, patience: float | None = None) -> T:
        """Run something between two steps; at once if the engine is driven by hand, or asked from its own thread.

        Raises TimeoutError after `patience` seconds; it is run all the same.
        """
        call = _Call(action, Future())
        with self._wake:
            thread = self._thread
            served = thread is not None and thread is not threading.current_thread() and thread.is_alive()
            if served:
                self._inbox.append(call)
                self._wake.notify()
        if not served:
            return action()
        result: T = call.answer.result(patience) if wait else None  # type: ignore[assignment]
        return result

    def _refuse(self, request: Request) -> None:
        prompt, limit = request.prompt, self.max_model_len
        if not prompt:
            raise RequestError("prompt must have at least one token", param="prompt")
        if len(prompt) >= limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {len(prompt)} and leaves no room for "
                "an answer",
                param="prompt",
                code="context_length_exceeded",
            )
        wanted = request.params.max_tokens
        if wanted is not None and len(prompt) + wanted > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; {len(prompt)} of prompt and max_tokens={wanted} "
                f"make {len(prompt) + wanted}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._refuse_ids("prompt", prompt)
        self._refuse_ids("allowed_token_ids", request.params.allowed_token_ids or ())
        self._refuse_ids("logit_bias", tuple(request.params.logit_bias))
        self._refuse_ids("stop_token_ids", request.params.stop_token_ids)
        queued = self.config.max_num_queued_reqs
        if queued is not None and len(self.scheduler.waiting) + len(self._inbox) >= queued:
            raise Overloaded(f"{queued} requests wait already (max_num_queued_reqs)")

    def _refuse_ids(self, name: str, ids: tuple[int, ...]) -> None:
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"{name} has token id {bad}; this model's ids are 0 to {self.vocab_size - 1}", param=name)

    def _add(self, client: Client) -> None:
        request = client.request
        if request.id in self._clients:
            client.fail(f"request id {request.id!r} is in use")
            return
        room = self.max_model_len - len(request.prompt)
        most = room if request.params.max_tokens is None else request.params.max_tokens
        rank = request.priority if self.config.scheduling_policy == "priority" else 0
        sequence = Sequence(request, self.store.chain(request.salt), self._order, len(request.prompt) + most, rank)
        client.begin(sequence, seed=self.config.seed + self._order, eos=self.parts.eos, vocab_size=self.vocab_size)
        self._order += 1
        self._clients[request.id] = client
        self.scheduler.add(sequence)

    def _tell(self, ran: Ran) -> None:
        for rows in ran.batch.owners:
            client = self._clients[rows.share.sequence.request.id]
            client.read_prompt(ran.logits[rows.first : rows.first + rows.prompt], rows.share.start)
            if not rows.picks:
                continue
            self._generated += 1
            reason = client.take(ran.logits[rows.first + rows.prompt], self.clock.now())
            if reason is not None:
                self._finish(client, reason, keep=True)
            client.tell(reason, self.clock.now())

    def _finish(self, client: Client, reason: FinishReason, *, keep: bool) -> None:
        self.scheduler.finish(client.sequence, keep=keep)
        del self._clients[client.request.id]
        self._finished[reason] += 1

    def _abort(self, request_id: str) -> None:
        client = self._clients.get(request_id)
        if client is not None:
            self._finish(client, "abort", keep=False)
            client.tell("abort", self.clock.now())

    def _fail(self, plan: Plan, error: Exception) -> None:
        log.exception("a step failed; its %d requests end with an error", len(plan.shares))
        self._failures += 1
        self.scheduler.cancel(plan)
        for share in plan.shares:
            client = self._clients[share.sequence.request.id]
            self._finish(client, "error", keep=False)
            client.tell("error", self.clock.now(), error=f"{type(error).__name__}: {error}")

    def _fail_waiting(self) -> None:
        client = self._clients[self.scheduler.waiting[0].request.id]
        self._finish(client, "error", keep=False)
        client.tell("error", self.clock.now(), error="no room for this request in an otherwise empty arena")

    def _audit(self) -> list[Finding]:
        held = [sequence for sequence in self.scheduler.running if sequence.slot is not None]
        slots = [sequence.slot for sequence in held if sequence.slot is not None]
        return check(self.store, slots, [block for sequence in held for block in sequence.blocks if block is not None])

    def _stats(self) -> Stats:
        tally, counts = self.scheduler.tally, self.store.counts
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pools=self._pools(),
            steps=self._steps,
            prompt_tokens=tally.prompt_tokens,
            computed_prompt_tokens=tally.computed_prompt_tokens,
            generation_tokens=self._generated,
            prefix_queries=tally.queries,
            prefix_hits=tally.hits,
            lost_hits=tally.lost_hits,
            preemptions=tally.preemptions,
            captures=dict(counts.captures),
            skipped_captures=dict(counts.skipped),
            evictions=counts.evictions,
            recomputed=dict(tally.recomputed),
            verification_failures=dict(counts.failures),
            bound_by=dict(tally.bound_by),
            finished=dict(self._finished),
        )

    def _pools(self) -> PoolStats:
        arena, layout = self.store.arena, self.store.layout
        size = arena.geometry.page_bytes
        standing = len(self.store.checkpoints())
        return PoolStats(
            budget_bytes=arena.geometry.pages * size,
            free_bytes=arena.free_pages * size,
            slots_used=arena.states_used - standing,
            slots_total=self.config.max_num_seqs,
            slot_bytes=arena.geometry.state_pages * size,
            checkpoints=standing,
            checkpoint_bytes=standing * arena.geometry.state_pages * size,
            blocks_used=arena.held_blocks,
            blocks_cached=arena.blocks_used - arena.held_blocks,
            block_bytes=arena.geometry.block_pages * size,
            block_size=layout.block_size,
        )
