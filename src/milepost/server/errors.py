"""In: an exception. Out: a status and OpenAI's error object.

The law kept here: every failure reaches the client as `{"error": {"message", "type", "param", "code"}}`, and only
what Milepost didn't foresee is a 500.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from milepost.errors import MilepostError, Overloaded, RequestError, UnknownModel

log = logging.getLogger("milepost.server")


class GenerationFailed(MilepostError):
    """The engine gave up on a request (its delta has finish="error")."""


class WrongKey(RequestError):
    """No API key, or not the right one."""

    status = 401

    def __init__(self) -> None:
        super().__init__("a valid API key is needed: `Authorization: Bearer KEY`", code="invalid_api_key")


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, error object and headers for an exception."""
    match error:
        case UnknownModel():
            return error.status, _body(error, "invalid_request_error", error.param, error.code or "model_not_found"), {}
        case WrongKey():
            headers = {"WWW-Authenticate": "Bearer"}
            return error.status, _body(error, "authentication_error", None, error.code), headers
        case RequestError():
            return error.status, _body(error, "invalid_request_error", error.param, error.code), {}
        case ValidationError():
            return _describe_validation(error)
        case Overloaded():
            return 503, _body(error, "overloaded_error", None, "overloaded"), {"Retry-After": str(error.retry_after)}
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "internal_error"
            return error.status_code, _body(error.detail, kind, None, None), dict(error.headers or {})
        case MilepostError():
            log.error("request failed: %s", error)
            return 500, _body(error, "internal_error", None, None), {}
        case _:
            log.error("unforeseen error", exc_info=error)
            return 500, _body(f"internal error ({type(error).__name__})", "internal_error", None, None), {}


def error_response(error: BaseException) -> JSONResponse:
    """The answer to a request that failed."""
    status, body, headers = describe(error)
    return JSONResponse(body, status_code=status, headers=headers)


def _describe_validation(error: ValidationError) -> tuple[int, dict[str, Any], dict[str, str]]:
    first, *rest = error.errors(include_url=False, include_context=False, include_input=False)
    param = str(first["loc"][0]) if first["loc"] else None
    where = f"{param}: " if param else ""
    more = f" (and {len(rest)} more)" if rest and any(item["loc"][:1] != first["loc"][:1] for item in rest) else ""
    return 400, _body(f"{where}{first['msg']}{more}", "invalid_request_error", param, "invalid_type"), {}


def _body(message: object, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": str(message), "type": kind, "param": param, "code": code}}
