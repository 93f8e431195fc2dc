"""In: parsed arguments. Out: what each verb prints, and its exit status.

The law kept here: answers go to stdout, all else to stderr; nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from milepost.cli.flags import read_settings
from milepost.config import EngineConfig, ServerConfig
from milepost.errors import ConfigError, RequestError
from milepost.request import SamplingParams, Usage

_SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 takes the likeliest token each time"),
    "top_p": (float, "sample from the likeliest tokens that make up this share"),
    "top_k": (int, "sample from the so many likeliest tokens; -1: all"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, "above 1 discourages tokens seen before"),
}

def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Flags for `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    shown = "what fits" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, metavar="N", default=max_tokens, help=f"longest answer (default: {shown})")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    for name, (kind, help) in _SAMPLING.items():
        default = getattr(SamplingParams(), name)
        group.add_argument(
            "--" + name.replace("_", "-"), dest=name, type=kind, metavar="X", default=default,
            help=f"{help} (default: {default})",
        )  # fmt: skip


def read_sampling(arguments: argparse.Namespace) -> SamplingParams:
    """`SamplingParams` from flags. Raises RequestError."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop or ()),
        ignore_eos=arguments.ignore_eos,
        **{name: getattr(arguments, name) for name in _SAMPLING},
    )


def serve(arguments: argparse.Namespace) -> int:
    """`milepost serve`."""
    config, server = read_settings(EngineConfig, arguments), read_settings(ServerConfig, arguments)
    from milepost.cli.serving import run_server

    return run_server(config, server)


def complete(arguments: argparse.Namespace) -> int:
    """`milepost complete`."""
    params = read_sampling(arguments)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with _llm(arguments) as llm:
        if arguments.json:
            [done] = llm.generate(prompt, params)
            print(json.dumps({**asdict(done), "prompt": prompt}, ensure_ascii=False))
            return 0
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
        print()
    return 0


def chat(arguments: argparse.Namespace) -> int:
    """`milepost chat`."""
    params = read_sampling(arguments)
    messages: list[dict[str, Any]] = []
    if arguments.system:
        messages.append({"role": "system", "content": _file_or_text(arguments.system)})
    with _llm(arguments) as llm:
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            answer, usage = "", None
            try:
                for delta in llm.stream(messages, params):
                    print(delta.text, end="", flush=True)
                    answer, usage = answer + delta.text, delta.usage
            except KeyboardInterrupt:
                print(" …", end="")  # the answer is cut off, the conversation goes on
            except RequestError as error:  # such as: the conversation has become too long
                messages.pop()
                print(f"milepost: {error}", file=sys.stderr)
                continue
            print(flush=True)
            if usage is not None:
                print(_describe(usage), file=sys.stderr, flush=True)
            messages.append({"role": "assistant", "content": answer})
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """`milepost doctor`."""
    config = read_settings(EngineConfig, arguments)
    from rich.console import Console

    from milepost.cli.doctor import doctor as examine

    report = examine(config)
    if arguments.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        report.render(Console())
    return 1 if report.refusals else 0


def _llm(arguments: argparse.Namespace) -> Any:
    settings = asdict(read_settings(EngineConfig, arguments))
    from milepost.llm import LLM

    return LLM(settings.pop("model"), **settings)


def _file_or_text(given: str) -> str:
    """A file's content if there is such a file, else the text itself."""
    try:
        path = Path(given)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a long text is no path; an unreadable file is a mistake
        if isinstance(error, PermissionError | UnicodeDecodeError):
            raise ConfigError(f"--system {given}: can't be read ({error})") from error
    return given


def _read_line() -> str | None:
    """The next thing that the user says; None at the end."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _describe(usage: Usage) -> str:
    again = "".join(f", {count} again ({reason})" for reason, count in usage.recomputed.items() if count)
    return f"[{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, {usage.completion_tokens} new{again}]"
