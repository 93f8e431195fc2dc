"""The smaller routes, and the metrics."""

from __future__ import annotations

from tests.server.conftest import Served


def test_models(served: Served) -> None:
    [card] = served.client.models.list().data
    assert card.id == "fake"
    assert card.model_extra is not None and card.model_extra["max_model_len"] == 200
    assert served.client.models.retrieve("fake").owned_by == "milepost"


def test_health_follows_the_engine(served: Served) -> None:
    for path in ("/health", "/ping"):
        assert served.http.get(path).status_code == 200
    served.engine.healthy = False
    assert served.http.get("/health").status_code == 503


def test_tokenize_and_back(served: Served) -> None:
    answer = served.post("/tokenize", model="fake", prompt="héy", return_token_strs=True).json()
    assert (answer["count"], answer["max_model_len"]) == (4, 200)
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert served.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "héy"}
    assert served.post("/detokenize", tokens=[999]).status_code == 400
    assert served.post("/tokenize", model="no", prompt="x").status_code == 404


def test_tokenize_messages(served: Served) -> None:
    answer = served.post("/tokenize", messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False).json()
    assert answer["boundaries"] == [{"position": answer["count"], "reason": "message_end"}]


def test_the_others(served: Served) -> None:
    assert set(served.http.get("/version").json()) == {"version"}
    assert served.http.get("/load").json() == {"server_load": 3}
    info = served.http.get("/server_info").json()
    assert info["pools"]["slots_total"] == 4 and info["audit"] == [] and info["config"]["block_size"] == 16
    assert served.http.post("/reset_prefix_cache").status_code == 200
    assert served.engine.resets == 1


def test_metrics_have_the_names_that_boards_know(served: Served) -> None:
    served.post("/v1/completions", prompt="a", max_tokens=3)
    lines = served.http.get("/metrics").text.splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    name = 'model_name="fake"'
    assert values[f"vllm:num_requests_running{{{name}}}"] == 1
    assert values[f"vllm:num_requests_waiting{{{name}}}"] == 2
    assert values[f"vllm:kv_cache_usage_perc{{{name}}}"] == 0.1
    assert values[f"vllm:prefix_cache_queries_total{{{name}}}"] == 40
    assert values[f"vllm:prefix_cache_hits_total{{{name}}}"] == 10
    assert values[f"vllm:prompt_tokens_total{{{name}}}"] == 40
    assert values[f'vllm:request_success_total{{finished_reason="length",{name}}}'] == 1
    assert values[f'milepost:recomputed_tokens_total{{{name},reason="last_token"}}'] == 1
    assert values[f'milepost:checkpoints{{{name},tier="arena"}}'] == 2
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                      "request_decode_time", "inter_token_latency"):  # fmt: skip
        assert values[f"vllm:{histogram}_seconds_count{{{name}}}"] >= 1
    assert any(line.startswith("vllm:cache_config_info{") for line in lines)
