"""What the peers would do, against figures computed elsewhere, and against what must hold whatever the sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import ConfigError
from milepost.models.spec import (
    AttentionSpec,
    DType,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    ModelSpec,
    RgLruSpec,
    ShortConvSpec,
)
from milepost.plan.peers import SglangPlan, VllmMode, VllmPlan, inflated_block, plan_sglang, plan_vllm
from milepost.state.layout import StateDTypes, layout_of

SHARED = Path(__file__).parents[3] / "shared" / "golden"
GOLDEN: dict[str, Any] = json.loads((SHARED / "sizes.json").read_text())["models"] if SHARED.exists() else {}
FP32 = StateDTypes("bfloat16", "bfloat16", "float32")
BF16 = StateDTypes("bfloat16", "bfloat16", "bfloat16")
GIB = 1 << 30
needs_golden = pytest.mark.skipif(not GOLDEN, reason="the golden figures are not part of a clone")


def model(attention: MixerSpec | None, recurrent: MixerSpec | None, counts: tuple[int, int], name: str = "Any") -> ModelSpec:
    """So many attention layers, then so many recurrent ones: the peers' arithmetic doesn't ask for their order."""
    mixers = [attention] * counts[0] + [recurrent] * counts[1]
    layers = tuple(LayerSpec(index, (mixer,)) for index, mixer in enumerate(mixers) if mixer is not None)
    return ModelSpec("any", name, 256, 64, layers, 1e-5, True, 1 << 18, "bfloat16", "float32", (2,), None)


def attention(kv_heads: int = 8, head_dim: int = 128) -> AttentionSpec:
    return AttentionSpec(heads=kv_heads * 4, kv_heads=kv_heads, head_dim=head_dim, bias=False, scale=1.0)


def mamba2(heads: int = 128, head_dim: int = 64, state_size: int = 128, groups: int = 8, kernel: int = 4) -> Mamba2Spec:
    return Mamba2Spec(heads, head_dim, state_size, groups, kernel, True, False, 0.001, 0.1, 1e-5)


def recurrent(entry: dict[str, Any]) -> MixerSpec:
    """The mixer that a golden entry's own keys describe."""
    match entry:
        case {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}:
            dims = (entry["linear_key_head_dim"], entry["linear_value_head_dim"], entry["linear_conv_kernel_dim"])
            return GatedDeltaSpec(key_heads, heads, *dims, norm_eps=1e-6)
        case {"conv_L_cache": kernel}:
            return ShortConvSpec(entry["hidden_size"], kernel, False)
        case {"lru_width": width}:
            return RgLruSpec(width, entry["num_attention_heads"], entry["conv1d_width"])
        case {"mamba_version": 1}:
            inner = entry.get("conv_dim") or entry["mamba_expand"] * entry["hidden_size"]
            return Mamba1Spec(inner, entry["mamba_d_state"], entry.get("mamba_dt_rank", 1), entry["mamba_d_conv"], True, False)
        case _:
            keys = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
            return mamba2(*(entry[key] for key in keys))


def published(name: str) -> ModelSpec:
    entry, expect = GOLDEN[name]["config"], GOLDEN[name]["expect"]
    counts = (expect["attention_layers"], expect["recurrent_layers"])
    kv = attention(entry["num_key_value_heads"], entry["head_dim"]) if counts[0] else None
    return model(kv, recurrent(entry), counts, "NemotronHForCausalLM" if entry["arch"] == "nemotron_h" else "Any")


def nemotron_h_8b() -> ModelSpec:
    return model(attention(), mamba2(), (4, 24), "NemotronHForCausalLM")


def in_vllm(spec: ModelSpec, dtypes: StateDTypes = FP32, **asked: Any) -> VllmPlan:
    return plan_vllm(spec, dtypes, **{"max_model_len": 131072, "memory_bytes": 60 * GIB, "chunk_tokens": 256, **asked})


def in_sglang(spec: ModelSpec, dtypes: StateDTypes = FP32, **asked: Any) -> SglangPlan:
    return plan_sglang(spec, dtypes, **{"max_model_len": 131072, "memory_bytes": 60 * GIB, **asked})


