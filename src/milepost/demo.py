"""`python -m milepost.demo`: a real server, the real `openai` client, and a clerk who looks numbers up in a directory.

The directory is the system message. The first question has to read it; every later one, also of a second conversation,
resumes from the state that was kept at its end, so only the new words are computed. What is shown was measured by the client.

The law kept here: a wrong answer is shown as wrong and fails nothing; a request that fails, a byte that isn't accounted for
and a server that doesn't stop cleanly do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from milepost.errors import ConfigError, MilepostError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

T = TypeVar("T")

DIRECTORY = """\
Directory:
Alice Walker: 4821
Omar Hassan: 7306
Clara Jensen: 1954
Victor Lang: 6082
Maria Santos: 3719
Tom Becker: 9240
Yuki Tanaka: 5167
Grace Murphy: 2893
Ivan Petrov: 8415
Nora Quinn: 1638
Felix Weber: 7052
Priya Patel: 4396
Daniel Price: 6927
Lucia Ferrari: 3180
Henry Moore: 9564
Ruth Cohen: 2741
Samuel Grant: 8039
Elena Novak: 5412
Peter Dunn: 1276
Hannah Berg: 6853
Carlos Rivera: 4907
Ingrid Larsen: 3524
James Porter: 7698
Laura Bennett: 2185
Wei Chen: 9031
Emma Fischer: 5740
George Hill: 8362
Sofia Rossi: 1497
Robert Kane: 6215
Fatima Aziz: 3978
Oscar Lund: 7143
Vera Simmons: 2560"""
MISSING = "Sorry, I have no number for that name."
CONVERSATIONS = (
    (
        ("Yuki Tanaka", "{}?"),
        ("Henry Moore", "What is the number of {}?"),
        ("Alice Walker", "{}?"),
        ("Fatima Aziz", "What is {}'s number?"),
        ("Felix Weber", "And {}?"),
    ),
    (
        ("Emma Fischer", "{}?"),
        ("Martin Shaw", "{}?"),
        ("Peter Dunn", "Can you give me {}'s number?"),
        ("Vera Simmons", "{}?"),
    ),
)
"""Two conversations about the same directory: a name and how it is asked for. One name isn't there."""

_START_SECONDS = 180
_ANSWER_SECONDS = 120
_STOP_SECONDS = 20
_READY = "milepost: serving at "


@dataclass(frozen=True, slots=True)
class Answered:
    """One question and what came back."""

    conversation: int
    question: str
    expected: str
    answer: str
    right: bool
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Start, ask, show, stop. 0 unless something failed."""
    parser = argparse.ArgumentParser(prog="python -m milepost.demo", description="A server, a client and a clerk.")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    given = parser.parse_args(arguments)
    try:
        _client_library()
        with Console(stderr=True).status("starting the server") as status, serving("clerk") as address:
            status.update(f"asking {address}")
            client = connect(address)
            answers = [answered for index in range(len(CONVERSATIONS)) for answered in converse(client, index)]
            info = read_info(address)
    except MilepostError as error:
        print(f"milepost demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    faults = faults_of(info)
    if given.json:
        print(json.dumps(_document(answers, info, faults), ensure_ascii=False))
    else:
        show(answers, info, faults, Console(width=None if sys.stdout.isatty() else 120))
    return 1 if faults else 0


def _client_library() -> ModuleType:
    try:
        import openai
    except ImportError as error:
        raise ConfigError("the openai client isn't installed; run: pip install 'milepost[demo]'") from error
    return openai


def connect(address: str) -> OpenAI:
    """The `openai` client, pointed at the server; proxies of the environment are not for this machine's own address."""
    openai = _client_library()
    http = openai.DefaultHttpxClient(trust_env=False)
    client: OpenAI = openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=_ANSWER_SECONDS, http_client=http
    )
    return client


def converse(client: OpenAI, index: int) -> Iterator[Answered]:
    """One conversation: every question follows the answers that were really given."""
    numbers = dict(line.split(": ") for line in DIRECTORY.splitlines()[1:])
    model = _call(lambda: client.models.list().data[0].id)
    if index == 0:  # code is loaded and threads start at the first request of all: not the directory's cost
        _call(lambda: client.chat.completions.create(model=model, messages=[{"role": "user", "content": "?"}], max_tokens=1))
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": DIRECTORY}]
    for name, phrasing in CONVERSATIONS[index]:
        question, expected = phrasing.format(name), numbers.get(name, MISSING)
        messages.append({"role": "user", "content": question})
        answer, prompt_tokens, cached_tokens, first = _call(lambda: _ask(client, model, messages))
        messages.append({"role": "assistant", "content": answer})
        yield Answered(index + 1, question, expected, answer, answer == expected, prompt_tokens, cached_tokens, first)


