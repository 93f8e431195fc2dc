"""Safetensors on disk: names and shapes from the headers, checked before a byte of data is read; then the tensors.

The law kept here: a checkpoint is used only if its tensors are exactly those that the model names, with their shapes,
in files as long as their headers say. Importing this file doesn't import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import ConfigError
from milepost.models.reader import read_json, refuse
from milepost.models.spec import WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PAGE = 4096
_SAMPLED_PAGES = 16
_WHOLE = 64 * 1024
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor stands: its file, its dtype as safetensors writes it, its shape, and its bytes [begin, end)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, from `model.safetensors` or from the shards of its index.

    Raises ConfigError naming the file if one is missing, cut short or not safetensors, or if shards and index disagree.
    """
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ConfigError(f"{path} has neither model.safetensors nor model.safetensors.index.json", field="model")
        return _read_header(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_plain_file(name) for name in weight_map.values()):
        raise ConfigError(f"{index} has no weight_map from tensors to files in its directory", field="model")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        for tensor in _read_header(path / name).values():
            if weight_map.get(tensor.name) != name:
                raise ConfigError(f"{path / name} holds {tensor.name}, which {index.name} doesn't place there")
            tensors[tensor.name] = tensor
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise ConfigError(f"{index} names tensors that its files don't hold: {', '.join(absent[:10])}")
    return tensors


def _plain_file(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Parse a file's header and check that the file is as long as the header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ConfigError(f"{file} is not a safetensors file, or is cut short ({size} bytes)")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} has a header that is not JSON: {error}") from error
    try:
        tensors = {name: _stored(name, file, entry, 8 + length) for name, entry in header.items() if name[:2] != "__"}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} has a header that can't be read: {error!r}") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise ConfigError(f"{file} is corrupt: {size} bytes, but its header describes {end}")
    return tensors


def _stored(name: str, file: Path, entry: Mapping[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    tensor = StoredTensor(name, file, str(entry["dtype"]), shape, base + int(begin), base + int(end))
    width = _FLOATS.get(tensor.dtype)
    count = 1
    for size in shape:
        count *= size
    if begin < 0 or begin > end or (width is not None and end - begin != count * width):
        raise ValueError(f"{name}: {end - begin} bytes for shape {list(shape)} of {tensor.dtype}")
    return tensor


def match_weights(
    stored: Mapping[str, StoredTensor], wanted: tuple[WeightSpec, ...], canonical: Callable[[str], str | None]
) -> dict[str, StoredTensor]:
    """Pair the model's names, or those of a tensor's parts where it is stored in parts, with the checkpoint's tensors.

    Raises UnsupportedModel naming up to ten each of the tensors that are missing, extra, misshapen or not floats.
    """
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for tensor in stored.values():
        name = canonical(tensor.name)
        if name is None:
            continue
        if name in found:
            problems.append(f"{tensor.name} and {found[name].name} are the same tensor")
        found[name] = tensor
    specs = {spec.name: spec for whole in wanted for spec in _as_stored(whole, found)}
    missing = [name for name, spec in specs.items() if name not in found and not spec.optional]
    extra = [tensor.name for name, tensor in found.items() if name not in specs]
    shapes = [
        f"{found[name].name} {list(found[name].shape)} instead of {list(spec.shape)}"
        for name, spec in specs.items()
        if name in found and found[name].shape != spec.shape
    ]
    dtypes = [f"{tensor.name} ({tensor.dtype})" for tensor in found.values() if tensor.dtype not in _FLOATS]
    for title, names in (
        ("missing tensors", missing),
        ("tensors that the model doesn't use", extra),
        ("tensors of the wrong shape", shapes),
        ("tensors that aren't floats of 16 bits or more", dtypes),
    ):
        if names:
            problems.append(f"{len(names)} {title}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    refuse(problems, ["model"] * len(problems))
    return {name: found[name] for name in specs if name in found}


def _as_stored(spec: WeightSpec, found: Mapping[str, StoredTensor]) -> tuple[WeightSpec, ...]:
    """A tensor as the checkpoint holds it: whole, or its parts one by one."""
    if not spec.parts or spec.name in found:
        return (spec,)
    return tuple(replace(spec, name=part, shape=spec.shape_of_part, parts=(), part_shape=()) for part in spec.parts)


def load_weights(
    path: Path,
    wanted: tuple[WeightSpec, ...],
    canonical: Callable[[str], str | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The model's tensors by the model's names, in `dtype` (those that keep precision: fp32, or fp64 in an fp64 run).

    Raises UnsupportedModel if the tensors aren't the wanted ones and ConfigError if a file is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    matched = match_weights(read_headers(path), wanted, canonical)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    keep = {name for spec in wanted if spec.keep_precision for name in (spec.name, *spec.parts)}
    merged = {part: (spec, index) for spec in wanted for index, part in enumerate(spec.parts)}
    files: dict[Path, list[str]] = {}
    for name, tensor in matched.items():
        files.setdefault(tensor.file, []).append(name)
    total, done = sum(tensor.end - tensor.begin for tensor in matched.values()), 0
    loaded: dict[str, Tensor] = {}
    for file, names in files.items():
        try:
            with safe_open(str(file), framework="pt") as source:
                for name in names:
                    value = source.get_tensor(matched[name].name)
                    target = precise if name in keep else dtype
                    if name in merged:
                        whole, index = merged[name]
                        if whole.name not in loaded:
                            loaded[whole.name] = torch.empty(whole.shape, dtype=target, device=device)
                        loaded[whole.name].view(len(whole.parts), *whole.shape_of_part)[index].copy_(value)
                    else:
                        loaded[name] = value.to(device=device, dtype=target).contiguous()
                    done += matched[name].end - matched[name].begin
                    if progress is not None:
                        progress(done, total)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    return loaded


def weights_identity(path: Path) -> str:
    """A digest (hex, 64 digits) that tells checkpoints apart: other weights, dtypes, shapes or configs, other digest.

    SHA-256 over `config.json` (keys sorted, `transformers_version` and the origin's name left out) and, for every
    tensor in order of name: name, dtype, shape and bytes. Tensors of up to 64 KiB are hashed whole; of larger ones,
    16 pages of 4 KiB: the first, the last, and 14 at even distances between. So it costs the same few megabytes
    whatever the model's size, doesn't depend on how the tensors are sharded, and doesn't see an edit that leaves every
    sampled page as it was. Raises ConfigError like `read_headers`.
    """
    config = read_json(path / "config.json")
    for name in ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"):
        config.pop(name, None)
    digest = hashlib.sha256(b"milepost weights 1\n")
    digest.update(json.dumps(config, sort_keys=True).encode())
    files: dict[Path, int] = {}
    try:
        for name, tensor in sorted(read_headers(path).items()):
            digest.update(f"\n{json.dumps(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
            if tensor.file not in files:
                files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            for begin, size in _samples(tensor.begin, tensor.end):
                digest.update(os.pread(files[tensor.file], size, begin))
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return digest.hexdigest()


def _samples(begin: int, end: int) -> list[tuple[int, int]]:
    """(position, length) of the bytes that stand for a tensor."""
    if end - begin <= _WHOLE:
        return [(begin, end - begin)]
    last = end - begin - _PAGE
    return [(begin + last * page // (_SAMPLED_PAGES - 1), _PAGE) for page in range(_SAMPLED_PAGES)]
