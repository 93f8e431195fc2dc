"""A model whose memory is exact integers, so that control flow is tested in milliseconds and to the last bit.

Its recurrent state is a rolling hash of every token applied, its KV is the token ids themselves, and the next token depends on
both. Apply a token twice, skip one, read another sequence's state or a stale block, and the answer changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from milepost.config import EngineConfig
from milepost.engine.assembly import Parts
from milepost.engine.loop import Engine
from milepost.engine.runner import Runner
from milepost.engine.scheduler import Scheduler
from milepost.engine.settings import settle
from milepost.kernels.protocol import Run
from milepost.models.protocol import Memory
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec
from milepost.request import Delta, Request, SamplingParams
from milepost.state.pools import Pools
from milepost.state.retention import Costs
from milepost.state.store import StateStore

VOCAB = 97
_PRIME = 2**31 - 1


def fake_spec(*, head_dim: int = 2, state_size: int = 4, max_len: int = 200, window: int | None = None) -> ModelSpec:
    """One recurrent layer and one attention layer, in float64 so that integers are exact."""
    mamba = Mamba2Spec(
        heads=1, head_dim=head_dim, state_size=state_size, groups=1, conv_kernel=2, conv_bias=False, proj_bias=False,
        dt_min=0.0, dt_max=1.0, norm_eps=1e-5,
    )  # fmt: skip
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=1, bias=False, scale=1.0, window=window)
    return ModelSpec(
        family="fake", architecture="Fake", vocab_size=VOCAB, hidden_size=1,
        layers=(LayerSpec(0, (mamba,)), LayerSpec(1, (attention,))),
        norm_eps=1e-5, tie_embeddings=False, max_position_embeddings=max_len, dtype="float64",
        recurrent_dtype="float64", eos_token_ids=(), bos_token_id=None,
    )  # fmt: skip


def advance(state: int, token: int) -> int:
    """The fake recurrence."""
    return (state * 31 + token + 7) % _PRIME


def answer_of(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """The oracle: what an uncut, uncached, lonely run gives."""
    tokens = list(prompt)
    for _ in range(count):
        state = 0
        for token in tokens:
            state = advance(state, token)
        tokens.append(_next(state, tokens, window))
    return tokens[len(prompt) :]


def _next(state: int, kv: list[int], window: int | None) -> int:
    first = 0 if window is None else max(0, len(kv) - window)
    return (state + sum(token * (position + 1) for position, token in enumerate(kv) if position >= first)) % VOCAB


@dataclass
class FakeModel:
    """Implements `Model`."""

    spec: ModelSpec
    fail_next: bool = False
    runs: list[Run] = field(default_factory=list)

    def prepare(self, run: Run) -> Run:
        return run

    def forward(self, tokens: Tensor, run: Run, memory: Memory, rows: Tensor) -> Tensor:
        """The recurrence and the KV, by hand."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("asked to fail")
        self.runs.append(run)
        states, conv, kv = memory[0].states["recurrent"], memory[0].states["window"], memory[1].kv
        logits = torch.zeros(run.tokens, VOCAB)
        assert kv is not None and self.spec.layers[1].attention is not None
        window = self.spec.layers[1].attention.window
        for number in range(run.sequences):
            slot, blocks, start = run.slots[number], run.blocks[number], run.positions[number]
            state = 0 if run.fresh[number] else int(states[slot, 0, 0, 0])
            assert run.fresh[number] or int(conv[slot, 0, 0]) == start % 1024, "window and matrix differ in position"
            gone = (start - window + 1) // run.block_size if window and start >= window else 0
            assert all((block == -1) == (index < gone) for index, block in enumerate(blocks)), "blocks behind the window"
            at = {c.offset: c.target for c in run.captures if c.sequence == number}
            for offset in range(run.length(number)):
                row, position = run.starts[number] + offset, start + offset
                token = int(tokens[row])
                kv[blocks[position // run.block_size], 0, position % run.block_size] = token
                state = advance(state, token)
                first = max(0, position - window + 1) if window else 0
                reach = range(first, position + 1)
                seen = [int(kv[blocks[p // run.block_size], 0, p % run.block_size, 0, 0]) for p in reach]
                logits[row, _next(state, [0] * first + seen, None)] = 1.0
                for target in [at[offset + 1]] if offset + 1 in at else []:
                    states[target], conv[target] = state, (position + 1) % 1024
            states[slot], conv[slot] = state, (start + run.length(number)) % 1024
        return logits[rows]


@dataclass
class Harness:
    """An engine on the fake model, driven by hand, with what each client was told."""

    engine: Engine
    model: FakeModel
    got: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, Delta] = field(default_factory=dict)

    def submit(self, name: str, prompt: list[int], count: int, **more: object) -> None:
        """Queue a greedy request."""
        self.got[name] = []

        def sink(delta: Delta) -> None:
            self.got[name] += delta.tokens
            if delta.finish is not None:
                assert name not in self.last, "two last deltas"
                self.last[name] = delta

        params = SamplingParams(max_tokens=count, temperature=0.0)
        self.engine.submit(Request(name, tuple(prompt), params, **more), sink)  # type: ignore[arg-type]

    def finish(self, most_steps: int = 100_000) -> None:
        """Run until idle."""
        for _ in range(most_steps):
            if not self.engine.step():
                assert self.engine.idle, "requests wait, yet nothing runs"
                return
        raise AssertionError("the engine did not come to rest")

    def right(self, prompt: list[int], count: int) -> list[int]:
        """The oracle's answer."""
        return answer_of(prompt, count, self.engine.store.layout.window)

    def run(self, name: str, prompt: list[int], count: int, **more: object) -> Delta:
        """One request from start to end, checked against the oracle."""
        self.submit(name, prompt, count, **more)
        self.finish()
        assert self.got[name] == self.right(prompt, count)
        return self.last[name]


def harness(
    *, pages: int | None = None, spec: ModelSpec | None = None, **settings: object
) -> Harness:
    """An engine on the fake model. `pages` bounds the arena."""
    spec = spec or fake_spec()
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "poison_freed_memory": True, **settings}
    config = EngineConfig(kv_cache_memory_bytes=2**20, **settings)  # type: ignore[arg-type]
    resolved = settle(config, spec)
    if pages is not None:
        config = EngineConfig(kv_cache_memory_bytes=pages * resolved.geometry.page_bytes, **settings)  # type: ignore[arg-type]
        resolved = settle(config, spec)
    pools = Pools(resolved.layout, resolved.geometry, len(spec.layers), poison=config.poison_freed_memory)
    store = StateStore(
        resolved.layout, resolved.geometry, pools, model_identity="fake", costs=Costs(1.0, 0.01),
        caching=config.enable_prefix_caching,
    )  # fmt: skip
    scheduler = Scheduler(
        store, max_running=config.max_num_seqs, token_budget=config.max_num_batched_tokens,
        interval=config.prefix_cache_retention_interval,
    )  # fmt: skip
    model = FakeModel(spec)
    parts = Parts(spec, resolved, store, scheduler, Runner(model, pools, store.arena), spec.eos_token_ids)  # type: ignore[arg-type]
    return Harness(Engine(config, parts=parts), model)
