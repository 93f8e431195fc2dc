"""Asks one planner of others about one model. Run as a script by the Python of that planner's own environment.

In: the planner's name, a `config.json`, contexts in tokens. Out: one line of JSON: the version and what the planner said at
each context, as it said it. The law kept here: nothing of ours is imported, and what a planner raises is an answer too.

No hub is needed: a planner that reads files is given the file, one that reads a hub's cache is given a cache that holds it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

Said = dict[str, Any]

_COMMIT = "0" * 40
_STAND_IN = 30_000_000_000
"""Parameters, where a planner wants the hub's count before it looks at the cache. Only its weights depend on it."""


def kvfit(config: Path, contexts: list[int]) -> Said:
    """Its command takes hub names only; the function behind it takes a config."""
    estimate = import_module("kvfit.architectures").estimate_cache
    content = json.loads(config.read_text())
    return {"at": {context: estimate(content, context_tokens=context, kv_bytes=2.0).as_dict() for context in contexts}}


def ridgepoint(config: Path, contexts: list[int]) -> Said:
    """It takes hub names only, but reads them from the hub's cache where that holds them."""
    home = config.parent / "hub"
    repository = home / "hub" / f"models--local--{config.parent.name}"
    snapshot = repository / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(_COMMIT)
    (snapshot / "config.json").write_bytes(config.read_bytes())
    os.environ |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    fit = import_module("ridgepoint").fit
    name, gpu = f"local/{config.parent.name}", "h100-80gb"
    said = {at: json.loads(fit(name, gpu, dtype="bf16", kv_cache_dtype="bf16", ctx=at, as_json=True)) for at in contexts}
    return {"at": said}


def vramscout(config: Path, contexts: list[int]) -> Said:
    """It reads files; of a mixture of experts it wants the hub's count of parameters, for which it gets a stand-in."""
    latest = import_module("vramscout.modern_v07")
    settings: Said = {"kv_dtype": "bf16", "weight_dtype": "bf16", "vram_gib": 80.0, "calibration": "none"}
    note = None
    try:
        latest.plan_modern(str(config), context=contexts[0], **settings)
    except Exception as error:
        if "parameter metadata" not in str(error):
            raise
        reader: Any = import_module("vramscout.modern_v06")
        reader._selected_hub_metadata = lambda *_: (_STAND_IN, None)
        note = "needs the hub's parameter count: a stand-in was given"
    said = {at: latest.plan_modern(str(config), context=at, **settings).parts_gib for at in contexts}
    return {"at": {at: {"parts_gib": parts} for at, parts in said.items()}, "note": note}


def vllm_sr_sim(config: Path, contexts: list[int]) -> Said:
    """Its model of memory is one number: KV of a token."""
    spec = import_module("fleet_sim.models.spec").ModelSpec.from_hf_config(config)
    return {"at": {context: {"kv_bytes_per_token": spec.kv_bytes_per_token} for context in contexts}}


ASK: dict[str, Callable[[Path, list[int]], Said]] = {
    "kvfit": kvfit,
    "ridgepoint": ridgepoint,
    "vramscout": vramscout,
    "vllm-sr-sim": vllm_sr_sim,
}


def main(name: str, config: str, contexts: list[int]) -> None:
    """Print what the planner says, or why it says nothing."""
    said: Said = {"version": None}
    try:
        said["version"] = metadata.version(name)
        said |= ASK[name](Path(config), contexts)
    except Exception as error:
        said["why"] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(context) for context in sys.argv[3:]])
