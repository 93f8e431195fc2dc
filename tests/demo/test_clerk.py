"""The embedded model does its job: directories that it never saw, several turns each, through the whole engine."""

from __future__ import annotations

import random

from training.data import MISSING, make_conversation

from milepost import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


def test_answers_from_directories_of_32_unseen_names_over_ten_turns() -> None:
    """Names and numbers are of the half that training never draws from. The model card has the measured accuracy;
    the mark here is lower, since forty questions are few."""
    rng = random.Random(17)
    right = asked = 0
    with LLM("clerk", max_model_len=4096) as llm:
        for _ in range(4):
            conversation = make_conversation(rng, 32, 10, "test", missing_rate=0.0)
            messages = [{"role": "system", "content": conversation.system}]
            read = 0
            for turn in conversation.turns:
                messages.append({"role": "user", "content": turn.question})
                answer = llm.chat(messages, GREEDY)[0]
                messages.append({"role": "assistant", "content": answer.text})
                assert answer.usage.cached_tokens >= read, "an earlier turn was computed again"
                read = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
                right += answer.text == turn.answer
                asked += 1
    assert asked == 40
    assert right >= 36, f"{right} of {asked} right"


def test_says_so_politely_when_a_name_is_not_there() -> None:
    rng = random.Random(3)
    conversation = make_conversation(rng, 16, 1, "test", missing_rate=0.0)
    polite = 0
    with LLM("clerk") as llm:
        for name in ("Zorvan", "Quibble", "Marrowick", "Ostrander", "Fenwyck", "Tolliver"):
            messages = [{"role": "system", "content": conversation.system}, {"role": "user", "content": f"{name}?"}]
            polite += llm.chat(messages, GREEDY)[0].text == MISSING
    assert polite >= 4, f"{polite} of 6 unknown names were said to be unknown"