@needs_golden
@pytest.mark.parametrize("name", GOLDEN)
def test_the_aligned_block_equals_the_golden_one(name: str) -> None:
    """All 38; those without attention have no block to inflate."""
    expect = GOLDEN[name]["expect"]
    found = {key: in_vllm(published(name), dtypes).align for key, dtypes in (("fp32", FP32), ("bf16", BF16))}
    for key, mode in found.items():
        assert mode.block_tokens == expect.get(f"vllm_align_block_tokens_{key}")
    assert found["fp32"].state_bytes == expect["state_bytes_per_layer_fp32_bf16"]
    assert found["fp32"].page_bytes == (found["fp32"].block_tokens or 1) * expect.get(
        "kv_bytes_per_token_per_layer_bf16", found["fp32"].state_bytes
    )


@needs_golden
def test_the_seed_figures_of_nemotron_h() -> None:
    """Exact, or exact to the digits given."""
    seed = json.loads((SHARED / "seed_figures.json").read_text())["nemotron_h_8b"]
    found = in_vllm(nemotron_h_8b())
    assert found.align.block_tokens == seed["vllm_align_block_tokens"]
    assert found.align.state_bytes == seed["state_bytes_per_layer"]
    historic = found.all
    assert historic.block_tokens == seed["vllm_all_mode_block_tokens_chunk_256"]
    assert round(historic.padding_percent, 1) == seed["vllm_all_mode_padding_percent"]
    assert historic.states_per_request == seed["vllm_all_mode_state_blocks_at_131072_tokens"]
    assert round(historic.state_bytes_per_request / GIB, 2) == seed["vllm_all_mode_bytes_at_131072_tokens_gib"]
    assert round(historic.state_bytes_per_request_padded / GIB, 2) == seed["vllm_all_mode_bytes_at_131072_tokens_padded_gib"]
    assert in_sglang(nemotron_h_8b()).slot_bytes == seed["state_bytes_per_sequence"]


def test_the_pool_of_vllm() -> None:
    """24 + 4 layers make seven groups of four; each request's states and KV come from one pool of blocks of four layers."""
    align = in_vllm(nemotron_h_8b()).align
    assert (align.layers_per_group, align.attention_groups, align.state_groups) == (4, 1, 6)
    assert align.block_bytes == 4 * 1040 * 4096
    assert align.blocks == 60 * GIB // align.block_bytes
    assert align.request_blocks(1) == 1 + 6
    assert align.request_blocks_at_max_len == 127 + 6 * 3
    assert align.sequences_at_max_len == (align.blocks - 1) // 145
    assert align.sequences_short == (align.blocks - 1) // 7 < align.start_limit


def test_layers_of_about_equal_number_share_groups_of_the_larger() -> None:
    """36 of each: two groups. 10 and 14: groups of 14. 9 and 54: of 9."""
    for counts, expect in (((36, 36), (36, 1, 1)), ((10, 14), (14, 1, 1)), ((9, 54), (9, 1, 6)), ((6, 23), (6, 1, 4))):
        mode = in_vllm(model(attention(), mamba2(), counts)).align
        assert (mode.layers_per_group, mode.attention_groups, mode.state_groups) == expect


@pytest.mark.parametrize(("draft", "states"), [(0, (1, 3)), (3, (4, 6))])
def test_the_reserve_of_vllm(draft: int, states: tuple[int, int]) -> None:
    """none: 1 + draft. align, of kernels that hand out states from inside: 2 + draft + 1. Windows grow by a column each."""
    found = in_vllm(nemotron_h_8b(), draft_tokens=draft)
    assert (found.none.states_per_request, found.align.states_per_request) == states
    assert found.align.state_bytes == 4255744 + draft * 10240 * 2
    assert found.none.state_reserve_bytes == 6 * states[0] * found.none.block_bytes


