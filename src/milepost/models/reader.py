"""Reads a `config.json` field by field: in comes a mapping, out come checked values and one list of complaints.

The law kept here: every key of the file is either asked for, or known to be without effect, or named in the refusal.
A complaint says which field, what was found and what would work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError, UnsupportedModel

_SHOWN = 10


def read_json(path: Path) -> dict[str, Any]:
    """Load a JSON object from a file. Raises ConfigError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} doesn't exist; a checkpoint directory has config.json and safetensors") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def refuse(problems: list[str], fields: list[str]) -> None:
    """Raise one UnsupportedModel over all complaints (ten are spelled out), if there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UnsupportedModel("; ".join(problems[:_SHOWN]) + more, field=fields[0])


class ConfigReader:
    """Typed reads from a config; complaints are collected and raised together by `finish`.

    After a complaint the read returns its default, so that one pass names every field that can't work.
    `aliases` maps an older name to the present one; both may stand in a file if they agree.
    """

    def __init__(self, config: Mapping[str, Any], *, family: str, aliases: Mapping[str, str]) -> None:
        self._config: dict[str, Any] = {}
        self._family = family
        self._used: set[str] = set()
        self._problems: list[str] = []
        self._fields: list[str] = []
        for name, value in config.items():
            self._merge(aliases.get(name, name), name, value, config)

    def _merge(self, name: str, spelled: str, value: Any, config: Mapping[str, Any]) -> None:
        held = self._config.get(name)
        if held is None:
            self._config[name] = value
        elif value is not None and not _same(held, value):
            self.complain(spelled, f"{spelled}={value!r} disagrees with {name}={config.get(name, held)!r}")

    def complain(self, field: str, message: str) -> None:
        """Note a reason why this config can't be served; `finish` raises."""
        self._fields.append(field)
        self._problems.append(message)

    def present(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._config

    def has(self, name: str) -> bool:
        """Whether the field is there and not null. A null one that is asked for is known, and counts as used."""
        if self._config.get(name) is None:
            self._used.add(name)
        return self._config.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands in the file; None if it is missing. Counts as used."""
        self._used.add(name)
        return self._config.get(name)

    def integer(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number of at least `least`; missing or null: the default."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.complain(name, f"{name}={value!r} is not an integer")
            return default
        if value < least:
            self.complain(name, f"{name}={value} is less than {least}")
            return default
        return value

    def number(self, name: str, default: float, *, above: float = 0.0) -> float:
        """A finite number greater than `above`; missing or null: the default."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.complain(name, f"{name}={value!r} is not a number")
            return default
        if not math.isfinite(value) or value <= above:
            self.complain(name, f"{name}={value!r} must be finite and greater than {above:g}")
            return default
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; missing or null: the default."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.complain(name, f"{name}={value!r} is not true or false")
            return default
        return value

    def choice(self, name: str, default: str, allowed: Collection[str]) -> str:
        """One of the allowed strings; missing or null: the default."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            self.complain(name, f"{name}={value!r} is not supported (supported: {', '.join(sorted(allowed))})")
            return default
        return value

    def limits(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """A pair low < high, low >= 0, where high may be infinity in any of its spellings."""
        value = self.raw(name)
        if value is None:
            return default
        pair = [extended_float(item) for item in value] if isinstance(value, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None or not 0.0 <= pair[0] < pair[1]:
            self.complain(name, f"{name}={value!r} is not a pair [low, high] with 0 <= low < high")
            return default
        return pair[0], pair[1]

    def unless(self, name: str, works: Callable[[Any], bool], why: str) -> None:
        """Refuse a field whose value isn't one that works; a missing or null field works."""
        value = self.raw(name)
        if value is not None and not works(value):
            self.complain(name, f"{name}={value!r} is not supported: {why}")

    def finish(self, without_effect: Collection[str]) -> None:
        """Raise UnsupportedModel naming every complaint and every key that is neither used nor without effect."""
        for name in self._config:
            if name not in self._used and name not in without_effect:
                self.complain(name, f"{name} is a key that the parser of {self._family} doesn't know")
        refuse(self._problems, self._fields)


def extended_float(value: Any) -> float | None:
    """A float from a number, from "Infinity" or "inf", or from transformers' {"__float__": "Infinity"}; else None."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


_ATTRIBUTES = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation_internal _name_or_path
    architectures attn_implementation auto_map chunk_size_feed_forward cross_attention_hidden_size
    custom_pipelines decoder_start_token_id experts_implementation finetuning_task id2label is_decoder label2id
    model_type name_or_path num_labels output_attentions output_hidden_states output_router_logits pad_token_id
    prefix problem_type return_dict sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder
    tie_last_hidden_states tokenizer_class torchscript transformers_version use_bfloat16 use_cache

    begin_suppress_tokens bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """

ATTRIBUTES_WITHOUT_EFFECT = frozenset(_ATTRIBUTES.split())
"""What any config of transformers may carry and what doesn't change a causal model's forward pass."""
