"""What reuse of shared prompts saves: `milepost bench prefix`.

A prompt of n tokens costs about n times what a token costs, so a second question under the same system message costs the
question alone, if the state at the end of that message was kept. Four loads, each from a cold start:
1. chat: three questions under one system message; from the second on, only the question is computed;
2. tokens: the same without message boundaries; the second request shows where the prompts part, the third resumes there;
3. identical: a prompt asked twice; all but its last token is skipped;
4. a chat of many turns: nothing that was fed is fed again.

The law kept here: each load has its expectation; one that doesn't hold is named on stderr and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from milepost.bench.checkpoint import Size, checkpoint, words
from milepost.bench.drive import Drive, Served
from milepost.bench.prefix_figures import Figures, Repeat, Row, Turn
from milepost.bench.prefix_table import peers_json, render
from milepost.bench.writer import Writer
from milepost.config import EngineConfig
from milepost.errors import ConfigError, MilepostError
from milepost.request import SamplingParams
from milepost.text import Text

CACHE = Path(".work") / "bench"
_ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is asked."""

    shared: tuple[int, ...] = (900, 1300, 4000)
    question: int = 64
    lengths: tuple[int, ...] = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257, 1000, 2049)
    turns: int = 20
    turn_system: int = 200
    turn_question: int = 30
    turn_answer: int = 24

    @property
    def requests(self) -> int:
        """Requests in all."""
        return 6 * len(self.shared) + 2 * len(self.lengths) + self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with room for a template's own."""
        turns = self.turn_system + self.turns * (self.turn_question + self.turn_answer + 16)
        return max(max(self.shared, default=0) + self.question + 32, max(self.lengths, default=0) + 1, turns)


def measure(drive: Drive, writer: Writer, load: Workload, turn_params: SamplingParams) -> Figures:
    """Run all four loads. Every group of them starts cold."""
    drive.ask(writer.tokens(min(load.shared, default=64)), _ANSWER)  # threads and allocators wake up here, not in the first row
    rows: list[Row] = []
    for shared in load.shared:
        rows += _chat(drive, writer, shared, load.question)
    for shared in load.shared:
        rows += _tokens(drive, writer, shared, load.question)
    identical = [_twice(drive, writer.tokens(length)) for length in load.lengths]
    return Figures(rows, identical, _turns(drive, writer, load, turn_params))


def _chat(drive: Drive, writer: Writer, shared: int, question: int) -> list[Row]:
    system = writer.system(shared)
    prompts = [drive.text.chat([system, writer.user(question)]) for _ in range(3)]
    drive.forget()
    return _rows("chat", shared, [drive.ask(prompt.tokens, _ANSWER, prompt.boundaries) for prompt in prompts])


def _tokens(drive: Drive, writer: Writer, shared: int, question: int) -> list[Row]:
    start = writer.tokens(shared)
    prompts = [start + writer.tokens(question) for _ in range(3)]
    drive.forget()
    return _rows("tokens", shared, [drive.ask(prompt, _ANSWER) for prompt in prompts])


def _rows(mode: Literal["chat", "tokens"], shared: int, served: Sequence[Served]) -> list[Row]:
    return [
        Row(
            shared,
            mode,
            request,
            one.prompt_tokens,
            one.cached_tokens,
            one.known_tokens,
            one.computed_tokens,
            round(one.ttft_s, 6),
            round(one.ttft_s / served[0].ttft_s, 4),
        )
        for request, one in enumerate(served, start=1)
    ]


def _twice(drive: Drive, prompt: tuple[int, ...]) -> Repeat:
    drive.forget()
    first, second = drive.ask(prompt, _ANSWER), drive.ask(prompt, _ANSWER)
    return Repeat(len(prompt), second.cached_tokens, first.answer == second.answer)