def test_other_mixers_reserve_two_states_and_no_wider_window() -> None:
    found = in_vllm(model(attention(), Mamba1Spec(8192, 16, 256, 4, True, False), (4, 28)), draft_tokens=2)
    assert found.align.states_per_request == 2 + 2
    assert found.align.state_bytes == 573440


def test_the_check_at_start_is_looser_than_the_limit() -> None:
    """A start with more sequences than blocks is refused; with fewer, many of them may still never run at once."""
    small = in_vllm(nemotron_h_8b(), memory_bytes=8 * GIB).align
    assert small.refused_at_start and small.start_limit < 1024
    fits = in_vllm(nemotron_h_8b()).align
    assert not fits.refused_at_start and fits.sequences_short < 1024
    assert in_vllm(nemotron_h_8b(), memory_bytes=2 * GIB, max_num_seqs=1).align.refused_at_start


def test_where_hits_of_vllm_fall() -> None:
    found = in_vllm(nemotron_h_8b())
    assert (found.none.shortest_hit, found.align.shortest_hit, found.all.shortest_hit) == (None, 1041, 1281)
    assert [found.hit("align", shared) for shared in (0, 1039, 1040, 2079, 2080, 5000)] == [0, 0, 1040, 1040, 2080, 4160]
    assert [found.hit("all", shared) for shared in (1279, 1280, 5000)] == [0, 1280, 3840]
    assert found.hit("none", 5000) == 0
    assert found.hit("align", 1040, prompt=1040) == 0, "the same prompt again: its last token is always computed"


def test_a_shared_prefix_does_not_hit_the_second_time() -> None:
    """The one state of the first prompt lies in its tail (vLLM issue 45238); where each chunk ends there is one more."""
    align = in_vllm(nemotron_h_8b()).align
    assert align.kept(6000, 8192) == (5200,)
    assert align.hit_after(6000, 4000, 6000, 8192) == 0 < align.hit(4000)
    assert align.hit_after(6000, 5300, 6000, 8192) == 5200
    assert align.kept(20000, 8192) == (7280, 14560, 19760)
    assert align.kept(2080, 8192) == (1040, 2080), "two whole blocks: the same prompt again may take the first only"
    assert align.hit_after(2080, 2080, 2080, 8192) == 1040
    assert align.hit_after(20000, 8000, 20000, 8192) == 7280
    assert align.kept(6000, 8192, answer=1500) == (5200, 6240, 7280)
    assert in_vllm(nemotron_h_8b()).all.hit_after(6000, 4000, 6000, 8192) == 3840


def test_a_match_unit_reaches_the_tail_of_a_prompt() -> None:
    align = in_vllm(nemotron_h_8b(), match_unit=16).align
    assert (align.hit_step, align.shortest_hit, align.block_tokens) == (16, 17, 1040)
    assert align.kept(700, 8192) == (688,)
    assert align.hit_after(700, 700, 900, 8192) == 688
    assert align.hit_after(6000, 4000, 6000, 8192) == 0
    with pytest.raises(ConfigError, match="match_unit=48 must divide the block of 1040"):
        in_vllm(nemotron_h_8b(), match_unit=48)


def test_a_drafter_of_its_own_costs_a_block_of_reuse() -> None:
    eagle, ngram = (in_vllm(nemotron_h_8b(), draft_tokens=3, drafter_drops=drops).align for drops in (True, False))
    block = eagle.block_tokens
    assert block is not None and block == ngram.block_tokens
    assert eagle.hit(3 * block) == 2 * block and ngram.hit(3 * block) == 3 * block
    assert eagle.shortest_hit == 2 * block + 1
    assert eagle.hit_after(3 * block, 3 * block, 4 * block, 8192) == 2 * block


