"""The report: one file that fetches nothing, whose curves are the plan's own, and that fits on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from milepost.cli import main
from milepost.config import EngineConfig
from milepost.plan.devices import device, tiers
from milepost.plan.plan import Plan, Question, make_plan
from milepost.plan.report import page
from milepost.plan.report.plots import figures, short, size
from milepost.plan.report.svg import Axis, Chart, Line, Mark
from milepost.plan.roofline import recompute_seconds

MODELS = ("nemotron-h-8b", "mamba2-2.7b", "recurrentgemma-2b", "lfm2-1.2b", "hymba-1.5b", "mamba-130m")
CHROMIUM = shutil.which("chromium")


def plan(model: str, **more: object) -> Plan:
    question = Question(versus="llama-3-8b", device=device("h100"), **more)  # type: ignore[arg-type]
    return make_plan(EngineConfig(model=model, kv_cache_dtype="bfloat16", mamba_cache_dtype="bfloat16"), question)


class _Page(HTMLParser):
    """Open tags that must be closed, and whatever points out of the page."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"


@pytest.mark.parametrize("model", MODELS)
def test_a_page_is_whole_and_points_nowhere(model: str) -> None:
    found = plan(model)
    text = page(found)
    parsed = _Page()
    parsed.feed(text)
    assert parsed.open == [] and parsed.references == [] and not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert "url(" not in text and set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert len(text.encode()) < 1_000_000
    drawn = re.findall(r'<svg viewBox="0 0 420 300".*?</svg>', text)
    assert len(drawn) == len(figures(found)) >= 3
    for svg in drawn:
        root = ElementTree.fromstring(svg)
        names = [child.tag.rpartition("}")[2] for child in root]
        assert names[:2] == ["title", "desc"] and all(root[index].text for index in (0, 1))
        assert "nan" not in svg and "inf" not in svg.replace("info", "")


def test_the_figures_of_nemotron_h_beside_llama() -> None:
    text = page(plan("nemotron-h-8b"), "milepost plan nemotron-h-8b --report x.html")
    for wanted in ("6,234 tokens", "779 tokens", "from 891 tokens", "1,040 tokens", "97.4 MiB", "NVIDIA H100 SXM", "assumed"):
        assert wanted in text, wanted
    assert "milepost plan nemotron-h-8b --report x.html" in text


