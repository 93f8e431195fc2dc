"""What a backend is wrongly given is refused before any state is written, and a choice of backend says why."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost.kernels
from milepost.kernels.protocol import OPERATIONS, Capabilities, Capture, KernelBackend, Operation, Run
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.select import names, select
from milepost.kernels.torch_backend import TorchBackend
from tests.kernels import operations
from tests.kernels.arena import CPU, Inputs, Sizes, random_inputs, run_all
from tests.kernels.operations import CASES, RECURRENT

GOOD = Run((0, 3, 4), (0, 5), (0, 1), (True, False), ((0,), (1, 2)), 4, (Capture(0, 2, 2),))
BACKENDS = pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])


@BACKENDS
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots": (0, 0)}, "slots"),
        ({"starts": (0, 3, 3)}, "sequence 1"),
        ({"starts": (1, 3, 4)}, "starts"),
        ({"starts": (0, 4)}, "starts"),
        ({"positions": (0, -1)}, "sequence 1"),
        ({"positions": (7, 5)}, "fresh"),
        ({"fresh": (True,)}, "fresh"),
        ({"blocks": ((0,),)}, "blocks"),
        ({"captures": (Capture(2, 1, 3),)}, "sequence"),
        ({"captures": (Capture(0, 4, 3),)}, "outside"),
        ({"captures": (Capture(0, 0, 3),)}, "outside"),
        ({"captures": (Capture(0, 1, 1),)}, "live slot"),
        ({"captures": (Capture(0, 1, 3), Capture(1, 1, 3))}, "target"),
    ],
)
def test_a_run_that_contradicts_itself(backend: KernelBackend, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        backend.prepare(replace(GOOD, **change), CPU)


@BACKENDS
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(5, 4, 8)}, "x has shape"),
        ({"dt": torch.zeros(4, 3)}, "dt has shape"),
        ({"b": torch.zeros(4, 3, 16), "c": torch.zeros(4, 3, 16)}, "groups=3"),
        ({"states": torch.zeros(2, 4, 8, 16)}, "outside a pool of 2"),
        ({"windows": torch.zeros(4, 10, 4)}, "pool has shape"),
        ({"bias": torch.zeros(9)}, "bias has shape"),
        ({"k": torch.zeros(4, 1, 8)}, "kv_heads=2|k has shape|doesn't divide"),
        ({"q": torch.zeros(4, 3, 8)}, "kv_heads=2"),
    ],
)
def test_arrays_that_do_not_fit(backend: KernelBackend, change: dict[str, torch.Tensor], named: str) -> None:
    given = replace(random_inputs(GOOD, Sizes(), torch.float32, 0), **change)
    with pytest.raises(ValueError, match=named):
        _run_plain(backend, GOOD, given)


@BACKENDS
def test_blocks_that_do_not_reach_the_last_token(backend: KernelBackend) -> None:
    given = random_inputs(GOOD, Sizes(), torch.float32, 0)
    with pytest.raises(ValueError, match="sequence 1 has 6 tokens but 1 blocks"):
        run_all(backend, replace(GOOD, blocks=((0,), (1,))), given)


@BACKENDS
@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gated_delta", {"q": torch.zeros(4, 2, 5)}, "q has shape"),
        ("gated_delta", {"k": torch.zeros(4, 2)}, "k has 2 dimensions"),
        ("gated_delta", {"q": torch.zeros(4, 3, 4), "k": torch.zeros(4, 3, 4)}, "key_heads=3"),
        ("gated_delta", {"g": torch.zeros(4, 4, 4)}, "g has shape"),
        ("gated_delta", {"beta": torch.zeros(4, 2)}, "beta has shape"),
        ("kda", {"g": torch.zeros(4, 2)}, "g has shape"),
        ("kda", {"q": torch.zeros(4, 1, 4), "k": torch.zeros(4, 1, 4)}, "key_heads=1"),
        ("mamba1", {"dt": torch.zeros(4, 1)}, "dt has shape"),
        ("mamba1", {"b": torch.zeros(4, 2)}, "b has shape"),
        ("rglru", {"x": torch.zeros(4, 4)}, "x has shape"),
        ("rglru", {"log_a": torch.zeros(3, 5)}, "log_a has shape"),
        ("window", {"k": torch.zeros(4, 4, 3)}, "k has shape"),
        ("window", {"v": torch.zeros(4, 2, 4)}, "v has shape"),
        ("latent", {"latent": torch.zeros(4, 6)}, "latent has shape"),
        ("latent", {"q": torch.zeros(4, 3, 6)}, "q has shape"),
    ],
)
def test_rows_that_do_not_fit(backend: KernelBackend, name: str, change: dict[str, torch.Tensor], named: str) -> None:
    given = CASES[name].given(GOOD, torch.float32, 0)
    with pytest.raises(ValueError, match=named):
        CASES[name].run(backend, GOOD, replace(given, rows={**given.rows, **change}))


@BACKENDS
@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_is_not_there_leaves_the_others_alone(backend: KernelBackend, name: str) -> None:
    given = CASES[name].given(GOOD, torch.float32, 0)
    short, before = given.pool[:2], given.pool[:2].clone()
    with pytest.raises(ValueError, match="index 2 is outside a pool of 2"):
        CASES[name].call(backend, given, short, backend.prepare(GOOD, CPU))
    torch.testing.assert_close(short, before, rtol=0, atol=0, equal_nan=True)


@BACKENDS
def test_blocks_that_are_gone(backend: KernelBackend) -> None:
    # Position 9 with a window of 5 sees positions 5 to 9: the first of three blocks may be gone, the second may not.
    one, two = (-1, 0, 1), (-1, -1, 1)
    for window, blocks, refused in ((5, one, False), (5, two, True), (6, one, False), (7, one, True), (None, one, True)):
        case = operations.attention("window", window=window)
        run = Run((0, 1), (9,), (0,), (False,), (blocks,), 4)
        given = case.given(run, torch.float32, 0)
        if refused:
            with pytest.raises(ValueError, match="gone"):
                case.run(backend, run, given)
        else:
            assert not torch.isnan(case.run(backend, run, given)[0]).any()
    given, run = case.given(run, torch.float32, 0), replace(run, blocks=((2, 1, -1),))
    with pytest.raises(ValueError, match="gone"):
        backend.write_kv(given.rows["k"], given.rows["v"], given.pool, backend.prepare(run, CPU))
    latent = CASES["latent"]
    with pytest.raises(ValueError, match="gone"):
        latent.run(backend, run, latent.given(run, torch.float32, 0))


@BACKENDS
@pytest.mark.parametrize(
    ("case", "named"),
    [
        (operations.attention("window", window=0), "window must be at least 1"),
        (operations.attention("softcap", softcap=0.0), "softcap must be above 0"),
        (operations.latent(value_dim=0), "value_dim=0"),
        (operations.latent(width=4, value_dim=5), "value_dim=5"),
    ],
)
def test_numbers_that_make_no_sense(backend: KernelBackend, case: operations.Case, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        case.run(backend, GOOD, case.given(GOOD, torch.float32, 0))


def _run_plain(backend: KernelBackend, run: Run, given: Inputs) -> None:
    step = backend.prepare(run, CPU)
    backend.scan_mamba2(given.x, given.dt, given.a, given.b, given.c, given.d, given.states, step)
    backend.convolution(given.columns, given.weight, given.bias, given.windows, step)
    backend.write_kv(given.k, given.v, given.kv, step)
    backend.attention(given.q, given.kv, 0.35, step)


def test_a_step_of_another_backend() -> None:
    given = random_inputs(GOOD, Sizes(), torch.float32, 0)
    step = ReferenceBackend().prepare(GOOD, CPU)
    with pytest.raises(TypeError, match="another backend"):
        TorchBackend().attention(given.q, given.kv, 0.35, step)


def test_chunk_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk"):
        TorchBackend(chunk=0)


NEEDS: dict[str, Any] = {
    "device": CPU,
    "dtype": torch.bfloat16,
    "state_dtype": torch.float32,
    "state_size": 128,
    "head_dim": 64,
}


def test_auto_takes_torch_and_says_why() -> None:
    choice = select("mamba2", "auto", **NEEDS)
    assert choice.name == "torch" and isinstance(choice.backend, TorchBackend)
    assert "torch: chosen" in choice.reasons[0]


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_backend_asked_for_by_name(name: str) -> None:
    assert select("attention", name, **{**NEEDS, "state_size": None}).backend.capabilities.name == name


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_torch_has_every_operation(operation: Operation) -> None:
    assert select(operation, "auto", **{**NEEDS, "state_size": None, "head_dim": None}).name == "torch"


def test_an_operation_that_a_backend_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = (torch.float32, torch.bfloat16)
    without = Capabilities("torch", ("cpu",), floats, floats, operations=OPERATIONS - {"kda"})
    monkeypatch.setattr(TorchBackend, "capabilities", without)
    with pytest.raises(ValueError, match=r"operation kda is not supported \(supported: attention, .*rglru\)"):
        select("kda", "auto", **NEEDS)
    assert select("mamba2", "auto", **NEEDS).name == "torch"


def test_refused_choices_name_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"'fast' for mamba2 is unknown.*auto, torch, reference"):
        select("mamba2", "fast", **NEEDS)
    with pytest.raises(ValueError, match=r"state dtype int8 is not supported.*float32"):
        select("mamba2", "torch", **{**NEEDS, "state_dtype": torch.int8})
    with pytest.raises(ValueError, match="device mps"):
        select("mamba2", "auto", **{**NEEDS, "device": torch.device("mps")})
    assert names()[0] == "auto"


def test_kernels_import_nothing_else_of_ours() -> None:
    folder = Path(milepost.kernels.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            )  # fmt: skip
            for module in modules:
                assert not module.startswith("milepost") or module.startswith("milepost.kernels"), f"{file}: {module}"