def test_where_the_code_rounds_more_than_the_golden_rule() -> None:
    """MLA: to 128. Qwen's gated delta layers on an H100: to 64, in align only."""
    gated = GatedDeltaSpec(16, 32, 128, 128, 4, 1e-6)
    qwen = in_vllm(model(attention(4, 256), gated, (8, 24), "Qwen3_5ForCausalLM"))
    assert (qwen.align.block_tokens, qwen.align.block_tokens_of_code, qwen.none.block_tokens_of_code) == (528, 576, 528)
    latent = LatentAttentionSpec(heads=32, rank=512, nope_dim=128, shared_dim=64, value_dim=128, scale=1.0, norm_eps=1e-5)
    mla = in_vllm(model(latent, mamba2(), (4, 24))).align
    assert mla.page_bytes == mla.block_tokens * 576 * 2  # type: ignore[operator]
    assert mla.block_tokens == inflated_block(4255744, 1152) and mla.block_tokens_of_code == inflated_block(4255744, 1152, 128)


def test_models_of_one_kind() -> None:
    """No attention: nothing to inflate, states of 16 tokens apart if at all. No state: blocks of 16, nothing reserved."""
    pure = in_vllm(model(None, mamba2(), (0, 24), "Mamba2ForCausalLM"))
    assert (pure.align.block_tokens, pure.align.padding_bytes, pure.align.hit_step) == (None, 0, 16)
    assert pure.none.block_bytes == layout_of(model(None, mamba2(), (0, 24)), FP32, 16).state_bytes
    dense = in_vllm(model(attention(), None, (32, 0)))
    assert (dense.align.block_tokens, dense.align.states_per_request, dense.align.hit_step) == (16, 0, 16)
    assert dense.align.hit_after(1000, 777, 1000, 8192) == 768
    pages = in_sglang(model(attention(), None, (32, 0)), page_size=16)
    assert (pages.slots, pages.hit_step, pages.hit_after(1000, 777, 1000, 8192)) == (0, 16, 768)
    alone = in_sglang(model(None, mamba2(), (0, 24), "Mamba2ForCausalLM"))
    assert (alone.kv_tokens, alone.bound_by, alone.strategy) == (None, "slots", "no_buffer")


def test_the_slots_of_sglang() -> None:
    """Three, and two to track with; four when lazy or without overlap; three without the buffer; one without the tree."""
    spec = nemotron_h_8b()
    assert in_sglang(spec).slots_per_request == 5
    assert in_sglang(spec, strategy="extra_buffer_lazy").slots_per_request == 4
    assert in_sglang(spec, strategy="extra_buffer", overlap=False).slots_per_request == 4
    assert in_sglang(spec, overlap=False).strategy == "no_buffer"
    assert in_sglang(spec, strategy="no_buffer").slots_per_request == 3
    assert in_sglang(spec, strategy="off").slots_per_request == 1


def test_the_split_of_sglang() -> None:
    """9 parts of 19 for states, a slot of them padding; the rest for KV; five slots for each request."""
    found = in_sglang(nemotron_h_8b(), page_size=64)
    state = 102137856
    assert found.state_budget_bytes == 60 * GIB * 9 // 19
    assert found.slots == (found.state_budget_bytes - state) // state == 297
    assert found.kv_tokens == (60 * GIB - 298 * state) // 16384 // 64 * 64
    assert (found.max_running_requests, found.bound_by) == (59, "slots")
    assert found.requests_at_max_len == found.kv_tokens // 131072 == 15
    assert found.states_beside_running == 297 - 59 * 5
    asked = in_sglang(nemotron_h_8b(), max_running_requests=16)
    assert (asked.max_running_requests, asked.bound_by) == (16, "max_running_requests")


def test_drafting_costs_sglang_a_state_a_token() -> None:
    plain, drafting = in_sglang(nemotron_h_8b()), in_sglang(nemotron_h_8b(), draft_tokens=3, max_running_requests=1000)
    assert drafting.slots < plain.slots / 1.7
    assert drafting.state_pool_bytes <= drafting.state_budget_bytes
    assert drafting.request_state_bytes == (5 + 4) * drafting.slot_bytes


