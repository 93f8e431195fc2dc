"""In: a command line. Out: an exit status: 0, or 2 with one line on stderr.

The law kept here: a mistake of the user's gives one line that starts with `milepost:`, never a traceback.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from milepost import __version__
from milepost.cli import verbs
from milepost.cli.benches import add_benches
from milepost.cli.flags import add_settings
from milepost.cli.plan import add_flags as add_plan_flags
from milepost.cli.plan import run as run_plan
from milepost.config import EngineConfig, ServerConfig
from milepost.errors import MilepostError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb."""
    try:
        arguments = parser().parse_args(argv)
        arguments.typed = shlex.join(["milepost", *(sys.argv[1:] if argv is None else argv)])
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except MilepostError as error:
        print(f"milepost: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone: say nothing more
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """All verbs with their flags."""
    root = _Parser(prog="milepost", description="A serving engine for hybrid language models.", allow_abbrev=False)
    root.add_argument("--version", action="version", version=f"milepost {__version__}")
    choices = root.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = choices.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    serve = verb("serve", "serve a model over HTTP, as OpenAI does", verbs.serve)
    _add_model(serve, optional=True)
    add_settings(serve, ServerConfig, title="server")

    complete = verb("complete", "continue one prompt and exit", verbs.complete)
    _add_model(complete)
    complete.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads stdin")
    verbs.add_sampling(complete, max_tokens=64)
    complete.add_argument("--json", action="store_true", help="print the whole answer as JSON")

    chat = verb("chat", "talk to a model in the terminal", verbs.chat)
    _add_model(chat)
    chat.add_argument("--system", metavar="FILE|TEXT", help="system prompt: a file that holds it, or the text itself")
    verbs.add_sampling(chat, max_tokens=None)

    doctor = verb("doctor", "say whether and how a model would run here", verbs.doctor)
    _add_model(doctor)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")

    add_plan_flags(verb("plan", "sizes and limits of a model before a weight is loaded", run_plan))

    add_benches(choices.add_parser("bench", help="measure", description="measure", allow_abbrev=False), _Parser)
    return root


def _add_model(
    verb: argparse.ArgumentParser, *, optional: bool = False, default: str | None = EngineConfig.model
) -> None:
    help = "directory of a checkpoint in Hugging Face layout, or `clerk` for the embedded model"
    if optional:
        verb.add_argument("model", metavar="MODEL", nargs="?", default=default, help=help)
    else:
        verb.add_argument("model", metavar="MODEL", help=help)
    add_settings(verb, EngineConfig, title="engine", skip=("model",))


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other mistake is reported: in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"milepost: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)
