"""From a checkpoint directory to a model that can run: spec and backends come in, a `Model` goes out.

The law kept here: names, shapes and file lengths are checked before any weight is read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from milepost.kernels.protocol import KernelBackend
from milepost.models.protocol import Backends, Model
from milepost.models.registry import family_of
from milepost.models.spec import ModelSpec
from milepost.models.weights import Progress, load_weights


def load_model(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    recurrent: KernelBackend,
    attention: KernelBackend,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Model:
    """Read the weights of `path` in `dtype` and build the model over them.

    `recurrent` runs convolutions and scans, `attention` KV and attention; they may be the same object.
    `device` is the CPU by default. Raises UnsupportedModel or ConfigError like `weights.load_weights`.
    """
    family, place = family_of(spec), device or torch.device("cpu")
    weights = load_weights(path, family.weights(spec), family.canonical_name, dtype=dtype, device=place, progress=progress)
    return family.build(spec, weights, Backends(recurrent, attention, place))
