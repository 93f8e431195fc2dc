"""`milepost bench WHAT`: each bench with its own flags. In: a command line. Out: an exit status, figures on the way.

The law kept here: a bench is imported when it runs, not before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from milepost.cli.flags import add_settings, read_settings
from milepost.config import EngineConfig

_Run = Callable[[argparse.Namespace], int]


def add_benches(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> None:
    """One parser for each bench."""
    choices = parser.add_subparsers(metavar="WHAT", required=True, parser_class=kind)

    def bench(name: str, help: str, run: _Run) -> argparse.ArgumentParser:
        made = choices.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="end with one line of JSON")
        return made

    prefix = bench("prefix", "what reuse of long shared prompts saves", _prefix)
    prefix.add_argument("model", metavar="MODEL", nargs="?", help="directory of a checkpoint; default: one that is made")
    prefix.add_argument("--size", choices=["tiny", "100m"], help="of the generated checkpoint, where no MODEL is named")
    prefix.add_argument("--model-dir", metavar="DIR", help="where the generated checkpoint is kept")
    add_settings(prefix, EngineConfig, title="engine", skip=("model",))

    parity = bench("parity", "every family against transformers, on models of its own", _parity)
    parity.add_argument("--family", nargs="+", action="extend", metavar="F", help="these families only")
    parity.add_argument("--write", metavar="FILE", help="put the matrix between the markers of this document")

    planners = bench("planners", "what other planners say of published hybrids", _planners)
    planners.add_argument("--planner", nargs="+", action="extend", metavar="NAME", help="these only")
    planners.add_argument("--write", metavar="FILE", help="put the table between the markers of this document")

    machine = bench("machine", "what this machine can do at most", _machine)
    machine.add_argument("--write", metavar="FILE", help="write a device that `milepost plan --device FILE` reads")


def _prefix(arguments: argparse.Namespace) -> int:
    named = arguments.model
    arguments.model = named or EngineConfig.model
    arguments.config = read_settings(EngineConfig, arguments)
    arguments.model = named
    from milepost.bench import prefix

    return int(prefix.main(arguments) or 0)


def _parity(arguments: argparse.Namespace) -> int:
    from milepost.bench import parity

    return parity.main(arguments)


def _planners(arguments: argparse.Namespace) -> int:
    from milepost.bench import planners

    return planners.main(arguments)


def _machine(arguments: argparse.Namespace) -> int:
    from milepost.bench import machine

    return machine.main(arguments)