def test_curves_are_the_plans_own_functions() -> None:
    found = plan("nemotron-h-8b")
    memory, concurrency, hits, restore, roofline = figures(found)
    for tokens, drawn in memory.chart.lines[0].points:
        assert drawn == found.memory.at(int(tokens))
    assert all(drawn == found.memory.state_bytes for _, drawn in memory.chart.lines[1].points)
    point = found.capacity.frontier[0]
    near = min(concurrency.chart.lines[0].points, key=lambda each: abs(each[0] - point.context))
    assert abs(near[1] - point.room) / point.room < 0.05
    align = next(line for line in hits.chart.lines if line.name == "vLLM align")
    assert dict(align.points)[1030] == 0 and dict(align.points)[1050] == 1040 and dict(align.points)[5000] == 4160
    assert hits.chart.lines[0].points == [(0, 0), (5000, 5000)]
    assert found.baseline is not None
    assert all(drawn == found.baseline[1].at(int(tokens)) for tokens, drawn in memory.chart.lines[2].points)
    for line, codec in zip(concurrency.chart.lines[1:], ("raw", "int8"), strict=True):
        each = {tokens: found.checkpoint_bytes[codec] + found.memory.kv_at(int(tokens)) for tokens, _ in line.points}
        assert all(drawn == found.capacity.budget_bytes // each[tokens] for tokens, drawn in line.points)
    for line, hit in zip(hits.chart.lines[1:], [*(mode.hit for mode in found.vllm.modes), found.sglang.hit], strict=True):
        assert all(drawn == hit(int(tokens), None) for tokens, drawn in line.points), line.name
    assert found.speed is not None and found.computed is not None and found.question.device is not None
    place = found.question.device
    again = recompute_seconds(found.spec, found.memory, found.computed, place, found.speed.dtype)
    assert all(drawn == again(int(tokens)) for tokens, drawn in restore.chart.lines[0].points)
    for line, way in zip(restore.chart.lines[1:], tiers(), strict=True):
        size_at = {tokens: found.checkpoint_bytes["int8"] + found.memory.kv_at(int(tokens)) for tokens, _ in line.points}
        assert way.title in line.name and all(drawn == way.seconds(size_at[tokens]) for tokens, drawn in line.points)
    for line, phase in zip(roofline.chart.lines[1:], ("decode", "prefill"), strict=True):
        bounds = [bound for bound in found.speed.bounds if bound.phase == phase]
        peak = place.peak(found.speed.dtype)
        assert line.points == [(b.intensity, min(peak, b.intensity * place.bytes_per_s)) for b in bounds]
    table = dict(zip(hits.header, hits.rows[3], strict=True))
    assert table["shared"] == "2,000" and table["vLLM align"] == "1,040"
    for cell, engine in zip(hits.rows[3][-2:], (found.vllm.align, found.sglang), strict=True):
        assert cell == f"{engine.hit_after(2064, 2000, 2064, 8192):,}"  # type: ignore[attr-defined]


def test_a_plan_without_a_device_has_no_speeds() -> None:
    found = make_plan(EngineConfig(model="nemotron-h-8b"), Question())
    assert len(figures(found)) == 3 and "Roofline" not in page(found)


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    nasty = tmp_path / "<b>&\"model'"
    nasty.mkdir()
    source = Path(str(__import__("milepost.plan.builtin", fromlist=["x"]).path_of("mamba-130m")))
    (nasty / "config.json").write_text(source.read_text())
    text = page(plan(str(nasty)))
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text


def test_axes_and_marks_stay_inside() -> None:
    plain, log = Axis("x", short), Axis("y", short, log=True)
    for points in ([(1, 5)], [], [(1, 3), (9, 3)], [(0, 0), (4, 8)]):
        lines = [Line("a line", points)]
        for axis in (plain, log):
            svg = Chart("t", "d", axis, axis, lines, [Mark(4, "m")]).svg()
            places = [float(value) for value in re.findall(r'c?[xy][12]?="([-\d.]+)"', svg)]
            assert all(-1 <= place <= 421 for place in places), svg
    assert [size(n) for n in (0, 512, 2048, 102137856)] == ["0 B", "512 B", "2 KiB", "97.4 MiB"]
    assert [short(n) for n in (5, 1000, 131072, 3e12)] == ["5", "1k", "131k", "3T"]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    assert main(["plan", "nemotron-h-8b", "--report", str(out), "--json"]) == 0
    assert f"milepost plan nemotron-h-8b --report {out} --json" in out.read_text()
    capsys.readouterr()
    assert main(["plan", "nemotron-h-8b", "--report", str(tmp_path / "no" / "where.html"), "--json"]) == 2
    assert "report=" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out_on_a_phone_or_a_desk(width: int, tmp_path: Path) -> None:
    """A page of our own holds the report in a frame of that width and writes down how wide it turned out."""
    (tmp_path / "report.html").write_text(page(plan("nemotron-h-8b")))
    probe = """
      const frame = document.querySelector("iframe");
      frame.onload = () => { const root = frame.contentDocument.documentElement;
        document.title = root.scrollWidth + " " + root.clientWidth; document.body.append(document.title); };
    """
    frame = f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
    (tmp_path / "probe.html").write_text(f"<!doctype html><title>-</title><body>{frame}<script>{probe}</script></body>")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-quic", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom",
        f"file://{tmp_path / 'probe.html'}",
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout  # type: ignore[arg-type]
    found = re.search(r"<title>(\d+) (\d+)</title>", dom)
    assert found, dom[-500:]
    assert int(found[1]) <= int(found[2]) <= width, f"{found[1]} wide in a window of {found[2]}"
