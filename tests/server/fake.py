"""An engine that answers with its script, so that the server is tested in milliseconds; and a server over a real socket."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, trainers

from milepost.config import EngineConfig
from milepost.engine.stats import Pools, Stats, Timing
from milepost.errors import RequestError
from milepost.request import Delta, FinishReason, Request, TokenLogprobs, Usage
from milepost.text import ChatTemplate, Text, Tokenizer

Sink = Callable[[Delta], None]
TEMPLATE = (
    "{%- if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_text() -> Text:
    """One token per byte, two special tokens, a chat template."""
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|start|>", "<|end|>"]
    rust.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special, show_progress=False))
    tokenizer = Tokenizer(rust, {}, {})
    return Text(tokenizer, ChatTemplate(tokenizer, {"default": TEMPLATE}))


@dataclass
class FakeEngine:
    """Answers each request with `script`, a token at a time, `pause` seconds apart."""

    text: Text
    script: str = "hello wörld"
    pause: float = 0.0
    fault: Exception | None = None
    """Raised by `submit`."""
    broken: bool = False
    """Every request ends with an error after its first token."""
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="fake", served_model_name="fake"))
    max_model_len: int = 200
    vocab_size: int = 258
    healthy: bool = True
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    resets: int = 0

    def submit(self, request: Request, sink: Sink, on_finish: Callable[[Timing], None] | None = None) -> None:
        if self.fault is not None:
            raise self.fault
        if any(not 0 <= token < self.vocab_size for token in request.prompt):
            raise RequestError("prompt has a token id out of range", param="prompt")
        self.requests.append(request)
        threading.Thread(target=self._answer, args=(request, sink, on_finish), daemon=True).start()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stop(self) -> None:
        self.healthy = False

    def stats(self) -> Stats:
        pools = Pools(1000, 400, 0, 4, 100, 2, 200, 1, 3, 100, 16)
        generated = sum(self.finished.values())
        return Stats(
            1, 2, pools, 3, 40, 30, generated, 40, 10, 4, 1, {"message_end": 2}, {"no_room": 1}, 0, {"last_token": 1},
            {"tier: digest": 1}, {"slots": 2}, dict(self.finished),
        )  # fmt: skip

    def audit(self) -> list[object]:
        return []

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def _answer(self, request: Request, sink: Sink, on_finish: Callable[[Timing], None] | None) -> None:
        params, watch = request.params, request.watch
        assert watch is not None and params.max_tokens is not None
        script = list(self.text.tokenizer.encode(self.script).ids)
        finish: FinishReason | None = None
        for count, token in enumerate([*script, 1][: params.max_tokens], start=1):
            time.sleep(self.pause)
            text = watch.push(token)
            if request.id in self.aborted:
                finish = "abort"
            elif self.broken:
                finish = "error"
            elif watch.stop is not None or token == 1:
                finish = "stop"
            elif count == params.max_tokens:
                finish = "length"
            if finish:
                text += watch.flush()
                self.finished[finish] += 1
            sink(
                Delta(
                    request.id,
                    (token,),
                    text,
                    Usage(len(request.prompt), count, min(4, len(request.prompt) - 1), {"last_token": 1}),
                    () if params.logprobs is None else (scores(token, params.logprobs),),
                    self._of_prompt(request) if count == 1 else None,
                    finish,
                    watch.stop,
                    "out of luck" if finish == "error" else None,
                )
            )
            if finish:
                break
        if on_finish is not None:
            on_finish(Timing(0.01, 0.02, 0.03))

    @staticmethod
    def _of_prompt(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        count = request.params.prompt_logprobs
        return None if count is None else (None, *(scores(token, count) for token in request.prompt[1:]))


def scores(token: int, count: int) -> TokenLogprobs:
    """The token is the likeliest but one."""
    return TokenLogprobs(token, -1.0, 2, ((70, -0.5), (token, -1.0), (71, float("-inf")))[:count])


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """The application behind a real socket; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Raises TimeoutError if it takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)
