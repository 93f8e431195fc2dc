"""Nemotron-H with experts (Nemotron-3): experts stored one by one and merged, its router in bf16, dialects, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.bench.parity.cases import case
from milepost.bench.parity.theirs import Theirs
from milepost.errors import UnsupportedModel
from milepost.models.nemotron_h import parse
from milepost.models.spec import MoeSpec
from tests.checkpoints import nemotron_h_config
from tests.models.pools import Sequence, load

transformers = pytest.importorskip("transformers")


def theirs_of(config: str) -> Theirs:
    return Theirs("NemotronH", case("nemotron_h", config).settings)


def test_experts_one_by_one_and_merged_are_the_same(tmp_path: Path) -> None:
    theirs_of("experts-latent").model.save_pretrained(tmp_path)
    tokens = torch.arange(20)
    single = Sequence(load(tmp_path)).feed(tokens)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = sorted(name for name in tensors if ".experts." in name)
    assert len(parts) == 2 * 2 * 6, "transformers stores experts one by one"
    for prefix in {name.split(".experts.")[0] for name in parts}:
        for kind in ("up_proj", "down_proj"):
            each = [tensors.pop(f"{prefix}.experts.{expert}.{kind}.weight") for expert in range(6)]
            tensors[f"{prefix}.experts.{kind}"] = torch.stack(each)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(Sequence(load(tmp_path)).feed(tokens), single, rtol=1e-5, atol=1e-5)


def test_an_expert_that_is_missing_is_named_before_weightsload(tmp_path: Path) -> None:
    theirs_of("experts").model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("layers.1.mixer.experts.5.up_proj.weight")]
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"1 missing tensors: layers\.1\.mixer\.experts\.5\.up_proj\.weight"):
        load(tmp_path)


def test_bfloat16_keeps_the_router_in_fp32(tmp_path: Path) -> None:
    theirs_of("experts-groups").model.save_pretrained(tmp_path)
    tokens = torch.arange(24)
    wide, narrow = Sequence(load(tmp_path)), Sequence(load(tmp_path, dtype=torch.bfloat16), dtype=torch.bfloat16)
    wanted, found = wide.feed(tokens), narrow.feed(tokens)
    assert ((found - wanted).abs().mean() / wanted.abs().mean()).item() < 0.1


def _tiny(**overrides: Any) -> dict[str, Any]:
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28}
    return nemotron_h_config(**{"hybrid_override_pattern": "ME*E", **experts, **overrides})


def test_pattern_list_and_saved_dialects_agree() -> None:
    plain = parse(_tiny(n_shared_experts=1, moe_shared_expert_overlap=False))
    assert [layer.feed_forward is not None for layer in plain.layers] == [False, True, False, True]
    for names in (["mamba", "moe", "attention", "moe"], ["linear_attention", "moe", "full_attention", "moe"]):
        assert parse(_tiny(hybrid_override_pattern=..., layers_block_type=names)) == plain
    assert parse(_tiny(n_routed_experts=..., num_local_experts=8)) == plain


def test_keys_of_transformers_are_known() -> None:
    theirs = json.loads(json.dumps(transformers.NemotronHConfig(**case("nemotron_h", "experts-groups").settings).to_dict()))
    experts = parse(theirs).layers[1].feed_forward
    assert isinstance(experts, MoeSpec)
    assert (experts.router.groups, experts.router.best_groups, experts.router.normalise) == (4, 2, False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"n_group": 3}, "n_group=3 doesn't divide n_routed_experts=8"),
    "groups of one": ({"n_group": 8}, "n_group=8"),
    "more groups than there are": ({"topk_group": 2}, "topk_group=2 is more than n_group=1"),
    "more experts than there are": ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    "more experts than the groups hold": ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok=3"),
    "several shared": ({"n_shared_experts": 2}, "n_shared_experts=2"),
    "activation": ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    "names of one count": ({"num_local_experts": 4}, "num_local_experts=4 disagrees with n_routed_experts=8"),
    "pattern length": ({"num_hidden_layers": 3}, "num_hidden_layers=3 disagrees with hybrid_override_pattern: 4 layers"),
    "letter": ({"hybrid_override_pattern": "MXE"}, "hybrid_override_pattern has unknown layers X"),
    "flag": ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
    "latent": ({"moe_latent_size": 0}, "moe_latent_size=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message) as caught:
        parse(_tiny(**overrides))
    assert caught.value.field
