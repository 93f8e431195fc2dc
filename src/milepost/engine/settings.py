"""What `auto` comes to: settings and a model in, dtypes, lengths and a budget out, each with its reason.

The law kept here: say why (law 10). Nothing is decided anywhere else, and nothing here needs a weight or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milepost.config import DTypeSetting, EngineConfig
from milepost.errors import ConfigError
from milepost.models.spec import DTYPE_BYTES, DType, ModelSpec
from milepost.state.geometry import Geometry, check_budget, geometry_of
from milepost.state.layout import Layout, StateDTypes, layout_of

_FAST_BF16 = ("avx512_bf16", "amx_bf16")
_SPARE_SEQUENCES = 4
"""The default budget has room for so many times max_num_seqs of the longest sequences; memory beyond that would lie idle."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration with nothing left open. `reasons[field]` says where a value comes from."""

    dtype: DType
    dtypes: StateDTypes
    max_model_len: int
    budget_bytes: int
    layout: Layout
    geometry: Geometry
    reasons: Mapping[str, str]


def settle(config: EngineConfig, spec: ModelSpec, *, check: bool = True) -> Settings:
    """Decide everything that is left to `auto`. Raises ConfigError that names the field.

    Sizes must not depend on the machine: with dtype auto, KV and window keep the checkpoint's dtype even where this CPU
    computes in another. `check` False leaves out the test that one sequence fits in the budget.
    """
    reasons: dict[str, str] = {}
    dtype = _dtype(config.dtype, spec, reasons)
    stored, why = (spec.dtype, "the checkpoint's dtype") if config.dtype == "auto" else (dtype, "the activations' dtype")
    dtypes = StateDTypes(
        kv=_or("kv_cache_dtype", config.kv_cache_dtype, stored, why, reasons),
        window=_or("mamba_cache_dtype", config.mamba_cache_dtype, stored, why, reasons),
        recurrent=_recurrent(config, spec, dtype, reasons),
    )
    max_model_len = _length(config, spec, reasons)
    layout = layout_of(spec, dtypes, config.block_size)
    budget = _budget(config, layout, max_model_len, reasons)
    geometry = geometry_of(layout, budget)
    if check:
        check_budget(layout, geometry, budget, max_model_len, config.max_num_batched_tokens)
    return Settings(dtype, dtypes, max_model_len, budget, layout, geometry, reasons)


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags as Linux lists them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def available_memory() -> int:
    """Bytes that can be taken without swapping; 4 GiB where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 1024**3


def _dtype(setting: DTypeSetting, spec: ModelSpec, reasons: dict[str, str]) -> DType:
    if setting != "auto":
        reasons["dtype"] = "asked for"
        return setting
    if spec.dtype in ("bfloat16", "float16") and not cpu_flags().intersection(_FAST_BF16):
        lacks = ", ".join(_FAST_BF16)
        reasons["dtype"] = f"the checkpoint is {spec.dtype}, but this CPU has none of {lacks}: float32 is faster"
        return "float32"
    reasons["dtype"] = "as the checkpoint declares"
    return spec.dtype


def _or(name: str, setting: DTypeSetting, default: DType, why: str, reasons: dict[str, str]) -> DType:
    reasons[name] = why if setting == "auto" else "asked for"
    return default if setting == "auto" else setting


def _recurrent(config: EngineConfig, spec: ModelSpec, dtype: DType, reasons: dict[str, str]) -> DType:
    """The family's own dtype, or the activations' where that is wider: a state is never narrower by default."""
    wider = DTYPE_BYTES[dtype] > DTYPE_BYTES[spec.recurrent_dtype]
    default = dtype if wider else spec.recurrent_dtype
    why = "the activations' dtype" if wider else f"what {spec.family} asks for"
    return _or("mamba_ssm_cache_dtype", config.mamba_ssm_cache_dtype, default, why, reasons)


def _length(config: EngineConfig, spec: ModelSpec, reasons: dict[str, str]) -> int:
    limit = spec.max_position_embeddings
    if config.max_model_len is None:
        reasons["max_model_len"] = "the model's max_position_embeddings"
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings={limit}", field="max_model_len"
        )
    reasons["max_model_len"] = "asked for"
    return config.max_model_len


def _budget(config: EngineConfig, layout: Layout, max_model_len: int, reasons: dict[str, str]) -> int:
    if config.kv_cache_memory_bytes is not None:
        reasons["kv_cache_memory_bytes"] = "asked for"
        return config.kv_cache_memory_bytes
    quarter = available_memory() // 4
    sequence = layout.state_stride + layout.blocks_at_once([max_model_len], config.max_num_batched_tokens) * layout.block_stride
    enough = _SPARE_SEQUENCES * config.max_num_seqs * sequence * 102 // 100
    reasons["kv_cache_memory_bytes"] = (
        "a quarter of the free memory"
        if quarter <= enough
        else f"{_SPARE_SEQUENCES} x max_num_seqs sequences of the longest length"
    )
    return min(quarter, enough)
