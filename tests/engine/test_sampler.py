"""The sampler, on logits by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.engine.sampler import Picker, logprobs_of
from milepost.request import SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, 2.5])


def picker(seed: int = 1, prompt: tuple[int, ...] = (0,), eos: tuple[int, ...] = (1,), **params: object) -> Picker:
    return Picker(SamplingParams(**params), seed=seed, prompt=torch.tensor(prompt), eos=eos, vocab_size=6)  # type: ignore[arg-type]


def _seen(p: Picker, draws: int = 300) -> set[int]:
    return {p.pick(LOGITS)[0] for _ in range(draws)}


def test_greedy_takes_the_likeliest() -> None:
    assert picker(temperature=0.0).pick(LOGITS)[0] == 1


def test_top_k_top_p_and_min_p_close_off_the_rest() -> None:
    assert _seen(picker(top_k=2)) == {1, 5}
    assert _seen(picker(min_p=0.5)) == {1, 5}
    probabilities = LOGITS.softmax(-1).sort(descending=True).values
    assert _seen(picker(top_p=float(probabilities[0]) - 0.01)) == {1}
    assert _seen(picker(top_p=float(probabilities[0]) + 0.01)) == {1, 5}
    assert _seen(picker(allowed_token_ids=(3, 4))) == {3, 4}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**62), temperature=st.floats(0.1, 3.0))
def test_a_seed_gives_the_same_tokens_and_another_generator_does_not_matter(seed: int, temperature: float) -> None:
    first, second = picker(seed, temperature=temperature), picker(seed, temperature=temperature)
    torch.manual_seed(seed % 1000)
    assert [first.pick(LOGITS)[0] for _ in range(8)] == [second.pick(LOGITS)[0] for _ in range(8)]


def test_draws_follow_the_distribution() -> None:
    p = picker(temperature=1.0)
    counts = torch.zeros(6)
    for _ in range(4000):
        counts[p.pick(LOGITS)[0]] += 1
    assert (counts / 4000 - LOGITS.softmax(-1)).abs().max() < 0.03


def test_penalties_and_bias_change_the_choice() -> None:
    assert picker(temperature=0.0, logit_bias={4: 10.0}).pick(LOGITS)[0] == 4
    often = picker(temperature=0.0, frequency_penalty=2.0)
    assert [often.pick(LOGITS)[0] for _ in range(3)] == [1, 5, 2]
    once = picker(temperature=0.0, presence_penalty=1.0)
    assert [once.pick(LOGITS)[0] for _ in range(4)] == [1, 5, 1, 1], "presence counts once, however often"
    assert picker(temperature=0.0, repetition_penalty=2.0, prompt=(1, 5)).pick(LOGITS)[0] == 2


def test_no_end_before_min_tokens() -> None:
    p = picker(temperature=0.0, min_tokens=2, max_tokens=9)
    assert [p.pick(LOGITS)[0] for _ in range(3)] == [5, 5, 1]


def test_logprobs_are_of_the_models_own_logits() -> None:
    token, scores = picker(temperature=0.0, logit_bias={4: 10.0}, logprobs=2).pick(LOGITS)
    assert scores is not None and scores.token == token == 4
    assert abs(scores.logprob - float(LOGITS.log_softmax(-1)[4])) < 1e-6
    assert scores.rank == 6
    assert [each[0] for each in scores.top] == [1, 5]
    assert logprobs_of(LOGITS, 1, 0).top == ()
