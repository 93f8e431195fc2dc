"""Which backend runs an operation: a name and what is needed come in, a backend and the reasons go out.

The law kept here: a choice is made from declared capabilities, once, before weights load, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milepost.kernels.protocol import Capabilities, KernelBackend, Operation
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend

__all__ = ["Choice", "Operation", "names", "select"]

_BACKENDS: dict[str, type[ReferenceBackend] | type[TorchBackend]] = {
    "torch": TorchBackend,
    "reference": ReferenceBackend,
}
_AUTOMATIC = ("torch",)
"""Backends that `auto` considers, the preferred first; `reference` has to be asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs an operation, and one line for each backend that was looked at."""

    operation: Operation
    name: str
    backend: KernelBackend
    reasons: tuple[str, ...]


def names() -> tuple[str, ...]:
    """What a setting may say."""
    return ("auto", *_BACKENDS)


def select(
    operation: Operation,
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    state_size: int | None,
    head_dim: int | None,
    beside: frozenset[Operation] = frozenset(),
) -> Choice:
    """Pick the backend called `name`, or for `auto` the first that can do it, and what the same layers need `beside` it.

    `state_dtype` is the pool's dtype: of the recurrent state, or of KV for attention. `state_size` and `head_dim` are None
    where an operation has none. Raises ValueError, naming what is supported, for an unknown name or if no backend can.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(f"backend {name!r} for {operation} is unknown (known: {', '.join(names())})")
    reasons: list[str] = []
    for candidate in _AUTOMATIC if name == "auto" else (name,):
        backend = _BACKENDS[candidate]()
        lacks = _lacks(backend.capabilities, operation, device, dtype, state_dtype, state_size, head_dim)
        lacks += _missing(backend.capabilities, beside - {operation})
        if not lacks:
            asked = "asked for by name" if name != "auto" else "first that supports this model"
            reasons.append(f"{candidate}: chosen, {asked}{_notes(backend.capabilities)}")
            return Choice(operation, candidate, backend, tuple(reasons))
        reasons.append(f"{candidate}: refused, {'; '.join(lacks)}")
    raise ValueError(f"no backend for {operation}: {' | '.join(reasons)}")


def _lacks(
    can: Capabilities,
    operation: Operation,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    state_size: int | None,
    head_dim: int | None,
) -> list[str]:
    """Why a backend can't do it; empty if it can."""
    wanted = (
        ("operation", operation, tuple(sorted(can.operations))),
        ("device", device.type, can.devices),
        ("dtype", _short(dtype), tuple(_short(each) for each in can.dtypes)),
        ("state dtype", _short(state_dtype), tuple(_short(each) for each in can.state_dtypes)),
        ("state size", state_size, can.state_sizes),
        ("head dim", head_dim, can.head_dims),
    )
    lacks = [
        f"{what} {value} is not supported (supported: {', '.join(map(str, supported))})"
        for what, value, supported in wanted
        if supported is not None and value is not None and value not in supported
    ]
    for what, able in (("ragged runs", can.ragged), ("initial states", can.initial_state), ("captures", can.captures)):
        if not able:
            lacks.append(f"it has no {what}")
    return lacks


def _missing(can: Capabilities, beside: frozenset[Operation]) -> list[str]:
    return [f"operation {operation}, which is needed too, is not supported" for operation in sorted(beside - can.operations)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(can: Capabilities) -> str:
    return f" ({'; '.join(can.notes)})" if can.notes else ""