def test_where_hits_of_sglang_fall() -> None:
    """On the grid of chunk and page, counted from where a chunk starts; in answers, every 256 tokens, the last one."""
    found = in_sglang(nemotron_h_8b(), chunk_tokens=256)
    assert (found.grid_tokens, found.hit_step, found.shortest_hit) == (256, 256, 257)
    assert [found.hit(shared) for shared in (255, 256, 5000)] == [0, 256, 4864]
    assert found.kept(20000, 8192) == (8192, 16384, 19968)
    assert found.kept(1000, 8192, answer=700) == (768, 1536)
    assert found.hit_after(6000, 4000, 6000, 8192) == 0
    assert in_sglang(nemotron_h_8b(), page_size=128).grid_tokens == 128
    assert in_sglang(nemotron_h_8b()).grid_tokens == 64
    ends = in_sglang(nemotron_h_8b(), strategy="no_buffer")
    assert ends.kept(1000, 8192, answer=50) == (1000, 1049)
    assert ends.hit_after(1000, 1000, 1000, 8192) == 0, "the same prompt again (SGLang issue 22935)"
    assert ends.hit_after(1000, 1000, 1200, 8192) == 1000
    assert in_sglang(nemotron_h_8b(), strategy="off").hit(5000) == 0


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"strategy": "no_buffer", "page_size": 16}, "page_size"),
        ({"page_size": 48}, "page_size"),
        ({"strategy": "extra_buffer_lazy", "overlap": False}, "strategy"),
        ({"memory_bytes": 100 << 20}, "memory_bytes"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"ratio": 0}, "ratio"),
    ],
)
def test_what_sglang_refuses(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_sglang(nemotron_h_8b(), **asked)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"block_size": 24}, "block_size"), ({"draft_tokens": -1}, "draft_tokens"), ({"memory_bytes": 0}, "memory_bytes")],
)
def test_what_vllm_refuses(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_vllm(nemotron_h_8b(), **asked)
    assert caught.value.field == field


def test_every_number_says_where_it_comes_from() -> None:
    """In both plans a bare number would be one without a reason; and all of it is JSON."""
    vllm, sglang = in_vllm(nemotron_h_8b()).to_json(), in_sglang(nemotron_h_8b()).to_json()
    json.dumps([vllm, sglang])
    for record in (vllm["none"], vllm["align"], vllm["all"], sglang):
        assert isinstance(record, dict)
        for name, value in record.items():
            assert not isinstance(value, (int, float)) or isinstance(value, bool), name
            assert not isinstance(value, dict) or (value["source"] and value["origin"])
    assert vllm["align"]["block_tokens"]["value"] == 1040  # type: ignore[index]


def test_flags() -> None:
    """Those that give the mode and the limit; the one that 0.33.0 ignores is not among align's."""
    found = in_vllm(nemotron_h_8b())
    texts = {mode.mode: [flag.text for flag in mode.flags] for mode in found.modes}
    assert "--no-enable-prefix-caching" in texts["none"] and "--enable-prefix-caching" in texts["align"]
    assert f"--max-num-seqs {found.align.sequences_short}" in texts["align"]
    assert "--mamba-ssm-cache-dtype float32" in texts["align"]
    assert [text for text in texts["align"] if "cache-mode" in text] == []
    assert "--mamba-block-size 1280" in texts["all"]
    assert "--mamba-radix-cache-strategy extra_buffer" in [flag.text for flag in in_sglang(nemotron_h_8b()).flags]


def test_architectures_that_they_lack_are_named() -> None:
    absent = model(attention(), mamba2(), (3, 29), "BambaForCausalLM")
    for plan in (in_vllm(absent), in_sglang(absent)):
        assert not plan.supported and "BambaForCausalLM" in plan.notes[0]
    assert in_vllm(nemotron_h_8b()).supported and in_sglang(nemotron_h_8b()).supported


DTYPES = st.sampled_from(("float32", "bfloat16"))


@st.composite
def hybrids(draw: st.DrawFn) -> tuple[ModelSpec, StateDTypes]:
    kv = draw(st.none() | st.builds(attention, st.integers(1, 16), st.sampled_from((32, 64, 128, 256))))
    mixers = st.one_of(
        st.builds(mamba2, st.integers(1, 128), st.sampled_from((32, 64)), st.sampled_from((16, 128, 256)), st.integers(1, 8)),
        st.builds(lambda width: ShortConvSpec(width, 3, False), st.integers(1, 4096)),
        st.builds(lambda width: RgLruSpec(width, 1, 4), st.integers(1, 4096)),
    )
    counts = (draw(st.integers(1, 20)), draw(st.integers(1, 60)))
    window: DType = draw(DTYPES)
    matrix: DType = draw(DTYPES)
    return model(kv, draw(mixers), counts, draw(st.sampled_from(("Any", "NemotronHForCausalLM")))), StateDTypes(
        "bfloat16", window, matrix
    )


def steps_up(hits: list[int], lengths: list[int]) -> None:
    assert all(0 <= hit <= shared for hit, shared in zip(hits, lengths, strict=True))
    assert hits == sorted(hits)


@settings(max_examples=40, deadline=None)
@given(hybrids(), st.integers(0, 4), st.integers(1, 9000), st.integers(0, 3000), st.integers(64, 9000))
def test_staircases(case: tuple[ModelSpec, StateDTypes], draft: int, prompt: int, answer: int, step_tokens: int) -> None:
    """More shared never means less reused, nothing is reused that isn't shared, and one prompt gives no more than the best."""
    lengths = sorted({*range(0, 3000, 37), prompt, prompt + answer})
    vllm = plan_vllm(*case, max_model_len=32768, memory_bytes=40 * GIB, draft_tokens=draft)
    sglang = plan_sglang(*case, max_model_len=32768, memory_bytes=40 * GIB, draft_tokens=draft)
    plans: list[VllmMode | SglangPlan] = [*vllm.modes, sglang]
    for plan in plans:
        steps_up([plan.hit(shared) for shared in lengths], lengths)
        found = [plan.hit_after(prompt, shared, shared + 1, step_tokens, answer) for shared in lengths]
        steps_up(found, lengths)
        assert all(once <= plan.hit(shared) for once, shared in zip(found, lengths, strict=True)) or plan is sglang
        assert all(0 < position <= prompt + answer for position in plan.kept(prompt, step_tokens, answer))
        shortest = plan.shortest_hit
        if shortest is not None:
            assert plan.hit(shortest - 1, shortest) > 0
            assert plan.hit(shortest - 1, shortest - 1) == 0
        else:
            assert plan.hit(10**6) == 0


@settings(max_examples=60, deadline=None)
@given(hybrids(), st.integers(0, 4), st.integers(16, 64), st.sampled_from((64, 128, 256)))
def test_blocks_hold_states_and_pools_hold_requests(
    case: tuple[ModelSpec, StateDTypes], draft: int, gibibytes: int, chunk: int
) -> None:
    """Padding is never negative and never a whole step of the block; what is said to run fits in the bytes given."""
    memory = gibibytes * GIB
    vllm = plan_vllm(*case, max_model_len=32768, memory_bytes=memory, draft_tokens=draft, chunk_tokens=chunk)
    for mode in vllm.modes:
        assert mode.padding_bytes >= 0
        if mode.block_tokens is not None:
            multiple = chunk if mode.mode == "all" else 16
            assert mode.block_tokens % multiple == 0
            assert mode.padding_bytes < mode.page_bytes / mode.block_tokens * multiple
        assert mode.blocks * mode.block_bytes <= memory
        assert mode.sequences_at_max_len * mode.request_bytes_at_max_len <= memory
        assert mode.sequences_at_max_len <= mode.sequences_short <= mode.start_limit
        assert mode.request_blocks(1) <= mode.request_blocks(4000) <= mode.request_blocks_at_max_len
    sglang = plan_sglang(*case, max_model_len=32768, memory_bytes=memory, draft_tokens=draft, chunk_tokens=chunk)
    used = sglang.state_pool_bytes + (sglang.kv_tokens or 0) * sglang.kv_bytes_per_token
    assert used <= memory
    assert sglang.max_running_requests * sglang.slots_per_request <= sglang.slots


def test_no_torch() -> None:
    """`plan` starts fast: the peers' arithmetic imports no torch."""
    code = "import sys, milepost.plan.peers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