def _turns(drive: Drive, writer: Writer, load: Workload, params: SamplingParams) -> list[Turn]:
    drive.forget()
    messages = [writer.system(load.turn_system)]
    turns: list[Turn] = []
    for turn in range(1, load.turns + 1):
        messages.append(writer.user(load.turn_question))
        prompt = drive.text.chat(messages)
        served = drive.ask(prompt.tokens, replace(params, seed=turn), prompt.boundaries)
        messages.append({"role": "assistant", "content": served.text})
        again = max(0, served.known_tokens - served.cached_tokens)
        turns.append(Turn(turn, served.prompt_tokens, served.cached_tokens, again))
    return turns


def main(arguments: argparse.Namespace | Sequence[str]) -> int:
    """Measure, print, judge. Raises MilepostError for what can't be run."""
    given = arguments if isinstance(arguments, argparse.Namespace) else _parser().parse_args(list(arguments))
    config, generated = _config(given)
    figures, about = run(config, Workload(), generated=generated)
    violations = figures.violations()
    render(figures, about, Console(width=None if sys.stdout.isatty() else 120))
    for violation in violations:
        print(f"milepost: bench prefix: {violation}", file=sys.stderr)
    if given.json:
        document = {**about, **asdict(figures), "peers": peers_json(), "violations": violations, "ok": not violations}
        print(json.dumps(document, ensure_ascii=False), flush=True)
    return 1 if violations else 0


def run(config: EngineConfig, load: Workload, *, generated: bool) -> tuple[Figures, dict[str, Any]]:
    """Start an engine, measure, stop it. `generated`: the checkpoint is one of ours, and any of its words may be said."""
    from milepost.llm import start

    engine, text = start(config, show=sys.stderr.isatty())
    try:
        if engine.max_model_len < load.longest:
            raise ConfigError(
                f"bench prefix asks for sequences of {load.longest} tokens, the model's limit here is {engine.max_model_len}",
                field="max_model_len",
            )
        vocabulary = _own_words(text) if generated else words(2000, _SEED)
        writer = Writer(text, vocabulary, _SEED)
        params = SamplingParams(max_tokens=load.turn_answer, temperature=0.0)
        if generated:
            params = replace(params, temperature=1.0, allowed_token_ids=writer.ids)
        with _bar(load.requests + 1) as advance:
            return measure(Drive(engine, text, advance), writer, load, params), _about(engine, config)
    finally:
        engine.stop()


def _own_words(text: Text) -> list[str]:
    tokenizer = text.tokenizer
    return [tokenizer.decode([token]).strip() for token in range(tokenizer.size) if token not in tokenizer.special_ids]


def _about(engine: Any, config: EngineConfig) -> dict[str, Any]:
    import torch

    settings = engine.parts.settings
    return {
        "bench": "prefix",
        "model": config.model,
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "state_bytes": settings.layout.state_stride,
        "budget_bytes": settings.budget_bytes,
    }


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; gives what moves it on by one request."""
    columns = (TextColumn("bench prefix"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("bench prefix", total=total)
        yield lambda: progress.advance(task)


def _config(given: argparse.Namespace) -> tuple[EngineConfig, bool]:
    """The engine's settings, and whether the checkpoint is generated: it is unless a model was named."""
    config = getattr(given, "config", None) or EngineConfig()
    model = getattr(given, "model", None)
    if model is not None:
        return replace(config, model=str(model)), False
    size: Size = getattr(given, "size", None) or "100m"
    parent = getattr(given, "model_dir", None) or CACHE
    return replace(config, model=str(checkpoint(size, Path(parent)))), True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="milepost bench prefix", description="What reuse of shared prompts saves.")
    add_flags(parser)
    parser.add_argument("--model", metavar="DIR", help="measure this checkpoint instead of a generated one")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document in the last line")
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the generated checkpoint."""
    parser.add_argument("--size", choices=("tiny", "100m"), default="100m", help="of the generated checkpoint (default: 100m)")
    parser.add_argument("--model-dir", metavar="DIR", help=f"where the generated checkpoint is kept (default: {CACHE})")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MilepostError as error:
        print(f"milepost: {error}", file=sys.stderr)
        sys.exit(2)
