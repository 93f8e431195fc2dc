"""In: a dataclass of settings. Out: its flags, and the dataclass again with what was given.

The law kept here: a setting is defined once, in `config`; its flag, type, choices and help follow from the field.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from milepost.config import parse_size
from milepost.errors import ConfigError

S = TypeVar("S")


def add_settings(parser: argparse.ArgumentParser, kind: type[Any], *, title: str, skip: Sequence[str] = ()) -> None:
    """One flag per field. Flags that aren't given leave no trace, so that defaults stay in `config`."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        if entry.name in skip:
            continue
        flag = "--" + entry.name.replace("_", "-")
        shown = "" if entry.default is None else f" (default: {entry.default})"
        help = (str(entry.metadata.get("help", "")) + shown).replace("%", "%%")
        common: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": help}
        plain = _plain(hints[entry.name])
        if plain is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif get_origin(plain) is Literal:
            group.add_argument(flag, choices=get_args(plain), **common)
        else:
            size = entry.metadata.get("size")
            group.add_argument(flag, type=_reader(plain, flag, size), metavar=_metavar(plain, size), **common)


def read_settings(kind: type[S], arguments: argparse.Namespace) -> S:
    """The dataclass with the given flags. Raises ConfigError."""
    given = vars(arguments)
    names = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def _plain(hint: Any) -> Any:
    """The type without None."""
    if get_origin(hint) in (Union, UnionType):
        return next(part for part in get_args(hint) if part is not NoneType)
    return hint


def _reader(kind: Any, flag: str, size: Literal["count", "bytes"] | None) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse_size(text, flag, size) if size else kind(text)
        except (ConfigError, ValueError) as error:
            raise argparse.ArgumentTypeError(
                str(error) if size else f"{text!r} is not {'a number' if kind is float else 'a whole number'}"
            ) from error

    return read


def _metavar(kind: Any, size: str | None) -> str:
    if size:
        return "SIZE"
    return {int: "N", float: "X"}.get(kind, "TEXT")
