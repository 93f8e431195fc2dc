"""Every error that Milepost raises on purpose, as one tree.

    MilepostError
    ├── ConfigError            a setting can't work; says which, what was found, what would work
    │   └── UnsupportedModel   a checkpoint asks for something that no code here does; names the fields
    ├── RequestError           a request is wrong (HTTP 400); names the parameter
    │   └── UnknownModel       a request names a model that isn't served (HTTP 404)
    ├── Overloaded             too many requests wait (HTTP 503 + Retry-After)
    ├── StateError             the memory of a sequence can't be had or can't be trusted
    │   ├── SealMismatch       a state is not the state that its reader asked for
    │   ├── StaleHandle        a handle outlived what it pointed at
    │   ├── OutOfSlots         no bytes for another state
    │   └── OutOfBlocks        no bytes for another block of KV
    ├── PeerError              another machine answered wrongly or not at all
    ├── TierError              a place where checkpoints wait failed
    └── KernelError            an operation was asked for what it can't do

The law kept here: errors caused by input are one of these, never an `assert`, and their text says what was
asked, what was found and what would work.
"""

from __future__ import annotations


class MilepostError(Exception):
    """The root: catch this to catch everything that Milepost raises on purpose."""


class ConfigError(MilepostError):
    """A setting can't work. `field` is the setting's name."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedModel(ConfigError):
    """A checkpoint needs something that isn't implemented; the message names each field."""


class RequestError(MilepostError):
    """A request is wrong. `param` is the parameter's name as the client wrote it."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModel(RequestError):
    """The request names a model that this server doesn't have."""

    status = 404


class Overloaded(MilepostError):
    """Too many requests wait already. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StateError(MilepostError):
    """The memory of a sequence can't be had or can't be trusted."""


class SealMismatch(StateError):
    """A state's fingerprint is not the one that its reader asked for."""


class StaleHandle(StateError):
    """A handle was used after what it pointed at had been given back."""


class OutOfSlots(StateError):
    """The arena has no bytes for another state."""


class OutOfBlocks(StateError):
    """The arena has no bytes for another block of KV."""


class PeerError(MilepostError):
    """Another machine answered wrongly or not at all."""


class TierError(MilepostError):
    """A tier failed; the caller recomputes."""


class KernelError(MilepostError):
    """An operation was asked for a dtype, size or layout that it can't do."""
