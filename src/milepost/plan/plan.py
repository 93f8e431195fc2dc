"""One model's memory and limits before a weight is loaded. In: a config, and what to set it beside. Out: a `Plan`.

The law kept here: planned = allocated (law 9), and say why (law 10): sizes come from the layout that the pools are built from,
and everything that start-up would refuse is listed at once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost.config import EngineConfig
from milepost.embedded import EMBEDDED, resolve_model
from milepost.engine.settings import Settings, settle
from milepost.errors import ConfigError, UnsupportedModel
from milepost.models.reader import read_json
from milepost.models.registry import parse_config, sized_only
from milepost.models.sharding import shard_of
from milepost.models.spec import DTYPE_BYTES, DType, ModelSpec
from milepost.plan import builtin
from milepost.plan.advice import Advice, Workload, advise
from milepost.plan.capacity import Capacity, capacity_of
from milepost.plan.crossovers import Crossovers, crossovers_of
from milepost.plan.devices import Device
from milepost.plan.files import look, tried
from milepost.plan.memory import Memory, memory_of
from milepost.plan.peers import SglangPlan, VllmPlan, plan_sglang, plan_vllm
from milepost.plan.roofline import Speed, balanced_batch, speed_of
from milepost.plan.sizes import LayerSizes, Sizes, layers_of, sizes_of
from milepost.plan.weights import Weights, weights_of
from milepost.state.codecs import CODECS, encoded_layout
from milepost.state.geometry import Geometry, geometry_of

CHUNK_KEYS = ("mamba_chunk_size", "chunk_size")
_OTHER_ORIGINS = {"dtypes": "asked", "draft_bytes_per_sequence": "assumed"}
"""Drafted tokens are verified from a copy of the state before them: one more state for a running sequence."""
MEMORY_SHARE = 0.9
"""Of a device's memory, what weights and caches may take."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan for. `memory_bytes`: for weights and caches together, of one rank."""

    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    ranks: int = 1
    draft_tokens: int = 0
    memory_bytes: int | None = None
    versus: str | None = None
    device: Device | None = None
    workload: Workload | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found. `spec` and all that follows are of one tensor-parallel rank; no `refusals`: it would start."""

    model: str
    question: Question
    whole: ModelSpec
    spec: ModelSpec
    settings: Settings
    sizes: Sizes
    layers: tuple[LayerSizes, ...]
    memory: Memory
    baseline: tuple[str, Memory] | None
    checkpoint_bytes: dict[str, int]
    weights: Weights | None
    computed: Weights | None
    """As the device computes with them: in float32 where it is faster in that."""
    crossovers: Crossovers
    capacity: Capacity
    vllm: VllmPlan
    sglang: SglangPlan
    speed: Speed | None
    advice: Advice | None
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def state_equals_weights_batch(self) -> float | None:
        """The batch whose states take as many bytes to read and write in a decode step as the weights it touches."""
        return None if self.weights is None else balanced_batch(self.weights, self.memory)

    def to_json(self) -> dict[str, object]:
        """The keys of `doctor` for sizes, and the plan's own."""
        return {
            "model": self.model,
            "family": self.whole.family,
            "tensor_parallel_size": self.question.ranks,
            **self.sizes.to_json(),
            "origins": {**dict.fromkeys(self.sizes.to_json(), "shapes"), **_OTHER_ORIGINS},
            "layers": [each.to_json() for each in self.layers],
            "checkpoint_bytes": self.checkpoint_bytes,
            "draft_bytes_per_sequence": self.sizes.state_bytes_per_sequence if self.question.draft_tokens else 0,
            "weights": None if self.weights is None else self.weights.to_json(),
            "state_equals_weights_batch": self.state_equals_weights_batch,
            "crossovers": self.crossovers.to_json(),
            "capacity": self.capacity.to_json(),
            "engines": {"vllm": self.vllm.to_json(), "sglang": self.sglang.to_json()},
            "speed": None if self.speed is None else self.speed.to_json(),
            "advice": None if self.advice is None else self.advice.to_json(),
            "reasons": dict(self.settings.reasons),
            "notes": list(self.notes),
            "refusals": list(self.refusals),
        }


