"""The laws over every family: chunked, batched, hit, branched, preempted and evicted, with states compared throughout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from milepost.kernels.select import names
from milepost.models.registry import families
from milepost.request import Boundary
from milepost.state.layout import StateDTypes, layout_of
from tests.checkpoints import make_checkpoint
from tests.families import TINY_CONFIGS
from tests.laws.oracle import Bench, Oracle

_rng = random.Random(5)
STEM = tuple(_rng.randrange(3, 97) for _ in range(90))


def test_every_family_and_every_kind_of_mixer_is_here() -> None:
    assert {family.name for family in families()} == {name.partition("-")[0] for name in TINY_CONFIGS}
    known = {name: family for family in families() for name in family.architectures}
    specs = [known[config["architectures"][0]].load().parse(config) for config in TINY_CONFIGS.values()]
    mixers = [mixer for spec in specs for layer in spec.layers for mixer in layer.mixers]
    assert {mixer.kind for mixer in mixers} == {
        "mamba1", "mamba2", "gated_delta", "kda", "short_conv", "rglru", "attention", "latent_attention", "mlp",
    }  # fmt: skip
    assert any(layout_of(spec, StateDTypes("float64", "float64", "float64"), 16).window for spec in specs)


@pytest.fixture(scope="module", params=TINY_CONFIGS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path: Path = tmp_path_factory.mktemp(request.param) / "tiny"
    return Oracle(make_checkpoint(path, TINY_CONFIGS[request.param]))


@pytest.mark.parametrize("backend", [name for name in names() if name != "auto"])
def test_split_and_restored_in_every_way_the_states_are_the_same(oracle: Oracle, backend: str) -> None:
    settings: dict[str, Any] = {"mamba_backend": backend, "attention_backend": backend}
    bench = Bench(oracle.path, oracle, max_num_batched_tokens=11, prefix_cache_retention_interval=13, **settings)
    bench.run("first", STEM[:61], 3, boundaries=(Boundary(20, "message_end"),))
    assert bench.run("again", STEM[:61], 3).usage.cached_tokens == 60
    bench.run("branch", STEM[:33] + (1, 1, 1), 2)
    assert bench.run("branch taken", STEM[:33] + (2, 1, 2), 2).usage.cached_tokens == 33
    for number in range(4):
        bench.submit(f"beside{number}", STEM[number : 30 + 5 * number], 6)
    for step in range(24):
        if step % 3 == 2 and bench.engine.scheduler.running:
            bench.engine.scheduler.preempt(bench.engine.scheduler.running[step % len(bench.engine.scheduler.running)])
        bench.engine.step()
    bench.finish()
    bench.check(again=True)
    assert bench.engine.stats().preemptions > 0


def test_hits_of_many_lengths(oracle: Oracle) -> None:
    bench = Bench(oracle.path, oracle)
    oracle.after(STEM[:66])
    for length in (*range(1, 8), 15, 16, 17, 31, 32, 33, 64, 65):
        assert bench.run(f"cold{length}", STEM[:length], 1, salt=f"{length}").usage.cached_tokens == 0
        assert bench.run(f"warm{length}", STEM[:length], 1, salt=f"{length}").usage.cached_tokens == length - 1


def test_an_arena_of_hardly_more_than_one_sequence(oracle: Oracle) -> None:
    probe = Bench(oracle.path, oracle, max_model_len=96).engine.parts.settings
    budget = int(1.4 * probe.geometry.pages_for(probe.layout, 96, 24) * probe.geometry.page_bytes)
    bench = Bench(oracle.path, oracle, max_model_len=96, kv_cache_memory_bytes=budget, max_num_batched_tokens=24)
    for number in range(6):
        bench.submit(f"r{number}", STEM[number * 3 : 40 + number * 7], 5)
    bench.finish()
    assert len(bench.last) == 6
