"""A planner's own environment. In: its name. Out: what it said of a config, or why it said nothing.

The law kept here: no failure of a planner ends the bench: one that can't be installed, hangs or crashes is an answer with
`why`. While it is asked, nothing leaves the machine: its way out is a port where nobody listens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milepost.bench.planners import ask

ROOT = Path(".work") / "planners"
_INSTALL_SECONDS = 900
_ANSWER_SECONDS = 120
_NOWHERE = "http://127.0.0.1:9"
_ALONE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), _NOWHERE)


class Absent(Exception):
    """A planner's environment can't be made; the text says why."""


def python_of(name: str, root: Path = ROOT) -> Path:
    """The Python of a planner's environment, made and filled where it isn't there yet. Raises Absent."""
    home = root / name
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(home)], "no environment")
    if subprocess.run([str(python), "-m", "pip", "show", "--quiet", name], capture_output=True).returncode:
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-input", name], f"pip install {name} failed")
    return python.absolute()  # not resolved: a link to the outer Python would lead out of the environment


def answer_of(python: Path, name: str, config: Path, contexts: Sequence[int]) -> dict[str, Any]:
    """What the planner says of a config at these contexts: `version`, `at`, `note`, or `why` it says nothing."""
    command = [str(python), str(Path(ask.__file__)), name, str(config.absolute()), *map(str, contexts)]
    kept = {key: value for key, value in os.environ.items() if key.upper() not in ("PYTHONPATH", "NO_PROXY")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, env=kept | _ALONE)
    except subprocess.TimeoutExpired:
        return {"why": f"no answer within {_ANSWER_SECONDS} s"}
    except OSError as error:
        return {"why": f"can't be run: {error}"}
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"why": f"exit status {done.returncode}: {_last(done.stderr) or 'no answer'}"}
    return answer if isinstance(answer, dict) else {"why": f"its answer is a {type(answer).__name__}"}


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Absent(f"{what}: {type(error).__name__}") from error
    if done.returncode:
        raise Absent(f"{what}: {_last(done.stderr) or f'exit status {done.returncode}'}")


def _last(text: str) -> str:
    """The last line that isn't empty, without the colours of a terminal."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
