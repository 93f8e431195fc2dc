"""`milepost doctor MODEL`: would this model run here, with which sizes, dtypes and kernels, and what limits it?

In: a configuration. Out: a report. Reads `config.json`, headers of the weights and the tokenizer; no weight is loaded.
The law kept here: say why (law 10), and say everything that is wrong at once, not one refusal per try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from milepost.config import EngineConfig
from milepost.embedded import resolve_model
from milepost.engine.settings import Settings, settle
from milepost.models.registry import load_spec, sized_only
from milepost.models.spec import ModelSpec
from milepost.plan.files import look, tried
from milepost.plan.sizes import Fit, Sizes, fits, sizes_of


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found. `refusals` is empty if the model would start."""

    model: str
    spec: ModelSpec
    sizes: Sizes
    settings: Settings | None
    limits: tuple[Fit, ...]
    backends: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The keys of BENCHES plus limits, reasons, backends and refusals."""
        settings = self.settings
        return {
            "model": self.model,
            "family": self.spec.family,
            **self.sizes.to_json(),
            "dtype": settings.dtype if settings else None,
            "max_model_len": settings.max_model_len if settings else None,
            "budget_bytes": settings.budget_bytes if settings else None,
            "page_bytes": settings.geometry.page_bytes if settings else None,
            "limits": [asdict(fit) for fit in self.limits],
            "reasons": dict(settings.reasons) if settings else {},
            "backends": {operation: list(reasons) for operation, reasons in self.backends.items()},
            "notes": list(self.notes),
            "refusals": list(self.refusals),
        }

    def render(self, console: Console) -> None:
        """Print it for people."""
        sizes, settings = self.sizes, self.settings
        table = Table(title=f"{self.model}: {self.spec.architecture}", title_justify="left", show_header=False)
        table.add_row("layers that keep a state", f"{sizes.recurrent_layers}")
        table.add_row("layers that keep KV", f"{sizes.attention_layers}")
        table.add_row("state of one sequence", _bytes(sizes.state_bytes_per_sequence))
        table.add_row("  recurrent matrix", f"{_bytes(sizes.recurrent_bytes_per_sequence)}, {sizes.dtypes.recurrent}")
        table.add_row("  convolution window", f"{_bytes(sizes.window_bytes_per_sequence)}, {sizes.dtypes.window}")
        table.add_row("KV of one token", f"{_bytes(sizes.kv_bytes_per_token)}, {sizes.dtypes.kv}")
        if sizes.attention_window is not None:
            table.add_row("attention window", f"{sizes.attention_window:,} tokens: KV behind it is freed")
        if sizes.kv_bytes_per_token and sizes.state_bytes_per_sequence:
            equal = sizes.state_bytes_per_sequence / sizes.kv_bytes_per_token
            table.add_row("context at which KV outgrows the state", f"{equal:,.0f} tokens")
        if settings is not None:
            table.add_row("arena", f"{_bytes(settings.budget_bytes)} ({settings.reasons['kv_cache_memory_bytes']})")
            for fit in self.limits:
                table.add_row(f"  at once, {fit.context:,} tokens each", f"{fit.sequences} (bound by {fit.bound_by})")
            for name, reason in settings.reasons.items():
                table.add_row(name, f"{_setting(settings, name)}: {reason}")
        for operation, reasons in self.backends.items():
            table.add_row(f"kernels, {operation}", "\n".join(reasons))
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)
        for refusal in self.refusals:
            console.print(f"[red]would not start:[/red] {refusal}", highlight=False)
        if not self.refusals and not self.notes:
            console.print("[green]would start[/green]")


def doctor(config: EngineConfig) -> DoctorReport:
    """Examine a model. Raises ConfigError or UnsupportedModel only if its config.json can't be read as a model's."""
    path = _directory(config.model)
    spec = load_spec(path, sized=True)
    refusals: list[str] = []
    only = sized_only(spec)
    if only is not None:
        refusals.append(f"architecture {spec.architecture} can be sized but not served")
    settings = tried(lambda: settle(config, spec), refusals)
    sized = settings or settle(replace(config, max_model_len=None, kv_cache_memory_bytes=None), spec, check=False)
    backends: dict[str, tuple[str, ...]] = {}
    if settings is not None and only is None:
        from milepost.engine.assembly import choices

        chosen = tried(lambda: choices(config, spec, sized), refusals)
        backends = {choice.operation: choice.reasons for choice in chosen or ()}
    notes = (f"not counted: {only.uncounted}",) if only else look(path, spec, config, refusals)
    return DoctorReport(
        model=config.model,
        spec=spec,
        sizes=sizes_of(spec, sized),
        settings=settings,
        limits=fits(settings, config.max_num_seqs, config.max_num_batched_tokens) if settings else (),
        backends=backends,
        notes=notes,
        refusals=tuple(refusals),
    )


def _directory(model: str) -> Path:
    """A directory, a file `config.json` in one, or an embedded model."""
    path = Path(model).expanduser()
    return path.parent if path.name == "config.json" and path.is_file() else resolve_model(model)


def _setting(settings: Settings, name: str) -> object:
    match name:
        case "dtype":
            return settings.dtype
        case "kv_cache_dtype":
            return settings.dtypes.kv
        case "mamba_cache_dtype":
            return settings.dtypes.window
        case "mamba_ssm_cache_dtype":
            return settings.dtypes.recurrent
        case "max_model_len":
            return settings.max_model_len
        case _:
            return settings.budget_bytes


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count:,} bytes ({count / size:.2f} {unit})"
    return f"{count:,} bytes"
