"""A plan as tables for people. In: a `Plan` and a console.

The law kept here: what is printed is what `to_json` says, in units that people read; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from milepost.plan.plan import Plan

_LEFT = ("from", "bound by")


def show(plan: Plan, console: Console) -> None:
    """Print it for people."""
    for table in (_sizes(plan), _crossovers(plan), _capacity(plan), _peers(plan), *_speed(plan), *_advice(plan)):
        console.print(table)
    for name, flags in (*((f"vLLM, {mode.mode}", mode.flags) for mode in plan.vllm.modes), ("SGLang", plan.sglang.flags)):
        console.print(f"flags for {name}: {' '.join(flag.text for flag in flags)}", highlight=False, soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)
    for refusal in plan.refusals:
        console.print(f"[red]would not start:[/red] {refusal}", highlight=False)


def _sizes(plan: Plan) -> Table:
    sizes, dtypes = plan.sizes, plan.sizes.dtypes
    ranks = f", each of {plan.question.ranks} ranks" if plan.question.ranks > 1 else ""
    table = _table(f"{plan.model}: {plan.whole.architecture}{ranks}", "what", "bytes", "from")
    shapes = "shapes of the config"
    table.add_row(f"state of one sequence, {sizes.recurrent_layers} layers", _b(sizes.state_bytes_per_sequence), shapes)
    table.add_row(f"  recurrent matrices ({dtypes.recurrent})", _b(sizes.recurrent_bytes_per_sequence), shapes)
    table.add_row(f"  convolution windows ({dtypes.window})", _b(sizes.window_bytes_per_sequence), shapes)
    table.add_row("  of one layer", _b(sizes.state_bytes_per_layer), shapes)
    table.add_row(f"KV of one token ({dtypes.kv}), {sizes.attention_layers} layers", _b(sizes.kv_bytes_per_token), shapes)
    if sizes.attention_window:
        table.add_row("  kept for at most", f"{sizes.attention_window:,} tokens", "the attention's window")
    for codec, size in plan.checkpoint_bytes.items():
        table.add_row(f"checkpoint, {codec}", _b(size), "shapes and the codec")
    if plan.weights is not None:
        unit, name = (1e9, "G") if plan.weights.parameters >= 1e9 else (1e6, "M")
        count = f"{plan.weights.parameters / unit:.2f} {name} parameters, {plan.weights.active / unit:.2f} {name} a token"
        table.add_row(f"weights ({plan.whole.dtype})", _b(plan.weights.total_bytes), count)
    batch = plan.state_equals_weights_batch
    if batch is not None:
        table.add_row("batch whose states cost what the weights do", f"{batch:,.1f}", "bytes moved in a decode step")
    return table


def _crossovers(plan: Plan) -> Table:
    found = plan.crossovers
    table = _table("Crossovers", "the state is as large as", "at", "the whole is smaller from")
    own = "never" if found.own_kv_tokens is None else f"{found.own_kv_tokens:,.0f} tokens"
    table.add_row("its own KV", own, "")
    for other in (found.baseline, found.everywhere):
        if other is not None:
            table.add_row(f"KV of {other.name}", _tokens(other.state_equals_kv_tokens), _tokens(other.smaller_from_tokens))
            last = other.ratios[-1]
            sides = f"{_b(last.hybrid_bytes)} against {_b(last.other_bytes)}"
            table.add_row(f"  at {last.tokens:,} tokens", f"{last.ratio:.2f} times less", sides)
    return table


def _capacity(plan: Plan) -> Table:
    title = f"Capacity: {_b(plan.capacity.budget_bytes)} for states and KV, pages of {plan.capacity.page_bytes:,} bytes"
    table = _table(title, "length", "fit at once", "run at once", "bound by", "stay cached, raw", "int8")
    for point in plan.capacity.frontier:
        kept = {each.codec: each.conversations for each in plan.capacity.cached if each.context == point.context}
        at_once = (f"{point.room:,}", f"{point.sequences:,}", point.bound_by)
        table.add_row(f"{point.context:,}", *at_once, f"{kept['raw']:,}", f"{kept['int8']:,}")
    return table


def _peers(plan: Plan) -> Table:
    table = _table("Beside others", "engine", "hits fall on", "shortest prompt that hits", "run at once at full length")
    longest = plan.capacity.frontier[-1]
    table.add_row("milepost", "every token", "2", f"{longest.room:,}")
    for mode in plan.vllm.modes:
        name = f"vLLM {plan.vllm.version} {mode.mode}" + ("" if mode.in_version else " (historic)")
        row = (_step(mode.hit_step), _step(mode.shortest_hit), f"{mode.sequences_at_max_len:,}")
        table.add_row(name, *row)
    other = plan.sglang
    row = (_step(other.hit_step), _step(other.shortest_hit), f"{other.requests_at_max_len:,}")
    table.add_row(f"SGLang {other.version}", *row)
    return table


def _speed(plan: Plan) -> Iterable[Table]:
    if plan.speed is None:
        return
    table = _table(f"At best on {plan.speed.device}, {plan.speed.dtype}", "phase", "batch", "tokens", "tokens/s", "bound by")
    for bound in plan.speed.bounds:
        row = (bound.phase, f"{bound.batch:,}", f"{bound.tokens:,}", f"{bound.tokens_per_s:,.0f}", bound.bound_by)
        table.add_row(*row)
    yield table
    restore = _table("Fetching a checkpoint beats computing it again", "from", "raw", "bf16", "int8")
    for tier in dict.fromkeys(each.tier for each in plan.speed.restore):
        cells = [each.worth_from_tokens for each in plan.speed.restore if each.tier == tier]
        restore.add_row(tier, *("never" if cell is None else f"{cell:,} tokens on" for cell in cells))
    yield restore
    hand = _table("Handing one sequence to another machine", "over", "tokens", "arrives after", "computed there after")
    for each in plan.speed.hand_over:
        hand.add_row(each.link, f"{each.tokens:,}", _time(each.seconds), _time(each.recompute_seconds))
    yield hand


def _advice(plan: Plan) -> Iterable[Table]:
    if plan.advice is None:
        return
    work = plan.advice.workload
    title = (
        f"Advice for prompts of {work.prompt_tokens:,.0f} tokens, {work.shared_tokens:,.0f} of them shared, "
        f"answers of {work.answer_tokens:,.0f}, {work.rate:.3g} a second"
    )
    table = _table(title, "setting", "from")
    for each in plan.advice.settings:
        table.add_row(f"{each.flag} {each.value}".strip(), each.why)
    yield table
    if plan.advice.attention:
        share = _table("Attention's share of the work", "length", "of a prompt's operations", "of a decode step's bytes")
        for at in plan.advice.attention:
            share.add_row(f"{at.context:,}", f"{at.prefill_flops:.1%}", f"{at.decode_bytes:.1%}")
        yield share


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in _LEFT else "right")
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _step(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"


def _tokens(tokens: float | None) -> str:
    return "never" if tokens is None else f"{tokens:,.0f} tokens"


def _b(count: float) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"
