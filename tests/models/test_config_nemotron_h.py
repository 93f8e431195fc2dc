"""What the parser of Nemotron-H reads, and what it refuses by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import ConfigError, UnsupportedModel
from milepost.models import load_spec
from milepost.models.nemotron_h import parse
from milepost.models.spec import AttentionSpec, Mamba2Spec, MlpSpec, ModelSpec
from tests.checkpoints import make_nemotron_h, nemotron_h_config


def spec_of(**overrides: Any) -> ModelSpec:
    return parse(nemotron_h_config(**overrides))


def write(path: Path, **overrides: Any) -> Path:
    (path / "config.json").write_text(json.dumps(nemotron_h_config(**overrides)))
    return path


# NVIDIA-Nemotron-style config of the first published models, every key of it.
LEGACY: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "num_query_groups": 8,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def test_a_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LEGACY))
    spec = load_spec(tmp_path)
    assert len(spec.layers) == 52 and len(spec.attention_layers) == 4 and len(spec.recurrent_layers) == 24
    assert spec.layers[0].mixers == (
        Mamba2Spec(128, 64, 128, 8, 4, conv_bias=True, proj_bias=False, dt_min=0.0, dt_max=float("inf"), norm_eps=1e-5),
    )
    assert spec.layers[1].mixers == (MlpSpec(21504, bias=False, activation="relu2"),)
    assert spec.layers[7].attention == AttentionSpec(32, 8, 128, bias=False, scale=128**-0.5)
    assert (spec.dtype, spec.recurrent_dtype) == ("bfloat16", "float32")
    assert (spec.eos_token_ids, spec.bos_token_id, spec.max_position_embeddings) == ((2,), 1, 8192)


def test_both_dialects_give_one_spec() -> None:
    plain = spec_of()
    for name in ("layers_block_type", "layer_types"):
        old = spec_of(hybrid_override_pattern=..., **{name: ["mamba", "mlp", "attention", "mamba"]})
        new = ["linear_attention", "mlp", "full_attention", "linear_attention"]
        assert old == plain == spec_of(**{name: new})


@pytest.mark.parametrize("infinity", [float("inf"), "Infinity", "inf", {"__float__": "Infinity"}])
@pytest.mark.parametrize("name", ["time_step_limit", "mamba_dt_limit"])
def test_infinity_in_every_spelling(tmp_path: Path, infinity: Any, name: str) -> None:
    (mixer,) = load_spec(write(tmp_path, **{name: [0.001, infinity]})).layers[0].mixers
    assert isinstance(mixer, Mamba2Spec)
    assert (mixer.dt_min, mixer.dt_max) == (0.001, float("inf"))


def test_initialisation_fields_do_not_clamp() -> None:
    assert spec_of(time_step_min=0.5, time_step_max=0.6, time_step_floor=0.1) == spec_of()


def test_aliases_and_defaults() -> None:
    assert spec_of(head_dim=..., attention_head_dim=8, n_groups=..., mamba_n_groups=2) == spec_of()
    assert spec_of(head_dim=8, attention_head_dim=8) == spec_of()
    assert spec_of(eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert spec_of(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    (attention,) = (layer.attention for layer in spec_of(num_key_value_heads=None).attention_layers)
    assert attention is not None and attention.kv_heads == 4


def test_keys_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    generic = (
        transformers.PreTrainedConfig().to_dict()
        | transformers.NemotronHConfig(
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]
        ).to_dict()
    )
    merged = json.loads(json.dumps({**generic, **nemotron_h_config(torch_dtype=...)}))
    assert parse(merged).layers == spec_of().layers


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
    "unknown letter": ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has unknown layers X"),
    "unknown layer type": ({"layer_types": ["sliding"], "hybrid_override_pattern": ...}, "layers_block_type"),
    "no pattern": ({"hybrid_override_pattern": ...}, "hybrid_override_pattern or layers_block_type is required"),
    "empty pattern": ({"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    "pattern and list": ({"layers_block_type": ["mamba"]}, "disagree"),
    "layer count": ({"num_hidden_layers": 5}, "num_hidden_layers=5"),
    "groups": ({"n_groups": 3}, "n_groups=3 doesn't divide mamba_num_heads=4"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    "query groups": ({"num_query_groups": 4}, "num_query_groups=4 disagrees with num_key_value_heads=2"),
    "activation": ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'.*relu2"),
    "mamba activation": ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'.*silu"),
    "sliding window": ({"sliding_window": 512}, "sliding_window=512"),
    "head dims disagree": ({"attention_head_dim": 16}, "attention_head_dim=16 disagrees with head_dim=8"),
    "eps disagree": ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 disagrees"),
    "wrong type": ({"hidden_size": "32"}, "hidden_size='32' is not an integer"),
    "bool for int": ({"vocab_size": True}, "vocab_size=True"),
    "not positive": ({"ssm_state_size": 0}, "ssm_state_size=0 is less than 1"),
    "convolution": ({"conv_kernel": 1}, "conv_kernel=1 is less than 2"),
    "not a flag": ({"use_bias": 1}, "use_bias=1 is not true or false"),
    "eps": ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0"),
    "eps not a number": ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
    "limits": ({"time_step_limit": [0.1, 0.1]}, "time_step_limit"),
    "limits not a pair": ({"time_step_limit": 0.1}, "time_step_limit"),
    "limits nan": ({"time_step_limit": [0.0, "NaN"]}, "time_step_limit"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
    "state dtype": ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype='int8'"),
    "token id": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "multi-token prediction": ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
    "encoder": ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    "rotary": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
    "multimodal": ({"vision_config": {}}, "vision_config"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*NemotronHForCausalLM"),
    "sequence classifier": ({"architectures": ["NemotronHForSequenceClassification"]}, "SequenceClassification"),
    "model type": ({"architectures": ..., "model_type": "llama"}, "model_type='llama'.*NemotronHForCausalLM"),
    "architectures": ({"architectures": "NemotronHForCausalLM"}, "architectures"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load_spec(write(tmp_path, **overrides))
    assert caught.value.field


def test_all_complaints_stand_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"n_groups=3.*sliding_window=8.*surprise"):
        load_spec(write(tmp_path, n_groups=3, sliding_window=8, surprise=1))


def test_model_type_alone_is_enough(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, architectures=...)).family == "nemotron_h"


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[]", "list"), (None, "doesn't exist")])
def test_files_that_are_no_config(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_spec(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        load_spec(tmp_path / "nowhere")


def test_parsing_does_not_import_torch(tmp_path: Path) -> None:
    make_nemotron_h(tmp_path / "model")
    program = (
        "import sys; from pathlib import Path; from milepost.models import load_spec; "
        "from milepost.models.weights import weights_identity; "
        f"path = Path({str(tmp_path / 'model')!r}); load_spec(path); weights_identity(path); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
