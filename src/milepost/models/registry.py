"""Which family reads which checkpoint: a directory comes in, its `ModelSpec` goes out.

The law kept here: a family's module is imported only when a checkpoint asks for it, and an architecture that no
family knows is refused by name, together with the names that are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from milepost.errors import ConfigError, UnsupportedModel
from milepost.models.reader import read_json
from milepost.models.spec import ModelSpec, WeightSpec
from milepost.models.state_spaces import HYBRID, is_dialect, translate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from milepost.models.protocol import Backends, Model


class FamilyModule(Protocol):
    """What a family's module offers; `docs/adding_a_model.md` tells how to write one."""

    def parse(self, config: Mapping[str, Any]) -> ModelSpec:
        """Read a `config.json`. Raises UnsupportedModel naming the fields that can't be served."""
        ...

    def weights(self, spec: ModelSpec) -> tuple[WeightSpec, ...]:
        """The tensors that the model needs, by the names that it knows them by."""
        ...

    def canonical_name(self, name: str) -> str | None:
        """The model's name for a tensor of a checkpoint; None for one that the model never uses."""
        ...

    def build(self, spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
        """The model over its weights, already in the run's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A family's name, the names in `config.json` that lead to it, and its module."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    module: str
    uncounted: str = ""
    """What a size leaves out, of a family that can be sized but not served."""

    def load(self) -> FamilyModule:
        """Import the family's module."""
        return cast(FamilyModule, import_module(self.module))


_FAMILIES = (
    Family("nemotron_h", ("nemotron_h",), ("NemotronHForCausalLM",), "milepost.models.nemotron_h"),
    Family("mamba2", ("mamba2",), ("Mamba2ForCausalLM",), "milepost.models.mamba2"),
    Family("bamba", ("bamba",), ("BambaForCausalLM",), "milepost.models.bamba"),
    Family(
        "granitemoehybrid", ("granitemoehybrid",), ("GraniteMoeHybridForCausalLM",), "milepost.models.granitemoehybrid"
    ),
    Family("lfm2", ("lfm2",), ("Lfm2ForCausalLM",), "milepost.models.lfm2"),
    Family("lfm2_moe", ("lfm2_moe",), ("Lfm2MoeForCausalLM",), "milepost.models.lfm2_moe"),
    Family("qwen3_next", ("qwen3_next",), ("Qwen3NextForCausalLM",), "milepost.models.qwen3_next"),
    Family("qwen3_5", ("qwen3_5_text",), ("Qwen3_5ForCausalLM",), "milepost.models.qwen3_5"),
    Family("qwen3_5_moe", ("qwen3_5_moe_text",), ("Qwen3_5MoeForCausalLM",), "milepost.models.qwen3_5_moe"),
    Family("mamba", ("mamba",), ("MambaForCausalLM",), "milepost.models.mamba"),
    Family("olmo_hybrid", ("olmo_hybrid",), ("OlmoHybridForCausalLM",), "milepost.models.olmo_hybrid"),
    Family("jamba", ("jamba",), ("JambaForCausalLM",), "milepost.models.jamba"),
    Family("zamba2", ("zamba2",), ("Zamba2ForCausalLM",), "milepost.models.zamba2"),
    Family("kimi_linear", ("kimi_linear",), ("KimiLinearForCausalLM",), "milepost.models.kimi_linear"),
    Family("recurrent_gemma", ("recurrent_gemma",), ("RecurrentGemmaForCausalLM",), "milepost.models.recurrent_gemma"),
    Family("falcon_h1", ("falcon_h1",), ("FalconH1ForCausalLM",), "milepost.models.falcon_h1"),
)

_SIZED = (
    Family(
        "mamba2_hybrid",
        (),
        (HYBRID,),
        "milepost.models.state_spaces",
        "the small convolution windows over q, k and v in attention layers",
    ),
    Family(
        "hymba",
        ("hymba",),
        ("HymbaForCausalLM",),
        "milepost.models.hymba",
        "that neighbouring layers share their KV, and the learnt tokens before each prompt",
    ),
    Family(
        "dense",
        ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"),
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
        ),
        "milepost.models.dense",
        "nothing: attention stands in every layer",
    ),
)
"""Families whose memory is known, so that they can be sized beside the others; nothing here runs them."""

_OTHER_MODALITIES = ("vision_config", "audio_config", "text_config", "speech_config", "video_config")


def families() -> tuple[Family, ...]:
    """The families that can be served."""
    return _FAMILIES


def family_of(spec: ModelSpec) -> FamilyModule:
    """The module of a spec's family. Raises UnsupportedModel if there is none."""
    for family in _FAMILIES:
        if family.name == spec.family:
            return family.load()
    raise UnsupportedModel(f"family={spec.family!r} is unknown (known: {_known()})", field="family")


def sized_only(spec: ModelSpec) -> Family | None:
    """The family of a spec that can be sized but not served; None if it can be served."""
    return next((family for family in _SIZED if family.name == spec.family), None)


def load_spec(path: Path, *, sized: bool = False) -> ModelSpec:
    """Parse `path`/config.json. `sized`: also of a family that isn't served, whose memory is known all the same.

    Raises ConfigError if there is no such file or if it isn't a JSON object, and UnsupportedModel, naming the fields,
    for an unknown architecture, an unknown key, a quantised or multimodal checkpoint, or a value that can't work.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give one with config.json and safetensors", field="model")
    config = read_json(path / "config.json")
    return parse_config(config, sized=sized)


def parse_config(config: dict[str, Any], *, sized: bool = False) -> ModelSpec:
    """A spec from the object in a `config.json`. Raises UnsupportedModel, as `load_spec` does."""
    _refuse_by_key(config)
    if is_dialect(config):
        config = translate(config)
    return _find(config, _FAMILIES + _SIZED if sized else _FAMILIES).load().parse(config)


def _find(config: dict[str, Any], known: tuple[Family, ...]) -> Family:
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if not isinstance(architectures, list):
        raise UnsupportedModel(f"architectures={architectures!r} is not a list of names", field="architectures")
    for family in known:
        if architectures and any(name in family.architectures for name in architectures):
            return family
        if not architectures and model_type in family.model_types:
            return family
    named = f"architectures={architectures}" if architectures else f"model_type={model_type!r}"
    if known is _FAMILIES and any(name in family.architectures for family in _SIZED for name in architectures):
        named += " can be sized but not served: it"
    raise UnsupportedModel(
        f"{named} is not supported (supported: {_known()})", field="architectures" if architectures else "model_type"
    )


def _refuse_by_key(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"quantization_config (quant_method={method!r}) is not supported; use a checkpoint in float32, bfloat16 or float16",
            field="quantization_config",
        )
    for name in _OTHER_MODALITIES:
        if config.get(name) is not None:
            raise UnsupportedModel(
                f"{name} is not supported: only text models are served, whose config isn't nested in another", field=name
            )


def _known() -> str:
    return ", ".join(name for family in _FAMILIES for name in family.architectures)
