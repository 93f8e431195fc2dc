"""Whatever stands in a body, the answer is a completion or a JSON error of the client's, never a fault of ours."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milepost.server.protocol import ChatBody, CompletionBody
from tests.server.conftest import Served

scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([2**31, -(2**64), 10**40, 0.5, -1e308, 1e300])
    | st.text(max_size=6)
)  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "cache_control"]), junk), max_size=3)
names = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "bad_words", "suffix", "documents"} - {"model"})
bodies = st.dictionaries(st.sampled_from(names), junk, max_size=4)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies, messages | st.just([{"role": "user", "content": "hi"}]))
def test_junk_is_never_our_fault(served: Served, body: dict[str, Any], talk: list[Any]) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": talk})):
        answer = served.post(path, **prompt | body)
        assert answer.status_code in (200, 400), (path, answer.text)
        if answer.status_code == 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif body.get("stream"):
            assert '"error"' not in answer.text and answer.text.endswith("data: [DONE]\n\n")
