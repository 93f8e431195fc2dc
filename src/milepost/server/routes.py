"""In: the smaller requests. Out: what is served, how it is doing, tokens and text.

The law kept here: none of these touches a running request, and none makes the loop wait for a step of the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from milepost import __version__
from milepost.errors import RequestError
from milepost.server.answers import token_name
from milepost.server.protocol import AnyBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from milepost.server.service import Service, read_body
from milepost.text import Prompt


async def health(service: Service, request: Request) -> Response:
    """200 while the engine runs, else 503. Loads nothing, so it may be asked often."""
    return Response(status_code=200 if service.engine.healthy else 503)


async def models(service: Service, request: Request) -> Response:
    """The one model, as a list."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(service: Service, request: Request) -> Response:
    """The one model, by name."""
    service.check_model(request.path_params["id"])
    return JSONResponse(_card(service))


async def metrics(service: Service, request: Request) -> Response:
    """Prometheus text."""
    return Response(await asyncio.to_thread(service.metrics.render), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(service: Service, request: Request) -> Response:
    """Milepost's version."""
    return JSONResponse({"version": __version__})


async def load(service: Service, request: Request) -> Response:
    """How many requests the server has."""
    stats = await asyncio.to_thread(service.engine.stats)
    return JSONResponse({"server_load": stats.running + stats.waiting})


async def server_info(service: Service, request: Request) -> Response:
    """Settings, totals, pools, and what an audit finds."""
    stats = asdict(await asyncio.to_thread(service.engine.stats))
    findings = await asyncio.to_thread(service.engine.audit)
    return JSONResponse(
        {
            "version": __version__,
            "model": service.model,
            "max_model_len": service.engine.max_model_len,
            "config": asdict(service.engine.config),
            "pools": stats.pop("pools"),
            "stats": stats,
            "audit": [{"place": str(finding.place), "message": str(finding.message)} for finding in findings],
        }
    )


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget all checkpoints that nothing uses."""
    await asyncio.to_thread(service.engine.reset_prefix_cache)
    return JSONResponse({})


async def tokenize(service: Service, request: Request) -> Response:
    """Tokens of a prompt, or of messages with the end of each."""
    prompt: Prompt
    body: TokenizeChatBody | TokenizeBody
    if "messages" in (await read_body(request, AnyBody)).model_fields_set:
        body = chat = await read_body(request, TokenizeChatBody)
        prompt = await asyncio.to_thread(lambda: service.text.chat(chat.messages, **chat.template_settings()))
    else:
        body = plain = await read_body(request, TokenizeBody)
        add = plain.add_special_tokens
        prompt = await asyncio.to_thread(lambda: service.text.prompt(plain.prompt, add_special_tokens=add))
    service.check_model(body.model)
    answer: dict[str, Any] = {
        "count": len(prompt.tokens),
        "max_model_len": service.engine.max_model_len,
        "tokens": list(prompt.tokens),
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [token_name(service.text.tokenizer, token) for token in prompt.tokens]
    if isinstance(body, TokenizeChatBody):
        answer["boundaries"] = [asdict(boundary) for boundary in prompt.boundaries]
    return JSONResponse(answer)


async def detokenize(service: Service, request: Request) -> Response:
    """Text of tokens."""
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    limit = service.engine.vocab_size
    for token in body.tokens:
        if not 0 <= token < limit:
            raise RequestError(f"tokens: token id {token} is not in 0..{limit - 1}", param="tokens")
    return JSONResponse({"prompt": service.text.tokenizer.decode(body.tokens)})


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "milepost",
        "root": service.engine.config.model,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
