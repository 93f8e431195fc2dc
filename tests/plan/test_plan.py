"""`milepost plan` against figures computed elsewhere, against the pools, and as its users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from milepost.cli import main
from milepost.config import EngineConfig
from milepost.errors import ConfigError, UnsupportedModel
from milepost.models.registry import parse_config
from milepost.models.spec import AttentionSpec
from milepost.plan import builtin
from milepost.plan.devices import device, devices, links, tiers
from milepost.plan.memory import Growth, Memory, smaller_from, tokens_worth
from milepost.plan.plan import Plan, Question, make_plan
from milepost.plan.roofline import CHUNK, balanced_batch, recompute_seconds, worth_from
from milepost.plan.weights import weights_of
from milepost.plan.work import decode, prefill, update_intensity
from tests.checkpoints import make_checkpoint
from tests.families import TINY_CONFIGS

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
ENTRIES: dict[str, Any] = json.loads((GOLDEN / "sizes.json").read_text())["models"] if GOLDEN.exists() else {}
TYPES: dict[str, Any] = {"kv_cache_dtype": "bfloat16", "mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}


def plan(model: str, question: Question | None = None, **settings: Any) -> Plan:
    return make_plan(EngineConfig(model=model, **{**TYPES, **settings}), question or Question(versus="llama-3-8b"))


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden sizes are not part of a clone")
@pytest.mark.parametrize("name", ENTRIES)
def test_every_built_in_config_equals_the_golden_sizes(name: str) -> None:
    """37 (public kind): every layer counted as attention, or a state that no tool sees."""
    found, expect = plan(name).to_json(), ENTRIES[name]["expect"]
    assert found["attention_layers"] == expect["attention_layers"]
    spec = plan(name).spec
    for component, key in (("recurrent", "ssm_elements_per_layer"), ("window", "conv_elements_per_layer")):
        sizes = {c.elements for layer in spec.recurrent_layers for c in layer.components if c.name == component}
        assert sizes == ({expect[key]} if expect[key] else set())
    assert found["recurrent_layers"] == expect["recurrent_layers"]
    assert found["state_bytes_per_layer"] == expect["state_bytes_per_layer_fp32_bf16"]
    assert found["state_bytes_per_sequence"] == expect["state_bytes_per_sequence_ssm_fp32_conv_bf16"]
    assert found["kv_bytes_per_token"] == expect.get("kv_bytes_per_token_bf16", 0)
    assert found["kv_bytes_per_token_per_layer"] == expect.get("kv_bytes_per_token_per_layer_bf16", 0)
    narrow = plan(name, mamba_ssm_cache_dtype="bfloat16")
    assert narrow.sizes.state_bytes_per_sequence == expect["state_bytes_per_sequence_all_bf16"]
    for one, dtype in ((plan(name), "fp32"), (narrow, "bf16")):
        assert one.vllm.align.block_tokens == expect.get(f"vllm_align_block_tokens_{dtype}", one.vllm.align.block_tokens)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden sizes are not part of a clone")
def test_the_public_chapter_to_the_digits_it_gives() -> None:
    seed = json.loads((GOLDEN / "seed_figures.json").read_text())
    want, cross, llama = seed["nemotron_h_8b"], seed["crossovers"], seed["llama_3_8b"]
    long = Question(versus="llama-3-8b", contexts=(131072,))
    wide, narrow = plan("nemotron-h-8b", long), plan("nemotron-h-8b", long, mamba_ssm_cache_dtype="bfloat16")
    assert wide.layers[0].window_bytes == want["conv_state_bytes_per_layer_bf16"]
    assert wide.layers[0].recurrent_bytes == want["ssm_state_bytes_per_layer_fp32"]
    assert wide.sizes.state_bytes_per_sequence == want["state_bytes_per_sequence"]
    assert narrow.sizes.state_bytes_per_sequence == want["state_bytes_per_sequence_bf16_ssm"]
    share = 100 * wide.sizes.window_bytes_per_sequence / wide.sizes.state_bytes_per_sequence
    assert round(share, 2) == want["conv_share_percent"]
    found = wide.to_json()["crossovers"]
    assert isinstance(found, dict)
    assert found["own_kv_tokens"] == want["state_equals_own_kv_at_tokens"]
    assert found["baseline_state_tokens"] == cross["state_fp32_vs_llama_kv_tokens"]
    assert found["baseline_whole_tokens"] == cross["whole_hybrid_vs_llama_kv_tokens"]
    assert round(narrow.crossovers.baseline.state_equals_kv_tokens or 0) == cross["state_bf16_vs_llama_kv_tokens"]  # type: ignore[union-attr]
    ratio = wide.crossovers.baseline.ratios[0]  # type: ignore[union-attr]
    assert round(ratio.ratio, 2) == cross["llama_over_hybrid_at_131072_tokens"]
    assert ratio.other_bytes / 2**30 == llama["kv_at_131072_tokens_gib"]
    assert round(ratio.hybrid_bytes / 2**20, 2) == want["total_at_131072_tokens_mib"]
    assert wide.checkpoint_bytes["int8"] == want["int8_checkpoint_bytes_fp32_scales"]
    assert wide.vllm.align.block_tokens == want["vllm_align_block_tokens"]
    recurrent = wide.sizes.recurrent_bytes_per_sequence
    assert update_intensity(wide.spec, recurrent, simple=True) == want["recurrent_update_flop_per_byte_fp32"]


def test_the_figures_that_a_clone_can_check() -> None:
    """Two public notes give Nemotron-H-8B 48 Mamba layers, one Jamba an attention layer in four: the configs say otherwise."""
    nemotron, jamba = plan("nemotron-h-8b"), plan("jamba-v0.1")
    assert (nemotron.sizes.recurrent_layers, nemotron.sizes.attention_layers) == (24, 4)
    assert (jamba.sizes.attention_layers, len(jamba.spec.layers)) == (4, 32)
    found = nemotron.to_json()
    assert found["crossovers"]["own_kv_tokens"] == 6234  # type: ignore[index]
    assert found["checkpoint_bytes"] == {"raw": 102_137_856, "bf16": 51_806_208, "int8": 28_213_248}
    assert nemotron.weights is not None and abs(nemotron.weights.parameters / 8.1e9 - 1) < 0.01


def test_every_built_in_name_can_be_planned() -> None:
    for name in builtin.names():
        assert plan(name).to_json()["model"] == name
    with pytest.raises(ConfigError, match="close to it: nemotron-h-8b"):
        plan("nemotron-h-8")


def test_a_nested_text_config_is_planned_and_its_refusal_named(tmp_path: Path) -> None:
    text = json.loads(builtin.path_of("qwen3.5-4b").read_text())
    del text["architectures"]
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 3}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    found = plan(str(tmp_path / "config.json"))
    assert found.sizes.state_bytes_per_sequence == plan("qwen3.5-4b").sizes.state_bytes_per_sequence
    assert any("vision_config is not supported" in refusal for refusal in found.refusals)
    for change in ({"frobnicate": 1}, {"quantization_config": {"quant_method": "fp8"}}):
        (tmp_path / "config.json").write_text(json.dumps({**text, "architectures": ["Qwen3_5ForCausalLM"], **change}))
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            plan(str(tmp_path / "config.json"))


def test_a_rank_has_its_share() -> None:
    whole, half = plan("nemotron-h-8b"), plan("nemotron-h-8b", Question(ranks=2))
    assert half.sizes.state_bytes_per_sequence * 2 == whole.sizes.state_bytes_per_sequence
    assert half.sizes.kv_bytes_per_token * 2 == whole.sizes.kv_bytes_per_token
    sixteen = plan("nemotron-h-8b", Question(ranks=16))
    assert sixteen.sizes.kv_bytes_per_token * 8 == whole.sizes.kv_bytes_per_token, "8 KV heads: two ranks keep each"
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        plan("nemotron-h-8b", Question(ranks=3))


def test_memory_less_weights_is_the_budget_and_a_model_that_leaves_none_is_refused() -> None:
    found = plan("nemotron-h-8b", Question(memory_bytes=80 * 10**9))
    assert found.weights is not None
    assert found.capacity.budget_bytes == 80 * 10**9 - found.weights.total_bytes
    with pytest.raises(ConfigError, match="the weights alone take") as refused:
        plan("nemotron-h-8b", Question(memory_bytes=10**9))
    assert refused.value.field == "memory"


def test_weights_from_a_checkpoint_equal_the_product_of_shapes(tmp_path: Path) -> None:
    for name in ("jamba", "zamba2", "qwen3_next", "kimi_linear"):
        path = make_checkpoint(tmp_path / name, TINY_CONFIGS[name])
        spec = plan(str(path), dtype="float32").whole
        stored, shapes = weights_of(spec, "float32", path), weights_of(spec, "float32")
        assert stored is not None and shapes is not None
        assert stored.total_bytes == shapes.parameters * 4
        assert stored.touched(1) == pytest.approx(stored.active)
        assert stored.touched(10**6) == pytest.approx(stored.matrices + stored.expert * stored.experts)


def test_crossings_of_memory_with_windows_and_without() -> None:
    hybrid, dense = Memory(1000, (Growth(0, 2, None),)), Memory(0, (Growth(0, 10, None),))
    windowed = Memory(0, (Growth(0, 10, 50), Growth(1, 1, None)))
    assert (tokens_worth(1000, dense), smaller_from(hybrid, dense)) == (100.0, 125.0)
    assert tokens_worth(1000, windowed) == 500.0 and tokens_worth(10**9, Memory(0, (Growth(0, 10, 50),))) is None
    assert smaller_from(hybrid, windowed) is None and smaller_from(windowed, hybrid) == 0.0
    for one, other in ((hybrid, dense), (windowed, dense), (Memory(700, (Growth(0, 3, 40),)), windowed)):
        start = smaller_from(one, other)
        for tokens in range(0, 2000, 7):
            assert start is None or tokens <= start or one.at(tokens) < other.at(tokens)


def test_limits_bind_where_they_should() -> None:
    found = plan("nemotron-h-8b", Question(device=device("h100"), contexts=(8192,)))
    speed, weights = found.speed, found.weights
    assert speed is not None and weights is not None
    first = speed.bounds[0]
    assert first.bound_by == "weights" and first.seconds == pytest.approx(
        (weights.active * 2 + 2 * found.sizes.state_bytes_per_sequence + 8193 * 16384) / 3.35e12
    )
    assert next(bound for bound in speed.bounds if bound.phase == "prefill" and bound.tokens == 4096).bound_by == "operations"
    assert speed.state_equals_weights_batch == pytest.approx(weights.active * 2 / (2 * found.sizes.state_bytes_per_sequence))
    rates = [bound.tokens_per_s for bound in speed.bounds if bound.phase == "decode"]
    assert rates == sorted(rates)
    assert speed.update_intensity_simple == 0.25 and speed.update_intensity is not None and speed.update_intensity > 0.6


def test_work_grows_with_what_it_is_counted_in() -> None:
    found = plan("recurrentgemma-2b")
    assert found.weights is not None
    small, large = (decode(found.spec, found.weights, found.memory, 4, tokens) for tokens in (1000, 5000))
    beyond = decode(found.spec, found.weights, found.memory, 4, 50_000)
    assert small.bytes < large.bytes == beyond.bytes, "a window caps what is read"
    one, two = (prefill(found.spec, found.weights, found.memory, tokens, 512) for tokens in (700, 1400))
    assert one.flops < two.flops < 2.2 * one.flops


def test_the_break_even_is_where_the_times_cross() -> None:
    for latency, cost in ((5.0, 0.01), (0.5, 0.3), (0.0, 2.0), (3.0, 0.0)):
        def fetched(tokens: int, latency: float = latency) -> float:
            return latency + tokens * 0.001

        def again(tokens: int, cost: float = cost) -> float:
            return tokens * cost

        found = worth_from(fetched, again)
        if found is None:
            assert cost == 0.0
        else:
            assert fetched(found) <= again(found) and (found == 1 or fetched(found - 1) > again(found - 1))


def test_a_break_even_is_the_last_of_several_crossings() -> None:
    """Computing is level while weights bind and steps with each chunk: the figure holds for every longer prefix."""
    for name in ("lfm2-1.2b", "granite-4.0-h-tiny", "nemotron-3-nano-30b-a3b", "nemotron-h-8b"):
        found, place = plan(name), device("h100")
        assert found.weights is not None
        again = recompute_seconds(found.spec, found.memory, found.weights, place, found.whole.dtype)
        for way in tiers():
            def fetched(tokens: int, way: Any = way, found: Plan = found) -> float:
                seconds: float = way.seconds(found.checkpoint_bytes["int8"] + found.memory.kv_at(tokens))
                return seconds

            length = worth_from(fetched, again)
            assert length is not None and (length == 1 or fetched(length - 1) > again(length - 1)), (name, way.name)
            beyond = [*range(length, length + 9000, 7), *range(length, 1 << 20, 4099)]
            assert all(fetched(tokens) <= again(tokens) for tokens in beyond), (name, way.name)
    assert worth_from(lambda tokens: 1.0, lambda tokens: 0.5) is None and CHUNK == 2048


def test_states_balance_weights_at_the_batch_that_is_told() -> None:
    """With experts the weights that a batch touches grow with it."""
    for name in ("granite-4.0-h-tiny", "jamba-v0.1", "qwen3-next-80b-a3b", "nemotron-h-8b"):
        found = plan(name)
        batch = found.state_equals_weights_batch
        assert found.weights is not None and batch is not None and batch == balanced_batch(found.weights, found.memory)
        assert found.weights.touched(batch) * 2 == pytest.approx(batch * 2 * found.sizes.state_bytes_per_sequence, rel=1e-9)


def test_a_shared_block_is_passed_once_for_each_use_but_stored_once() -> None:
    found = plan("zamba2-2.7b").weights
    assert found is not None and found.parameters < found.active < 1.6 * found.parameters
    assert found.total_bytes == 2 * found.parameters


DENSE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "kv", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], **DENSE}, 32, [None] * 6),
        ({"architectures": ["Gemma2ForCausalLM"], **DENSE, "head_dim": 16, "sliding_window": 9}, 64, [9, None] * 3),
        ({"model_type": "gemma3_text", **DENSE, "head_dim": 16, "sliding_window": 9}, 64, [9] * 5 + [None]),
        ({"architectures": ["MistralForCausalLM"], **DENSE, "sliding_window": 9}, 32, [9] * 6),
        ({"architectures": ["MistralForCausalLM"], **DENSE, "sliding_window": None}, 32, [None] * 6),
        ({"architectures": ["Qwen2ForCausalLM"], **DENSE, "sliding_window": 9}, 32, [None] * 6),
        (
            {"model_type": "qwen2", **DENSE, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 4},
            32,
            [None] * 4 + [9] * 2,
        ),
    ],
)
def test_a_dense_baseline_has_its_own_kv_and_windows(config: dict[str, Any], kv: int, windows: list[int | None]) -> None:
    spec = parse_config(config, sized=True)
    attentions = [layer.attention for layer in spec.attention_layers]
    assert [attention.window for attention in attentions if isinstance(attention, AttentionSpec)] == windows
    assert {attention.kv_elements_per_token for attention in attentions if attention} == {kv}


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [("Llama", "num_attention_heads"), ("Gemma2", "head_dim"), ("Gemma3", "sliding_window"), ("Qwen3", "head_dim"),
     ("Mistral", "sliding_window"), ("Mistral", "num_key_value_heads"), ("Qwen2", "num_key_value_heads")],
)  # fmt: skip
def test_a_dense_baseline_that_leaves_kv_open_is_refused(architecture: str, left_out: str) -> None:
    config = {"architectures": [f"{architecture}ForCausalLM"], **DENSE, "head_dim": 8, "sliding_window": 9}
    del config[left_out]
    with pytest.raises(UnsupportedModel, match=f"{left_out} isn't in the config"):
        parse_config(config, sized=True)


def test_a_device_computes_in_the_dtype_that_it_is_fast_in(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text("[device.cpu]\nmemory_bytes = 64e9\nbytes_per_s = 2e10\nflops = { float32 = 1e11, bfloat16 = 3e8 }\n")
    found = plan("lfm2-1.2b", Question(device=device(str(file)), contexts=(4096,)))
    assert found.speed is not None and found.speed.dtype == "float32" and found.computed is not None
    assert found.computed.bytes_each == 4 and found.weights is not None and found.weights.bytes_each == 2


def test_lengths_beyond_the_models_limit_are_noted() -> None:
    found = plan("nemotron-h-8b", Question(contexts=(4096, 131072)))
    assert [point.context for point in found.capacity.frontier] == [4096]
    assert any("up to the model's limit of 8,192 tokens" in note for note in found.notes)


def test_devices_and_their_mistakes(tmp_path: Path) -> None:
    assert {each.name for each in devices()} == {"h100", "h200", "mi300x"} and links() and tiers()
    file = tmp_path / "mine.toml"
    good = '[device.mine]\nmemory_bytes = 1e9\nbytes_per_s = 1e9\nflops = { float32 = 1e12 }\n'
    file.write_text(good)
    assert device(str(file)).peak("float32") == 1e12
    with pytest.raises(ConfigError, match="lists no flops for bfloat16"):
        device(str(file)).peak("bfloat16")
    for wrong, message in (
        ("[device.a]\n[device.b]\n", "must hold one"),
        (good + "colour = 1\n", "unknown keys colour"),
        (good.replace("1e9\nbytes", "-1\nbytes"), "memory_bytes must be a number above 0"),
        (good.replace("{ float32 = 1e12 }", "3"), "flops must map"),
        ("[", "is not TOML"),
        (good.replace("1e9\nbytes", "inf\nbytes"), "memory_bytes must be a number above 0"),
        (good.replace("1e12", "true"), "flops must map"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            device(str(file))
    for name, message in (("h9", "known: h100"), ("nowhere.toml", "can't be read")):
        with pytest.raises(ConfigError, match=message):
            device(name)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nemotron-h-8b", "--json", "--device", "h200", "--context", "4096", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"crossovers", "capacity", "engines", "checkpoint_bytes", "state_bytes_per_sequence", "dtypes"} <= found.keys()
    assert found["engines"]["vllm"]["align"]["block_tokens"]["value"] == 1040
    origins = {found["capacity"]["frontier"][0][name]["origin"] for name in ("room", "bound_by", "context")}
    assert origins == {"shapes", "rule", "asked"}
    assert main(["plan", "nemotron-h-8b", "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "6,234 tokens" in shown and "1,040" in shown and "flags for SGLang" in shown
    assert main(["plan", "hymba-1.5b", "--json"]) == 1
    assert "can be sized but not served" in capsys.readouterr().out
    for wrong in (["--context", "0"], ["--draft-tokens", "-1"], ["--device", "h9"], ["--memory", "1KB"], ["--versus", "x"]):
        assert main(["plan", "nemotron-h-8b", *wrong]) == 2
        assert capsys.readouterr().err.startswith("milepost: ")


@pytest.mark.parametrize("name", ["nemotron_h", "recurrent_gemma", "mamba", "lfm2"])
def test_as_many_run_as_the_plan_says(name: str, tmp_path: Path) -> None:
    """The engine, filled with requests of one length, runs as many at once as `capacity` tells, within 2 %."""
    from milepost.engine.loop import Engine
    from milepost.request import Request, SamplingParams

    path = make_checkpoint(tmp_path / "m", TINY_CONFIGS[name])
    settings: dict[str, Any] = {"max_num_seqs": 200, "max_num_batched_tokens": 4800}
    probe = plan(str(path), Question(contexts=(60,)), kv_cache_memory_bytes=2**22, **settings).capacity.frontier[0]
    settings["kv_cache_memory_bytes"] = int(2**22 / probe.room * 60.5)
    room = plan(str(path), Question(contexts=(60,)), **settings).capacity.frontier[0].room
    engine = Engine(EngineConfig(model=str(path), max_model_len=60, enable_prefix_caching=False, **{**TYPES, **settings}))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for number in range(room + 9):
        engine.submit(Request(f"r{number}", (5,) * 59, params), lambda delta: None)
    admitted = engine.scheduler.schedule
    most = 0

    def schedule() -> Any:
        nonlocal most
        found = admitted()
        most = max(most, len(engine.scheduler.running))
        return found

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    engine.step()
    assert room >= 40 and abs(most - room) <= 0.02 * room, f"{most} ran, {room} were planned"
    engine.stop()


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom milepost.cli import main\nmain(['plan', 'nemotron-h-8b', '--json', '--device', 'h100'])\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stderr.strip() == "False False"
