"""`LLM`: order, kinds of prompt, refusals, streams that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import milepost
from milepost.engine.stats import Timing
from milepost.errors import ConfigError, MilepostError, Overloaded, RequestError
from milepost.llm import LLM
from milepost.request import Delta, Request, SamplingParams
from tests.server.fake import FakeEngine, make_text

TEXT = make_text()


def test_answers_come_in_order_with_their_own_parameters() -> None:
    with LLM.over(FakeEngine(TEXT), TEXT) as llm:
        params = [SamplingParams(max_tokens=count) for count in (1, 3, 2)]
        done = llm.generate(["a", "bb", "ccc"], params)
    assert [completion.text for completion in done] == ["h", "hel", "he"]
    assert [completion.usage.prompt_tokens for completion in done] == [1, 2, 3]
    assert [len(completion.token_ids) for completion in done] == [1, 3, 2]


@pytest.mark.parametrize(("prompts", "lengths"), [("ab", [2]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2]), ([], [])])
def test_kinds_of_prompt(prompts: Any, lengths: list[int]) -> None:
    done = LLM.over(FakeEngine(TEXT), TEXT).generate(prompts)
    assert [completion.usage.prompt_tokens for completion in done] == lengths


def test_chat_and_several_chats() -> None:
    engine = FakeEngine(TEXT)
    llm = LLM.over(engine, TEXT)
    talk = [{"role": "user", "content": "hi"}]
    bounded = SamplingParams(max_tokens=20)
    [one] = llm.chat(talk, bounded)
    assert (one.text, one.finish_reason) == ("hello wörld", "stop")
    assert len(llm.chat([talk, talk], bounded)) == 2
    assert len(engine.requests[0].boundaries) == 1


def test_logprobs_are_kept() -> None:
    [done] = LLM.over(FakeEngine(TEXT), TEXT).generate("ab", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1))
    assert len(done.logprobs) == 3
    assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == 2


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM("clerk", max_num_seq=3)
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz' \(known: model, "):
        milepost.LLM(zzz=3)


def test_wrong_shapes_are_refused() -> None:
    llm = LLM.over(FakeEngine(TEXT), TEXT)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", [SamplingParams()] * 2)
    with pytest.raises(RequestError, match="mixes"):
        llm.generate([1, "a"])  # type: ignore[list-item]


def test_leaving_a_stream_aborts_it() -> None:
    engine = FakeEngine(TEXT, pause=0.01)
    stream = LLM.over(engine, TEXT).stream("a", SamplingParams(max_tokens=10))
    assert next(stream).text == "h"
    stream.close()  # type: ignore[attr-defined]
    assert engine.aborted == [engine.requests[0].id]


def test_a_failure_ends_all() -> None:
    engine = FakeEngine(TEXT, broken=True)
    with pytest.raises(MilepostError, match="out of luck"):
        LLM.over(engine, TEXT).generate(["a", "b"])


class _Narrow(FakeEngine):
    """Takes one request at a time."""

    def submit(
        self, request: Request, sink: Callable[[Delta], None], on_finish: Callable[[Timing], None] | None = None
    ) -> None:
        if len(self.requests) > sum(self.finished.values()):
            raise Overloaded("one at a time")
        super().submit(request, sink, on_finish)


def test_a_full_queue_is_waited_for() -> None:
    done = LLM.over(_Narrow(TEXT), TEXT).generate(["a"] * 4, SamplingParams(max_tokens=2))
    assert [completion.text for completion in done] == ["he"] * 4


def test_the_embedded_model() -> None:
    with LLM("clerk", kv_cache_memory_bytes=16 << 20) as llm:
        greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        first, second = llm.generate(["<|user|>hi there, who are you", "<|user|>hi there, who are we"], greedy)
        assert len(first.token_ids) == len(second.token_ids) == 4
        assert llm.generate("<|user|>hi there, who are you", greedy)[0].token_ids == first.token_ids
