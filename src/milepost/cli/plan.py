"""`milepost plan MODEL`: sizes, crossovers, capacity, limits, and the peers' arithmetic beside ours.

In: a command line. Out: tables for people, or one line of JSON. The law kept here: no torch is loaded, so it answers at once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.cli.flags import add_settings, read_settings
from milepost.config import EngineConfig, parse_size
from milepost.errors import ConfigError

if TYPE_CHECKING:
    from milepost.plan.advice import Workload
    from milepost.plan.plan import Question

DEFAULT_BASELINE = "llama-3-8b"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags, then the engine's."""
    parser.add_argument("model", metavar="MODEL", help="a directory, a config.json, or the name of a built-in config")
    group = parser.add_argument_group("plan")
    baseline = f"set it beside this model (default: {DEFAULT_BASELINE}; none: nothing)"
    group.add_argument("--versus", metavar="MODEL", default=DEFAULT_BASELINE, help=baseline)
    group.add_argument("--memory", metavar="SIZE", help="memory of one rank, for weights and caches, e.g. 80GB")
    group.add_argument("--device", metavar="NAME|FILE", help="limits on h100, h200, mi300x, or the device of a .toml file")
    group.add_argument("--tensor-parallel-size", metavar="N", type=int, default=1, help="ranks (default: 1)")
    group.add_argument("--draft-tokens", metavar="N", type=int, default=0, help="speculated tokens a step (default: 0)")
    group.add_argument("--context", metavar="N", type=int, nargs="+", help="lengths to compare at")
    group.add_argument("--trace", metavar="FILE", help="advise settings for the requests of a trace (.jsonl or .jsonl.gz)")
    group.add_argument("--prompt-tokens", metavar="N", type=int, help="advise settings for prompts of this length")
    group.add_argument("--answer-tokens", metavar="N", type=int, default=256, help="with --prompt-tokens (default: 256)")
    group.add_argument("--shared-prefix-tokens", metavar="N", type=int, default=0, help="with --prompt-tokens (default: 0)")
    rate = "requests a second, with --prompt-tokens (default: 1)"
    group.add_argument("--rate", metavar="X", type=float, default=1.0, help=rate)
    group.add_argument("--report", metavar="FILE", help="write one page of HTML with plots that needs no network")
    group.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_settings(parser, EngineConfig, title="engine", skip=("model",))


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Returns 1 if the model would not start as asked."""
    from milepost.plan.plan import make_plan

    plan = make_plan(read_settings(EngineConfig, arguments), _question(arguments))
    if arguments.report:
        from milepost.plan.report import page

        try:
            Path(arguments.report).write_text(page(plan, arguments.typed), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"report={arguments.report!r} can't be written: {error.strerror}", field="report") from error
    if arguments.json:
        print(json.dumps(plan.to_json()))
    else:
        from rich.console import Console

        from milepost.plan.tables import show

        show(plan, Console())
    return 1 if plan.refusals else 0


def _workload(arguments: argparse.Namespace) -> Workload | None:
    from milepost.plan.advice import read_trace, told

    if arguments.trace and arguments.prompt_tokens:
        raise ConfigError("trace and prompt_tokens both describe the workload; give one", field="trace")
    if arguments.trace:
        return read_trace(Path(arguments.trace))
    if arguments.prompt_tokens is None:
        return None
    return told(arguments.prompt_tokens, arguments.answer_tokens, arguments.shared_prefix_tokens, arguments.rate)


def _question(arguments: argparse.Namespace) -> Question:
    from milepost.plan.devices import device
    from milepost.plan.plan import Question

    for name in ("tensor_parallel_size", "context"):
        given = getattr(arguments, name)
        if any(value < 1 for value in (given if isinstance(given, list) else [given or 1])):
            raise ConfigError(f"{name}={given} must be at least 1", field=name)
    if arguments.draft_tokens < 0:
        raise ConfigError(f"draft_tokens={arguments.draft_tokens} must be at least 0", field="draft_tokens")
    return Question(
        contexts=tuple(sorted(arguments.context)) if arguments.context else Question().contexts,
        ranks=arguments.tensor_parallel_size,
        draft_tokens=arguments.draft_tokens,
        memory_bytes=parse_size(arguments.memory, "--memory", "bytes") if arguments.memory else None,
        versus=None if arguments.versus == "none" else arguments.versus,
        device=device(arguments.device) if arguments.device else None,
        workload=_workload(arguments),
    )
