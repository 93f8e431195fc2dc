"""From a configuration to the parts of an engine. In: settings and a checkpoint's directory. Out: store, scheduler, runner.

The law kept here: everything that can be refused without a weight is refused before one is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from milepost.config import EngineConfig
from milepost.embedded import resolve_model
from milepost.engine.runner import Runner
from milepost.engine.scheduler import Scheduler
from milepost.engine.settings import Settings, settle
from milepost.errors import ConfigError
from milepost.kernels.select import Choice, Operation, select
from milepost.models.loading import load_model
from milepost.models.registry import family_of, load_spec
from milepost.models.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DType,
    GatedDeltaSpec,
    KdaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    ModelSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from milepost.models.weights import weights_identity
from milepost.state.pools import TORCH_DTYPES, Pools
from milepost.state.retention import Costs
from milepost.state.store import StateStore

_CONVOLUTION: Operation = "convolution"
"""What every recurrent mixer needs beside its scan."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    spec: ModelSpec
    settings: Settings
    store: StateStore
    scheduler: Scheduler
    runner: Runner
    eos: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer."""
        return self.settings.max_model_len


def assemble(config: EngineConfig, *, progress: Callable[[int, int], None] | None = None) -> Parts:
    """Build all parts. Raises ConfigError, UnsupportedModel."""
    path = resolve_model(config.model)
    spec = load_spec(path)
    settings = settle(config, spec)
    recurrent, attention = choices(config, spec, settings)
    identity = f"{weights_identity(path)}:{settings.dtype}"
    model = load_model(
        path,
        spec,
        dtype=TORCH_DTYPES[settings.dtype],
        recurrent=recurrent.backend,
        attention=attention.backend,
        progress=progress,
    )
    pools = Pools(settings.layout, settings.geometry, len(spec.layers), poison=config.poison_freed_memory)
    store = StateStore(
        settings.layout,
        settings.geometry,
        pools,
        model_identity=identity,
        costs=costs_of(spec),
        caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        store,
        max_running=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        interval=config.prefix_cache_retention_interval,
    )
    return Parts(spec, settings, store, scheduler, Runner(model, pools, store.arena), end_tokens(path, spec))


def end_tokens(path: Path, spec: ModelSpec) -> tuple[int, ...]:
    """Ids that end an answer: those of config.json and of generation_config.json, where chat models list their end of turn.

    Raises ConfigError if the file is there and can't be read as such.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return spec.eos_token_ids
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}", field="model") from error
    more = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and 0 <= token < spec.vocab_size for token in more):
        raise ConfigError(f"{file}: eos_token_id={found!r} must be ids from 0 to {spec.vocab_size - 1}", field="model")
    return tuple(dict.fromkeys([*spec.eos_token_ids, *more]))


def choices(config: EngineConfig, spec: ModelSpec, settings: Settings) -> tuple[Choice, Choice]:
    """The backends for recurrent layers and for attention, with reasons. Raises ConfigError where none can do it."""
    dtypes = settings.dtypes
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    recurrent = [_needs(mixer) for mixer in mixers if isinstance(mixer, RecurrentSpec)]
    attending = [_attends(mixer) for mixer in mixers if isinstance(mixer, AnyAttentionSpec)]
    operation, head_dim, state_size = (recurrent or [_needs(None)])[0]
    attention, kv_head_dim = (attending or [_attends(None)])[0]
    state = dtypes.window if operation == "convolution" else dtypes.recurrent
    beside = frozenset(need[0] for need in recurrent) | (frozenset({_CONVOLUTION}) if recurrent else frozenset())
    also = frozenset(need[0] for need in attending)
    return (
        _choose(operation, "mamba_backend", config.mamba_backend, settings, state, head_dim, state_size, beside),
        _choose(attention, "attention_backend", config.attention_backend, settings, dtypes.kv, kv_head_dim, None, also),
    )


def _attends(mixer: AnyAttentionSpec | None) -> tuple[Operation, int]:
    """The operation that an attention mixer runs on, and the channels in which a query meets what is stored."""
    match mixer:
        case AttentionSpec():
            return "attention", mixer.head_dim
        case LatentAttentionSpec():
            return "latent_attention", mixer.kv_elements_per_token
        case None:
            return "attention", 0


def _needs(mixer: RecurrentSpec | None) -> tuple[Operation, int | None, int | None]:
    """The operation that a recurrent mixer runs on, its head dim and its state size; convolution stands beside each."""
    match mixer:
        case Mamba2Spec():
            return "mamba2", mixer.head_dim, mixer.state_size
        case Mamba1Spec():
            return "mamba1", None, mixer.state_size
        case GatedDeltaSpec():
            return "gated_delta", mixer.value_dim, mixer.key_dim
        case KdaSpec():
            return "kda", mixer.value_dim, mixer.key_dim
        case RgLruSpec():
            return "rglru", None, None
        case ShortConvSpec():
            return "convolution", None, None
        case None:
            return "mamba2", 0, None


def _choose(
    operation: Operation,
    field: str,
    name: str,
    settings: Settings,
    state: DType,
    head_dim: int | None,
    state_size: int | None,
    beside: frozenset[Operation],
) -> Choice:
    try:
        return select(
            operation,
            name,
            device=torch.device("cpu"),
            dtype=TORCH_DTYPES[settings.dtype],
            state_dtype=TORCH_DTYPES[state],
            state_size=state_size,
            head_dim=head_dim,
            beside=beside,
        )
    except ValueError as error:
        raise ConfigError(f"{field}={name}: {error}", field=field) from error


def costs_of(spec: ModelSpec) -> Costs:
    """Multiply-adds of a forward pass: one per weight and token, and q k^T and the sum over v per token of context."""
    weights = sum(math.prod(weight.shape) for weight in family_of(spec).weights(spec))
    pairs = sum(layer.attention.products_per_pair for layer in spec.attention_layers if layer.attention)
    return Costs(float(weights), float(pairs))
