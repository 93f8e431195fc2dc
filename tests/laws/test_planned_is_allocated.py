"""Law 9: what is planned is what is allocated. Sizes against the pools' tensors and against admission.

`test_golden_sizes.py` compares them with figures computed elsewhere.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from milepost.cli.doctor import doctor
from milepost.config import EngineConfig
from milepost.engine.settings import settle
from milepost.errors import ConfigError
from milepost.models.registry import load_spec
from milepost.plan.sizes import fits, sizes_of
from milepost.state.geometry import geometry_of
from milepost.state.layout import StateDTypes, layout_of
from milepost.state.pools import Pools
from tests.checkpoints import make_nemotron_h
from tests.fakes import fake_spec, harness
from tests.families import TINY_CONFIGS

DTYPES = ("float32", "bfloat16", "float16", "float64")


def test_nemotron_h_8b_without_the_golden_file(tmp_path: Path) -> None:
    """24 layers of [128, 64, 128] fp32 and [10240, 3] bf16; 4 of 2 x 8 x 128 bf16 a token."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["NemotronHForCausalLM"],
                "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                "torch_dtype": "bfloat16",
            }
        )
    )
    found = doctor(EngineConfig(model=str(tmp_path / "config.json"))).to_json()
    assert found["state_bytes_per_sequence"] == 24 * (128 * 64 * 128 * 4 + 10240 * 3 * 2)
    assert found["kv_bytes_per_token"] == 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_bytes_equal_the_sum_of_the_pools_tensors_for_every_dtype(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS[name]))
    spec = load_spec(tmp_path)
    for kv, window, recurrent in product(DTYPES, DTYPES, DTYPES):
        config = EngineConfig(kv_cache_dtype=kv, mamba_cache_dtype=window, mamba_ssm_cache_dtype=recurrent)  # type: ignore[arg-type]
        settings = settle(config, spec)
        sizes = sizes_of(spec, settings)
        pools = Pools(settings.layout, geometry_of(settings.layout, 2**18), len(spec.layers))
        one_state = sum(pool[0].nbytes for layer in pools.memory for pool in layer.states.values())
        one_block = sum(layer.kv[0].nbytes for layer in pools.memory if layer.kv is not None)
        assert one_state == sizes.state_bytes_per_sequence
        assert one_block == sizes.kv_bytes_per_token * config.block_size
        assert pools.allocated_bytes == pools.geometry.pages * pools.geometry.page_bytes
        assert sizes.window_bytes_per_sequence + sizes.recurrent_bytes_per_sequence == one_state


@pytest.mark.parametrize("name", ["lfm2-like", "nemotron-like", "falcon-like"])
def test_rounding_to_pages_wastes_at_most_one_percent(name: str) -> None:
    """States from 40 KB to 300 MB beside 16-token blocks."""
    shape = {"lfm2-like": (8, 40), "nemotron-like": (512, 400), "falcon-like": (1024, 30_000)}[name]
    spec = fake_spec(head_dim=shape[0], state_size=shape[1])
    layout = layout_of(spec, StateDTypes("bfloat16", "bfloat16", "float32"), 16)
    geometry = geometry_of(layout, 2**32)
    for bytes_, pages in ((layout.state_bytes, geometry.state_pages), (layout.block_bytes, geometry.block_pages)):
        assert bytes_ <= pages * geometry.page_bytes <= bytes_ * 1.0101 + 8


def test_as_many_sequences_run_as_doctor_says() -> None:
    """35 (public kind): concurrency is low and no one can see which limit bound it."""
    h = harness(pages=600, max_num_seqs=32, max_num_batched_tokens=4096)
    longest = max(fit.context for fit in fits(h.engine.parts.settings, 32, 4096))
    said = next(fit for fit in fits(h.engine.parts.settings, 32, 4096) if fit.context == longest)
    assert said.bound_by == "kv_cache_memory_bytes"
    for number in range(said.sequences + 3):
        h.submit(f"r{number}", [number] * (longest - 2), 2)
    h.engine.step()
    assert len(h.engine.scheduler.running) == said.sequences
    assert h.engine.stats().bound_by == {"kv_cache_memory_bytes": 1}
    h.finish()
    assert h.got["r1"] == h.right([1] * (longest - 2), 2)


def test_as_many_run_as_doctor_says_where_attention_has_a_window() -> None:
    h = harness(pages=300, max_num_seqs=64, max_num_batched_tokens=64, spec=fake_spec(window=30), enable_prefix_caching=False)
    geometry, layout = h.engine.parts.settings.geometry, h.engine.store.layout
    said = fits(h.engine.parts.settings, 64, 64)[-1]
    whole = geometry.pages // (geometry.state_pages + layout.blocks_for(200) * geometry.block_pages)
    assert said.bound_by == "kv_cache_memory_bytes" and said.sequences > 2 * whole
    for number in range(said.sequences + 3):
        h.submit(f"r{number}", [number] * 60, 100)
    most = 0
    while "r0" not in h.last:
        h.engine.step()
        most = max(most, len(h.engine.scheduler.running))
    assert most == said.sequences and h.engine.stats().preemptions == 0
    h.finish()
    assert h.got["r1"] == h.right([1] * 60, 100)


def test_a_budget_too_small_for_one_sequence_is_refused_before_weights_with_the_bytes_needed(tmp_path: Path) -> None:
    """33 (public kind): limits are found only after the weights have loaded."""
    path = make_nemotron_h(tmp_path / "m")
    (path / "model.safetensors").unlink()  # whoever reads a weight fails otherwise
    from milepost.engine.loop import Engine

    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes=100000 .* needs \d+ bytes") as refused:
        Engine(EngineConfig(model=str(path), kv_cache_memory_bytes=100_000, max_model_len=4096))
    assert refused.value.field == "kv_cache_memory_bytes"
    needed = int(str(refused.value).split("it needs ")[1].split()[0])
    settle(EngineConfig(kv_cache_memory_bytes=needed, max_model_len=4096), load_spec(path))
    with pytest.raises(ConfigError):
        settle(EngineConfig(kv_cache_memory_bytes=needed - 1, max_model_len=4096), load_spec(path))