def make_plan(config: EngineConfig, question: Question) -> Plan:
    """Plan for one model. Raises ConfigError or UnsupportedModel if its config can't be read, or can't be split so."""
    raw, directory = read_model(config.model)
    notes: list[str] = []
    refusals: list[str] = []
    whole = _parse(raw, refusals)
    spec = shard_of(whole, question.ranks)
    settings = settle(config, spec, check=False)
    stored = directory if question.ranks == 1 else None  # headers tell the whole checkpoint's size, not a rank's
    weights = weights_of(spec, whole.dtype, stored) if "vocab_size" in raw else None
    budget = _budget(config, question, settings, weights)
    _examine(config, question, raw, directory, whole, spec, budget, notes, refusals)
    if weights is None:
        notes.append("weights aren't counted: the model is only sized, or its config leaves out what doesn't bear on memory")
    contexts = tuple(tokens for tokens in question.contexts if tokens <= settings.max_model_len)
    if contexts != question.contexts:
        notes.append(f"capacity and speed are told up to the model's limit of {settings.max_model_len:,} tokens")
    contexts = contexts or (settings.max_model_len,)
    layout, memory, geometry = settings.layout, memory_of(spec, settings.layout), geometry_of(settings.layout, budget)
    versus = None if question.versus is None else _baseline(question.versus)
    other = None if versus is None else (versus[0], versus[1], versus[2].dtypes)
    chunk = next((raw[key] for key in CHUNK_KEYS if isinstance(raw.get(key), int)), None)
    peers: dict[str, Any] = {"max_model_len": settings.max_model_len, "memory_bytes": budget, "chunk_tokens": chunk}
    step, drafts = config.max_num_batched_tokens, question.draft_tokens
    computed, speed = _speed(question, spec, settings, memory, weights, whole.dtype, contexts)
    return Plan(
        model=config.model,
        question=question,
        whole=whole,
        spec=spec,
        settings=settings,
        sizes=sizes_of(spec, settings),
        layers=layers_of(spec, layout),
        memory=memory,
        baseline=None if versus is None else (versus[0], memory_of(versus[1], versus[2].layout)),
        checkpoint_bytes={codec: encoded_layout(layout, codec).nbytes for codec in CODECS},
        weights=weights,
        computed=computed,
        crossovers=crossovers_of(spec, settings.dtypes, other, question.contexts),
        capacity=capacity_of(layout, geometry, budget, contexts=contexts, max_num_seqs=config.max_num_seqs, step=step),
        vllm=plan_vllm(spec, settings.dtypes, max_num_seqs=config.max_num_seqs, draft_tokens=drafts, **peers),
        sglang=plan_sglang(spec, settings.dtypes, draft_tokens=drafts, **peers),
        speed=speed,
        advice=_advice(question, spec, settings, geometry, memory, computed, speed, contexts, step),
        notes=tuple(notes),
        refusals=tuple(refusals),
    )


def _examine(
    config: EngineConfig,
    question: Question,
    raw: dict[str, Any],
    directory: Path | None,
    whole: ModelSpec,
    spec: ModelSpec,
    budget: int,
    notes: list[str],
    refusals: list[str],
) -> None:
    """Note what isn't said or counted, and everything that start-up would refuse."""
    only = sized_only(whole)
    if only is not None:
        refusals.append(f"architecture {whole.architecture} can be sized but not served")
        notes.append(f"not counted: {only.uncounted}")
    if question.ranks > 1:
        refusals.append(f"tensor_parallel_size={question.ranks}: one rank is served so far; sizes are those of each rank")
    if "max_position_embeddings" not in raw and "text_config" not in raw:
        limit = f"{whole.max_position_embeddings:,} tokens, the family's default"
        notes.append(f"the config doesn't say how long a sequence may be: {limit}, are taken")
    tried(lambda: settle(replace(config, kv_cache_memory_bytes=budget), spec), refusals)
    if directory is not None and only is None:
        notes += look(directory, whole, config, refusals)


def _speed(
    question: Question,
    spec: ModelSpec,
    settings: Settings,
    memory: Memory,
    weights: Weights | None,
    stored: DType,
    contexts: tuple[int, ...],
) -> tuple[Weights | None, Speed | None]:
    """The weights as the device computes with them, and the limits; the longest length but one is decoded at."""
    place = question.device
    if place is None or weights is None:
        return weights, None
    dtype = place.compute_dtype(stored)
    computed = replace(weights, bytes_each=DTYPE_BYTES[dtype])
    return computed, speed_of(spec, settings.layout, memory, computed, place, dtype, contexts[len(contexts) // 2])


def _advice(
    question: Question,
    spec: ModelSpec,
    settings: Settings,
    geometry: Geometry,
    memory: Memory,
    weights: Weights | None,
    speed: Speed | None,
    contexts: tuple[int, ...],
    step: int,
) -> Advice | None:
    if question.workload is None:
        return None
    return advise(
        spec,
        settings.layout,
        geometry,
        memory,
        weights,
        question.device,
        question.workload,
        dtype=spec.dtype if speed is None else speed.dtype,
        longest=settings.max_model_len,
        step=step,
        contexts=contexts,
    )


def read_model(name: str) -> tuple[dict[str, Any], Path | None]:
    """The config of a model, and the directory that may hold its weights; `name`: directory, config.json, or built-in name."""
    path = Path(name).expanduser()
    if path.is_file():
        return read_json(path), path.parent if path.name == "config.json" else None
    if path.is_dir() or name in EMBEDDED:
        directory = resolve_model(name)
        return read_json(directory / "config.json"), directory
    return read_json(builtin.path_of(name)), None


def _parse(raw: dict[str, Any], refusals: list[str]) -> ModelSpec:
    """A spec, from a nested `text_config` too: its memory is the text part's, though serving refuses the whole."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return parse_config(raw, sized=True)
    try:
        parse_config(raw)
    except UnsupportedModel as error:
        refusals.append(str(error))
    return parse_config({"torch_dtype": raw.get("torch_dtype", raw.get("dtype")), **text}, sized=True)


def _baseline(name: str) -> tuple[str, ModelSpec, Settings]:
    spec = _parse(read_model(name)[0], [])
    return name, spec, settle(EngineConfig(model=name), spec, check=False)


def _budget(config: EngineConfig, question: Question, settings: Settings, weights: Weights | None) -> int:
    """Bytes for states and KV. Raises ConfigError if the weights leave none."""
    if config.kv_cache_memory_bytes is not None or (question.memory_bytes is None and question.device is None):
        return settings.budget_bytes
    memory = question.memory_bytes
    if memory is None and question.device is not None:
        memory = int(question.device.memory_bytes * MEMORY_SHARE)
    held = 0 if weights is None else weights.total_bytes
    left = (memory or 0) - held
    if left <= 0:
        raise ConfigError(f"memory={memory}: the weights alone take {held} bytes; give more ranks or memory", field="memory")
    return left
