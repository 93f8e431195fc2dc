"""Put a plan's figures on a page. In: a `Plan` and the command that made it. Out: HTML with nothing to fetch.

The law kept here: one file, no script, no reference to anywhere.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment

from milepost.plan.plan import Plan
from milepost.plan.report.plots import figures, size

_TEMPLATE = Path(__file__).parent / "page.html.j2"


def page(plan: Plan, command: str = "milepost plan") -> str:
    """The whole page."""
    environment = Environment(autoescape=True, trim_blocks=False)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    modes = [(f"vLLM {plan.vllm.version}, {mode.mode}", mode.flags) for mode in plan.vllm.modes if mode.in_version]
    peers = [*modes, (f"SGLang {plan.sglang.version}", plan.sglang.flags)]
    return template.render(
        plan=plan,
        figures=figures(plan),
        facts=_facts(plan),
        peers=[(name, " ".join(flag.text for flag in flags)) for name, flags in peers],
        command=command,
    )


def _facts(plan: Plan) -> list[tuple[str, str, str]]:
    """(name, value, where it comes from)."""
    sizes, cross = plan.sizes, plan.crossovers
    found = [
        ("State of a sequence", size(sizes.state_bytes_per_sequence), f"shapes; {sizes.dtypes.recurrent} matrices"),
        ("KV of a token", size(sizes.kv_bytes_per_token), f"shapes; {sizes.dtypes.kv}"),
        ("int8 checkpoint", size(plan.checkpoint_bytes["int8"]), "shapes and scales"),
    ]
    if cross.own_kv_tokens is not None:
        found.append(("KV outgrows the state", f"{cross.own_kv_tokens:,.0f} tokens", "state / KV of a token"))
    if cross.baseline is not None:
        alone, whole = cross.baseline.state_equals_kv_tokens, cross.baseline.smaller_from_tokens
        name = cross.baseline.name
        found.append((f"State = KV of {name}", "never" if alone is None else f"{alone:,.0f} tokens", "shapes of both"))
        found.append((f"Smaller than {name}", "never" if whole is None else f"from {whole:,.0f} tokens", "shapes of both"))
    block = plan.vllm.align.block_tokens
    if block is not None:
        found.append(("vLLM's block", f"{block:,} tokens", f"rule of vLLM {plan.vllm.version}"))
    if plan.weights is not None:
        found.append(("Weights", size(plan.weights.total_bytes), f"shapes; {plan.whole.dtype}"))
    return found
