"""Every family against transformers' uncut forward, on the parity bench's cases: logits, every state, 64 greedy tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from milepost.bench.parity.cases import TOLERANCE, Case, cases
from milepost.bench.parity.compare import ANSWER, CAPTURES
from milepost.bench.parity.report import rows_of, run
from milepost.models import families

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_logits_states_and_greedy_tokens(case: Case) -> None:
    outcome = run(case)
    assert list(outcome.errors) == ["whole", "pieces", *(f"capture at {offset}" for offset, _ in CAPTURES)]
    for way, errors in outcome.errors.items():
        for name, error in errors.items():
            assert error < case.tolerance, f"{way}: {name}: relative error {error:.1e}"
    assert outcome.greedy_equal and len(outcome.picked) == ANSWER
    assert len(set(outcome.picked)) > 3, "random weights that repeat one token test nothing"
    rows = rows_of(case, outcome)
    assert rows[0].component == "logits" and all(row.good for row in rows)
    assert all(row.reference_rel_err < case.tolerance for row in rows)


def test_every_family_has_three_cases_or_more_of_its_own_names() -> None:
    counts = Counter(case.family for case in cases())
    assert set(counts) == {family.name for family in families()}
    assert min(counts.values()) >= 3
    assert len({case.name for case in cases()}) == len(cases())


def test_a_looser_tolerance_has_its_reason() -> None:
    for case in cases():
        assert case.tolerance == TOLERANCE or (case.tolerance <= 1e-3 and case.reason), case.name
