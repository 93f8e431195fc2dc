"""Devices, links and tiers with their limits. In: a name, or a TOML file in the same form. Out: numbers for the roofline.

The law kept here: a limit names its source; a file that lacks a key, or has one that isn't known, is refused by that key.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError
from milepost.models.spec import DType

_FILE = Path(__file__).parent / "devices.toml"


@dataclass(frozen=True, slots=True)
class Device:
    """`flops` by dtype: dense operations a second."""

    name: str
    title: str
    source: str
    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float]

    def peak(self, dtype: str) -> float:
        """Operations a second in a dtype. Raises ConfigError if the device lists none."""
        if dtype not in self.flops:
            listed = ", ".join(self.flops)
            raise ConfigError(f"device {self.name!r} lists no flops for {dtype} (it lists: {listed})", field="device")
        return self.flops[dtype]


    def compute_dtype(self, stored: DType) -> DType:
        """The dtype that a model stored in `stored` is computed in: that one, or float32 where the device is faster in it."""
        return "float32" if self.flops.get("float32", 0.0) > self.flops.get(stored, 0.0) else stored


@dataclass(frozen=True, slots=True)
class Way:
    """A way for bytes: a link between machines, or to a tier."""

    name: str
    title: str
    bytes_per_s: float
    latency_s: float

    def seconds(self, size: float) -> float:
        """Time for so many bytes to arrive."""
        return self.latency_s + size / self.bytes_per_s


def device(name: str) -> Device:
    """A device by its name, or from a TOML file with one `[device.NAME]`. Raises ConfigError naming what is wrong."""
    if name.endswith(".toml"):
        found = _table(Path(name), "device")
        if len(found) != 1:
            raise ConfigError(f"device={name!r} must hold one [device.NAME], it holds {len(found)}", field="device")
        return _device(name, *next(iter(found.items())))
    known = _table(_FILE, "device")
    if name not in known:
        raise ConfigError(f"device={name!r} is unknown (known: {', '.join(known)}, or a .toml file)", field="device")
    return _device(str(_FILE), name, known[name])


def devices() -> tuple[Device, ...]:
    """All that are known."""
    return tuple(device(name) for name in _table(_FILE, "device"))


@cache
def links() -> tuple[Way, ...]:
    """Links between machines."""
    return _paths("link")


@cache
def tiers() -> tuple[Way, ...]:
    """Places where checkpoints may wait."""
    return _paths("tier")


def _paths(kind: str) -> tuple[Way, ...]:
    found = _table(_FILE, kind)
    return tuple(Way(name, e["title"], float(e["bytes_per_s"]), float(e["latency_s"])) for name, e in found.items())


def _table(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"device={str(path)!r} can't be read: {error.strerror}", field="device") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", field="device") from error
    table = content.get(kind, {})
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ConfigError(f"{path}: [{kind}] must hold tables", field="device")
    return table


def _device(place: str, name: str, entry: Mapping[str, Any]) -> Device:
    numbers, texts = ("memory_bytes", "bytes_per_s"), ("title", "source")
    unknown = sorted(set(entry) - {*numbers, *texts, "flops"})
    if unknown:
        raise ConfigError(f"{place}: device.{name} has unknown keys {', '.join(unknown)}", field="device")
    for key in numbers:
        value = entry.get(key)
        if not _above_zero(value):
            raise ConfigError(f"{place}: device.{name}.{key} must be a number above 0, it is {value!r}", field="device")
    flops = entry.get("flops")
    if not isinstance(flops, dict) or not flops or not all(map(_above_zero, flops.values())):
        raise ConfigError(f"{place}: device.{name}.flops must map dtypes to numbers above 0", field="device")
    title, source = (str(entry.get(key, name)) for key in texts)
    return Device(name, title, source, float(entry["memory_bytes"]), float(entry["bytes_per_s"]), dict(flops))


def _above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
