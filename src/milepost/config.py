"""Settings of the engine and of the server, frozen. The command line is derived from these fields.

The law kept here: one definition per setting (name, default, help), under the name that vLLM's users know.
A setting that can't work is refused here or at start-up, by name, before a weight is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from milepost.errors import ConfigError

DTypeSetting = Literal["auto", "float32", "bfloat16", "float16", "float64"]
SchedulingPolicy = Literal["fcfs", "priority"]


def setting(default: Any, help: str, *, size: Literal["count", "bytes"] | None = None) -> Any:
    """A dataclass field with its help; `size` lets the command line read `8k` or `4GiB`."""
    return field(default=default, metadata={"help": help, "size": size})


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs one model."""

    model: str = setting("clerk", "directory of a checkpoint in Hugging Face layout, or `clerk` for the embedded model")
    tokenizer: str | None = setting(None, "directory with tokenizer.json, if it isn't the model's")
    chat_template: str | None = setting(None, "file with a jinja2 chat template to use instead of the model's")
    served_model_name: str | None = setting(None, "name that clients use; default: the directory's name")
    dtype: DTypeSetting = setting(
        "auto", "dtype of weights and activations; auto: as stored, float32 where the CPU has no fast bf16"
    )
    seed: int = setting(0, "seed for requests that bring none")
    max_model_len: int | None = setting(None, "longest sequence, prompt and answer; default: the model's limit", size="count")
    max_num_seqs: int = setting(16, "most sequences that run at once; one live slot each")
    max_num_batched_tokens: int = setting(2048, "token budget of one step", size="count")
    enable_prefix_caching: bool = setting(True, "keep checkpoints and resume from them")
    block_size: int = setting(16, "tokens per block of KV")
    kv_cache_memory_bytes: int | None = setting(
        None, "the arena: one budget for slots, checkpoints and blocks; default: a quarter of free memory", size="bytes"
    )
    kv_cache_dtype: DTypeSetting = setting("auto", "dtype of KV; auto: as the checkpoint, or --dtype where given")
    mamba_cache_dtype: DTypeSetting = setting("auto", "dtype of the convolution window; auto: as KV")
    mamba_ssm_cache_dtype: DTypeSetting = setting("auto", "dtype of the recurrent matrix; auto: float32 for Nemotron-H")
    mamba_backend: str = setting("auto", "kernel backend for recurrent layers: auto, torch, reference")
    attention_backend: str = setting("auto", "kernel backend for attention: auto, torch, reference")
    prefix_cache_retention_interval: int | None = setting(
        None, "also checkpoint every so many prompt tokens; bounds the worst replay", size="count"
    )
    scheduling_policy: SchedulingPolicy = setting("fcfs", "who is admitted first: fcfs, or priority (lower first)")
    max_num_queued_reqs: int | None = setting(None, "most requests that wait; more are refused with 503; default: no limit")
    poison_freed_memory: bool = setting(False, "fill freed memory with NaN, to find readers of stale state (slow; for tests)")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory_bytes", "prefix_cache_retention_interval", "max_num_queued_reqs"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(
                f"scheduling_policy={self.scheduling_policy!r} is unknown (known: fcfs, priority)", field="scheduling_policy"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "a step must be able to decode every running sequence",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and whom it lets in."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = setting(None, "require `Authorization: Bearer KEY`; default: the environment's MILEPOST_API_KEY")
    log_interval: float = setting(10.0, "seconds between throughput lines in the log; 0: none")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}", field=name)


_UNITS = {
    "": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
    "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4,
}  # fmt: skip


def parse_size(text: str, name: str, kind: Literal["count", "bytes"]) -> int:
    """Read `4096`, `8k` (8,000), `8Ki` (8,192), `4GiB`, `1.5GB`. Raises ConfigError that names the setting.

    As with vLLM, a lower-case suffix is decimal (8k = 8,000) and an upper-case K, M, G on a count is binary (8K = 8,192).
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?i?)([bB]?)", text.strip())
    if match is None or (match[3] and kind == "count"):
        raise ConfigError(f"{name}={text!r} is not a size; write 4096, 8k or 4GiB", field=name)
    unit = match[2]
    if kind == "count" and unit in ("K", "M", "G", "T"):
        unit += "i"
    value = float(match[1]) * _UNITS[unit.lower()]
    if value != int(value):
        raise ConfigError(f"{name}={text!r} is not a whole number", field=name)
    return int(value)
