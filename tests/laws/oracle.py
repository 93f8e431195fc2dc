"""The oracle of the laws: the same request alone, uncut and uncached, through the reference kernels.

It shares no batch, no cache, no chunk and no fast kernel with what it judges; only weights and layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from milepost.config import EngineConfig
from milepost.engine.loop import Engine
from milepost.engine.settings import settle
from milepost.kernels.protocol import Capture, Run
from milepost.kernels.reference import ReferenceBackend
from milepost.models.loading import load_model
from milepost.models.protocol import Memory, Model
from milepost.models.registry import load_spec
from milepost.request import Delta, Request, SamplingParams
from milepost.state.pools import TORCH_DTYPES, Pools
from milepost.state.prefix import Node

States = dict[tuple[int, str], Tensor]
"""(layer, component) -> that component of one sequence."""


def states_at(memory: Memory, page: int) -> States:
    """Copies of every component of the state at a kernel index."""
    return {
        (layer, name): pool[page].clone() for layer, each in enumerate(memory) for name, pool in each.states.items()
    }


def worst_error(found: States, wanted: States) -> float:
    """Largest difference relative to the component's largest number, over all components."""
    assert found.keys() == wanted.keys()
    return max(
        (float((found[k] - wanted[k]).abs().max() / wanted[k].abs().max().clamp(min=1e-30)) for k in wanted), default=0.0
    )


@dataclass
class Oracle:
    """Answers and states of lonely, uncut runs; remembers what it has computed."""

    path: Path
    dtype: str = "float64"

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[States, Tensor]] = {}

    @cached_property
    def _parts(self) -> tuple[Model, Pools]:
        spec = load_spec(self.path)
        settings = settle(EngineConfig(model=str(self.path), dtype=self.dtype, kv_cache_memory_bytes=2**26), spec)  # type: ignore[arg-type]
        backend = ReferenceBackend()
        model = load_model(
            self.path, spec, dtype=TORCH_DTYPES[settings.dtype], recurrent=backend, attention=backend
        )
        return model, Pools(settings.layout, settings.geometry, len(spec.layers), poison=True)

    def after(self, tokens: tuple[int, ...]) -> tuple[States, Tensor]:
        """States after the last token, and logits [vocab_size] for the next."""
        if tokens not in self._known:
            self._trace(tokens)
        return self._known[tokens]

    def agrees(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
        """True if `answer` is what greedy decoding gives."""
        self.after(prompt + answer[:-1])
        return all(
            int(self.after(prompt + answer[:count])[1].argmax()) == token for count, token in enumerate(answer)
        )

    def _trace(self, tokens: tuple[int, ...]) -> None:
        """One uncut run; the reference kernels go through it token by token and drop every state on the way."""
        model, pools = self._parts
        geometry, count = pools.geometry, len(tokens)
        first = (count + 1) * geometry.state_pages
        blocks = tuple(first + index * geometry.block_pages for index in range(pools.layout.blocks_for(count)))
        stride = geometry.state_pages or 1  # without recurrent layers, indices only tell states apart
        captures = tuple(Capture(0, offset, offset * stride) for offset in range(1, count + 1))
        run = Run((0, count), (0,), (0,), (True,), (blocks,), pools.layout.block_size, captures)
        with torch.inference_mode():
            logits = model.forward(torch.tensor(tokens), model.prepare(run), pools.memory, torch.arange(count))
        for offset in range(1, count + 1):
            self._known[tokens[:offset]] = states_at(pools.memory, offset * stride), logits[offset - 1].clone()


class Bench:
    """An engine driven by hand, whose every checkpoint and answer can be held against the oracle."""

    def __init__(self, path: Path, oracle: Oracle, **settings: object) -> None:
        merged = {
            "dtype": oracle.dtype, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**23,
            "poison_freed_memory": True, **settings,
        }  # fmt: skip
        self.engine = Engine(EngineConfig(model=str(path), **merged))  # type: ignore[arg-type]
        self.oracle = oracle
        self.got: dict[str, list[int]] = {}
        self.last: dict[str, Delta] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self._right: set[tuple[int, int]] = set()

    def submit(self, name: str, prompt: tuple[int, ...], count: int, **more: object) -> None:
        """Queue a greedy request."""
        self.got[name], self.prompts[name] = [], prompt

        def sink(delta: Delta) -> None:
            self.got[name] += delta.tokens
            if delta.finish:
                self.last[name] = delta

        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.engine.submit(Request(name, prompt, params, **more), sink)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Run until idle, then check answers, checkpoints and the ledger."""
        while self.engine.step():
            pass
        self.check()

    def run(self, name: str, prompt: tuple[int, ...], count: int = 3, **more: object) -> Delta:
        """One request, checked."""
        self.submit(name, prompt, count, **more)
        self.finish()
        return self.last[name]

    def check(self, tolerance: float = 1e-9, *, again: bool = False) -> None:
        """What has finished or was stored since the last check equals the oracle; nothing is left over.

        `again` looks at every checkpoint that stands, also those that were right before.
        """
        assert self.engine.idle
        assert self.engine.audit() == []
        for name in list(self.prompts):
            got, prompt = self.got[name], self.prompts.pop(name)
            assert self.oracle.agrees(prompt, tuple(got)), f"{name}: another answer than alone"
        memory = self.engine.parts.runner.pools.memory
        for tokens, node in self.checkpoints():
            assert node.checkpoint is not None
            if node.checkpoint.handle in self._right and not again:
                continue
            page = self.engine.store.arena.state_page(node.checkpoint.handle)
            error = worst_error(states_at(memory, page), self.oracle.after(tokens)[0])
            assert error < tolerance, f"checkpoint at {node.end} ({node.checkpoint.reason}) is off by {error}"
            self._right.add(node.checkpoint.handle)

    def checkpoints(self) -> list[tuple[tuple[int, ...], Node]]:
        """Every checkpoint with the tokens that it claims to be a state of."""
        found = []
        for _, node in self.engine.store.checkpoints():
            tokens: list[int] = []
            step: Node | None = node
            while step is not None:
                tokens = [int(t) for t in step.tokens] + tokens
                step = step.parent
            found.append((tuple(tokens), node))
        return found