def _ask(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> tuple[str, int, int, float]:
    """Stream one answer: its text, prompt tokens, cached tokens, seconds to the first token."""
    began = time.perf_counter()
    first: float | None = None
    text, usage = "", None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0.0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece and first is None:
            first = time.perf_counter() - began
        text += piece or ""
        usage = chunk.usage or usage
    if usage is None:
        raise MilepostError("the stream ended without usage")
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    return text, usage.prompt_tokens, cached or 0, time.perf_counter() - began if first is None else first


def _call(action: Callable[[], T]) -> T:
    """Run a call of the client; what it raises becomes one of our errors."""
    import openai

    try:
        return action()
    except openai.OpenAIError as error:
        raise MilepostError(f"a request failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def serving(model: str) -> Iterator[str]:
    """`milepost serve MODEL` on a free port as a process of its own; gives its address. Raises MilepostError."""
    command = [sys.executable, "-m", "milepost", "serve", model, "--host", "127.0.0.1", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "MILEPOST_API_KEY"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        stopped = False
        try:
            yield _address(process, log)
            stopped = True
        finally:
            status = _stop(process)
            if stopped and status != 0:
                raise MilepostError(f"the server ended with status {status}: {_last_words(log)}")


def _address(process: subprocess.Popen[str], log: IO[bytes]) -> str:
    """Wait for the line that says where the server listens."""
    alarm = threading.Timer(_START_SECONDS, process.kill)
    alarm.start()
    try:
        for line in process.stdout or ():
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
    finally:
        alarm.cancel()
    raise MilepostError(f"the server didn't start: {_last_words(log)}")


def _stop(process: subprocess.Popen[str]) -> int:
    """Ask the server to end, and see to it that it does."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def read_info(address: str) -> dict[str, Any]:
    """What the server says of its pools and of its audit."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}/server_info", timeout=30) as answer:
            info: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        raise MilepostError(f"/server_info can't be read: {error}") from error
    return info


def faults_of(info: dict[str, Any]) -> list[str]:
    """What the server's audit found, and what doesn't add up in the pools that it reports."""
    pools = info["pools"]
    faults = [f"{finding['place']}: {finding['message']}" for finding in info["audit"]]
    held = pools["slots_used"] * pools["slot_bytes"] + pools["checkpoint_bytes"]
    held += (pools["blocks_used"] + pools["blocks_cached"]) * pools["block_bytes"] + pools["free_bytes"]
    if held != pools["budget_bytes"]:
        faults.append(f"pools: {held} bytes are held or free, the budget is {pools['budget_bytes']}")
    if pools["slots_used"] or pools["blocks_used"]:
        faults.append(f"pools: nothing runs, yet {pools['slots_used']} slots and {pools['blocks_used']} blocks are in use")
    return faults


def show(answers: Sequence[Answered], info: dict[str, Any], faults: Sequence[str], console: Console) -> None:
    """Tables for people."""
    entries = len(DIRECTORY.splitlines()) - 1
    table = Table(title=f"a directory of {entries} numbers as system message, asked by two conversations", title_justify="left")
    for name in ("question", "answer", ""):
        table.add_column(name, overflow="fold")
    for name in ("prompt tokens", "cached", "first token"):
        table.add_column(name, justify="right")
    for before, row in zip([None, *answers], answers, strict=False):
        if before is not None and before.conversation != row.conversation:
            table.add_section()
        mark = "[green]right[/]" if row.right else f"[red]wrong[/] ({_plain(row.expected)})"
        cells = (f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}", f"{row.ttft_s * 1000:,.1f} ms")
        table.add_row(_plain(row.question), _plain(row.answer), mark, *cells)
    console.print(table)
    prompt, cached = sum(row.prompt_tokens for row in answers), sum(row.cached_tokens for row in answers)
    right = sum(row.right for row in answers)
    console.print(f"{right} of {len(answers)} answers right; {cached:,} of {prompt:,} prompt tokens were not computed again")
    _show_pools(info["pools"], console)
    for fault in faults:
        console.print(f"[red]{_plain(fault)}[/]")
    if not faults:
        console.print(f"audit: every byte accounted for ({info['pools']['budget_bytes']:,} bytes)")


def _show_pools(pools: dict[str, Any], console: Console) -> None:
    table = Table(title="the arena, now that nothing runs", title_justify="left")
    table.add_column("what")
    for name in ("count", "bytes"):
        table.add_column(name, justify="right")
    blocks, size = pools["block_bytes"], pools["block_size"]
    table.add_row("live slots", f"{pools['slots_used']}", f"{pools['slots_used'] * pools['slot_bytes']:,}")
    table.add_row("checkpoints", f"{pools['checkpoints']}", f"{pools['checkpoint_bytes']:,}")
    table.add_row(f"blocks of {size} tokens, running", f"{pools['blocks_used']}", f"{pools['blocks_used'] * blocks:,}")
    table.add_row(f"blocks of {size} tokens, kept", f"{pools['blocks_cached']}", f"{pools['blocks_cached'] * blocks:,}")
    table.add_row("free", "", f"{pools['free_bytes']:,}")
    table.add_row("budget", "", f"{pools['budget_bytes']:,}")
    console.print(table)


def _plain(text: str) -> str:
    """Text that the console must not read as markup."""
    return text.replace("[", r"\[")


def _document(answers: Sequence[Answered], info: dict[str, Any], faults: Sequence[str]) -> dict[str, Any]:
    return {
        "demo": "clerk",
        "rows": [asdict(row) for row in answers],
        "asked": len(answers),
        "right": sum(row.right for row in answers),
        "prompt_tokens": sum(row.prompt_tokens for row in answers),
        "cached_tokens": sum(row.cached_tokens for row in answers),
        "pools": info["pools"],
        "audit": list(faults),
        "ok": not faults,
    }


if __name__ == "__main__":
    sys.exit(main())
