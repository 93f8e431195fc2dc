"""Placement: positions and reasons, as plain integers in and out."""

from __future__ import annotations

from milepost.state.placement import Spot, spots


def _at(**changes: object) -> tuple[Spot, ...]:
    plain = {"prompt_tokens": 100, "resumed_at": 0, "boundaries": (), "shared_tokens": 0, "present": (), "interval": None}
    return spots(**{**plain, **changes})  # type: ignore[arg-type]


def test_the_position_before_the_last_token_always() -> None:
    assert _at() == (Spot(99, "before_last"),)
    assert _at(prompt_tokens=1) == ()


def test_boundaries_branches_and_spacing() -> None:
    found = _at(boundaries=[(20, "message_end"), (60, "client_mark"), (100, "message_end")], shared_tokens=50, interval=30)
    assert found == (
        Spot(20, "message_end"), Spot(30, "spacing"), Spot(50, "branch"), Spot(60, "client_mark"), Spot(90, "spacing"),
        Spot(99, "before_last"),
    )  # fmt: skip


def test_nothing_before_the_resumption_and_nothing_twice() -> None:
    assert _at(boundaries=[(20, "message_end"), (60, "message_end")], resumed_at=20, present=(60,)) == (
        Spot(99, "before_last"),
    )
    assert _at(resumed_at=99) == ()


def test_a_prompt_that_only_extends_what_was_seen_has_no_branch_of_its_own() -> None:
    assert _at(shared_tokens=99) == (Spot(99, "before_last"),)
