"""Kimi Linear beyond `test_parity.py`: latent rows against transformers' cache; what its parser and loader read and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.bench.parity.cases import Case, cases
from milepost.bench.parity.compare import errors
from milepost.bench.parity.ours import Sequence, load
from milepost.bench.parity.theirs import Theirs
from milepost.config import EngineConfig
from milepost.engine.assembly import choices, costs_of
from milepost.engine.settings import settle
from milepost.errors import ConfigError, UnsupportedModel
from milepost.kernels.protocol import OPERATIONS, Capabilities
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.kimi_linear import canonical_name, weights
from milepost.models.spec import KdaSpec, LatentAttentionSpec, MlpSpec, ModelSpec, MoeSpec
from milepost.models.weights import load_weights
from milepost.plan.sizes import sizes_of
from tests.checkpoints import make_checkpoint
from tests.families import TINY_CONFIGS

pytest.importorskip("transformers")

TINY = TINY_CONFIGS["kimi_linear"]
CASES = cases(["kimi_linear"])


def theirs_of(case: Case) -> Theirs:
    return Theirs(case.architecture, case.settings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)
def test_latent_rows(case: Case, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    theirs.save(tmp_path)
    tokens = torch.arange(45) % 61
    with torch.no_grad():
        cached = theirs.model(tokens[None], use_cache=True).cache.layers
    sequence = Sequence(load(tmp_path))
    for piece in tokens.split([19, 1, 25]):
        sequence.feed(piece)
    layers = [layer.index for layer in sequence.model.spec.attention_layers]
    pools = {index: sequence.memory[index].kv for index in layers}
    found = {str(index): pool.flatten(0, 1)[:45] for index, pool in pools.items() if pool is not None}
    wanted = {str(i): torch.cat((cached[i].keys, cached[i].values), -1)[0, 0] for i in layers}
    assert layers and max(errors(found, wanted).values()) < 1e-4


def test_what_transformers_runs_can_be_loaded_as_well_as_what_it_publishes(tmp_path: Path) -> None:
    theirs = theirs_of(CASES[1])
    theirs.model.save_pretrained(tmp_path / "published")
    theirs.model.save_pretrained(tmp_path / "run", save_original_format=False)
    wanted = weights(load_spec(tmp_path / "run"))
    published, run = (
        load_weights(tmp_path / name, wanted, canonical_name, dtype=torch.float32, device=torch.device("cpu"))
        for name in ("published", "run")
    )
    assert published.keys() == run.keys()
    assert all(torch.equal(tensor, run[name]) for name, tensor in published.items())


def test_pieces_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    theirs_of(CASES[0]).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    tensors["model.layers.0.self_attn.k_conv1d.weight"] = torch.zeros(31, 1, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    missing, shape = r"layers\.1\.mlp\.experts\.2\.up_proj\.weight", r"k_conv1d\.weight \[31, 1, 4\] instead of \[32, 1, 4\]"
    with pytest.raises(UnsupportedModel, match=rf"1 missing tensors: {missing}; 1 tensors of the wrong shape: .*{shape}"):
        load(tmp_path)


def test_the_reference_backend_agrees(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", TINY)
    fast, plain = Sequence(load(path)), Sequence(load(path, ReferenceBackend()))
    tokens = torch.arange(12) + 5
    assert errors({"logits": fast.feed(tokens)}, {"logits": plain.feed(tokens)})["logits"] < 1e-5
    assert max(errors(fast.states(), plain.states()).values()) < 1e-5


def test_fp64_is_split_invariant(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", TINY)
    exact = load(path, dtype=torch.float64)
    tokens = torch.arange(80) % 97
    whole, pieces = Sequence(exact, torch.float64), Sequence(exact, torch.float64)
    wanted = whole.feed(tokens)
    found = torch.cat([pieces.feed(part) for part in tokens.split([1, 2, 3, 41, 33])])
    assert errors({"logits": found, **pieces.states()}, {"logits": wanted, **whole.states()})["logits"] < 1e-10
    assert max(errors(pieces.states(), whole.states()).values()) < 1e-10


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "dense", {**TINY, "first_k_dense_replace": 4})  # experts flip where scores are close
    exact, narrow = Sequence(load(path)), Sequence(load(path, dtype=torch.bfloat16), torch.bfloat16)
    tokens = torch.arange(40) + 3
    assert errors({"logits": narrow.feed(tokens)}, {"logits": exact.feed(tokens)})["logits"] < 0.1
    assert max(errors(narrow.states(), exact.states()).values()) < 0.1


# --- the config -------------------------------------------------------------------------------------------------------

# moonshotai/Kimi-Linear-48B-A3B-Instruct, every key of it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.0",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def test_the_published_config(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED)
    assert [layer.index for layer in spec.attention_layers] == [3, 7, 11, 15, 19, 23, 26]
    assert spec.layers[0].mixers == (KdaSpec(32, 128, 128, 4, rank=128, norm_eps=1e-5),)
    assert spec.layers[3].mixers == (LatentAttentionSpec(32, 512, 128, 64, 128, scale=192**-0.5, norm_eps=1e-6),)
    assert spec.layers[0].feed_forward == MlpSpec(9216, bias=False, activation="silu", gated=True)
    moe = spec.layers[1].feed_forward
    assert isinstance(moe, MoeSpec) and all(layer.feed_forward == moe for layer in spec.layers[1:])
    assert (moe.experts, moe.per_token, moe.width, moe.shared_width) == (256, 8, 1024, 1024)
    assert moe.router.scores == "sigmoid" and moe.router.normalise and moe.router.bias and moe.router.scaling == 2.446
    assert spec.max_position_embeddings == 1048576 and spec.eos_token_ids == (163586,)


def test_the_published_sizes(tmp_path: Path) -> None:
    """20 states of [32, 128, 128] fp32 and [12288, 3] bf16; 7 latent rows of 576 bf16 a token; 49.1 G weights."""
    spec = read(tmp_path, PUBLISHED)
    sizes = sizes_of(spec, settle(EngineConfig(max_model_len=4096), spec, check=False))
    assert sizes.recurrent_bytes_per_sequence == 20 * 32 * 128 * 128 * 4
    assert sizes.window_bytes_per_sequence == 20 * 3 * 4096 * 3 * 2
    assert (sizes.kv_bytes_per_token, sizes.kv_bytes_per_token_per_layer) == (7 * 576 * 2, 576 * 2)
    costs = costs_of(spec)
    assert costs.per_token_and_context == 7 * 32 * (576 + 512)
    assert round(costs.per_token / 1e9, 1) == 49.1


def test_both_dialects_give_one_spec(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED)
    kept = {
        name: value
        for name, value in PUBLISHED.items()
        if name not in ("linear_attn_config", "first_k_dense_replace", "moe_layer_freq", "mla_use_nope", "auto_map")
    }
    kinds = ["full_attention" if layer.attention else "linear_attention" for layer in spec.layers]
    newer = {
        **kept, "layer_types": kinds, "mlp_layer_types": ["dense", *["sparse"] * 26], "linear_head_dim": 128,
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "qk_head_dim": 192, "head_dim": 64, "pretraining_tp": 1,
        "attention_bias": False, "attention_dropout": 0.0, "output_router_logits": False,
    }  # fmt: skip
    assert read(tmp_path, newer) == spec
    assert read(tmp_path, {**newer, **PUBLISHED}) == spec


def test_every_name_of_the_published_index_is_wanted(tmp_path: Path) -> None:
    """As the checkpoint's own code calls them: `mlp` for the dense layer, `block_sparse_moe` for the others."""
    attention = {
        0: "q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d f_a_proj f_b_proj b_proj g_a_proj g_b_proj o_norm o_proj",
        1: "q_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj",
    }
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for index, parts in attention.items():
        layer = f"model.layers.{index}"
        names += [f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        names += [f"{layer}.self_attn.{part}.weight" for part in parts.split()]
    names += ["model.layers.0.self_attn.A_log", "model.layers.0.self_attn.dt_bias"]
    names += [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    moe = "model.layers.1.block_sparse_moe"
    names += [f"{moe}.gate.weight", f"{moe}.gate.e_score_correction_bias"]
    names += [f"{moe}.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")]
    names += [f"{moe}.experts.{expert}.w{number}.weight" for expert in range(2) for number in (1, 2, 3)]
    small = {**PUBLISHED, "num_hidden_layers": 2, "num_experts": 2, "num_experts_per_token": 2}
    linear = {**PUBLISHED["linear_attn_config"], "kda_layers": [1], "full_attn_layers": [2]}
    wanted = weights(read(tmp_path, {**small, "linear_attn_config": linear}))
    assert {canonical_name(name) for name in names} == {part for spec in wanted for part in spec.parts or (spec.name,)}


def linear(**overrides: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**TINY["linear_attn_config"], **overrides}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"attn_res_block_size": 2}, "attn_res_block_size is a key that the parser of kimi_linear doesn't know"),
    "unknown key within": (linear(gate_lower_bound=-5.0), r"linear_attn_config.gate_lower_bound is a key"),
    "not an object": ({"linear_attn_config": [1]}, r"linear_attn_config=\[1\] is not supported: it must be an object"),
    "no layers": ({"linear_attn_config": None}, "neither layer_types nor linear_attn_config"),
    "from zero": (linear(kda_layers=[0, 2, 3], full_attn_layers=[1]), "must hold each of 1 to 4 once"),
    "twice": (linear(kda_layers=[1, 2, 3, 4]), "must hold each of 1 to 4 once"),
    "a name": (linear(kda_layers=["1"]), r"linear_attn_config.kda_layers=\['1'\] is not a list of layers from 1 to 4"),
    "two lists": ({"layer_types": ["linear_attention"] * 4}, "layer_types disagrees with linear_attn_config"),
    "two heads": ({"linear_num_heads": 7}, r"linear_num_heads=7 disagrees|num_heads=3 disagrees"),
    "length": ({"mlp_layer_types": ["dense"]}, "num_hidden_layers=4 disagrees with mlp_layer_types: 1 layers"),
    "feed-forwards": ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types disagrees with first_k_dense_replace"),
    "rotated": ({"mla_use_nope": False}, "mla_use_nope=False is not supported: rotated"),
    "kv heads": ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported: it must equal num_attention_heads=4"),
    "key width": ({"qk_head_dim": 12}, "qk_head_dim=12"),
    "activation": ({"hidden_act": "situ"}, "hidden_act='situ' is not supported"),
    "softmax": ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
    "groups": ({"num_expert_group": 4}, "num_expert_group=4 doesn't divide num_experts=6"),
    "best groups": ({"topk_group": 4}, "topk_group=4 is more than num_expert_group=3"),
    "ungrouped": ({"use_grouped_topk": False}, "use_grouped_topk=False"),
    "taken": ({"num_experts_per_token": 5}, "num_experts_per_tok=5 is more than 2 groups of 2 hold"),
    "one expert": ({"num_experts_per_token": 1}, "engines disagree on moe_renormalize"),
    "more tokens": ({"num_nextn_predict_layers": 1}, "multi-token prediction"),
    "window": (linear(short_conv_kernel_size=1), "linear_conv_kernel_dim=1 is less than 2"),
    "sliding": ({"sliding_window": 64}, "sliding_window=64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY, **overrides})


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_backends_are_chosen_for_its_own_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config = read(tmp_path, TINY), EngineConfig(model=str(tmp_path))
    settings = settle(config, spec)
    assert [choice.operation for choice in choices(config, spec, settings)] == ["kda", "latent_attention"]
    floats = (torch.float32, torch.bfloat16)
    for lacking, field in (("kda", "mamba"), ("convolution", "mamba"), ("latent_attention", "attention")):
        without = Capabilities("torch", ("cpu",), floats, floats, operations=OPERATIONS - {lacking})
        monkeypatch.setattr(TorchBackend, "capabilities", without)
        with pytest.raises(ConfigError, match=rf"{field}_backend=auto: .*operation {lacking}[, ].* not supported"):
            choices(config, spec, settings)
