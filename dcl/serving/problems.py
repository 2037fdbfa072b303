"""Errors as `application/problem+json` (RFC 9457), and the limits of a request."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcl.errors import TraceError

PROBLEM = "application/problem+json"
LINGER_S = 1.0
_TITLES = {
    400: "The request cannot be read",
    401: "The API key is missing or wrong",
    404: "There is no such thing here",
    405: "This cannot be done here",
    408: "The request came too slowly",
    413: "The request is too large",
    415: "This type of content is not taken",
    422: "The request does not fit the schema",
    429: "Too much waits already",
    500: "This is a fault of the server",
    503: "The server cannot do this now",
}


class FieldError(BaseModel):
    """What is wrong with one field."""

    pointer: str = Field(description="JSON Pointer (RFC 6901) to it, in the body or parameters")
    detail: str


class ProblemDetails(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = None


class Reply(JSONResponse):
    """JSON in ASCII, so that lone surrogates of a log survive."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


class ProblemError(Exception):
    """Ends a request with an error.

    Args:
        status: HTTP status.
        detail: What happened, for people.
        retry_s: Seconds after which to try again; None where that is no use.
    """

    def __init__(self, status: int, detail: str, *, retry_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = {} if retry_s is None else {"Retry-After": str(retry_s)}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of an endpoint, for its OpenAPI description.

    Args:
        statuses: HTTP statuses.
    """
    content = {PROBLEM: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": _TITLES[status], "content": content} for status in statuses}


def reply(
    status: int,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: dict[str, str] | None = None,
) -> Reply:
    """The response of an error.

    Args:
        status: HTTP status.
        detail: What happened, for people.
        errors: Fields that are wrong.
        headers: More headers.
    """
    title = _TITLES.get(status, "The request failed")
    body = ProblemDetails(title=title, status=status, detail=detail, errors=list(errors) or None)
    return Reply(body.model_dump(exclude_none=True), status, headers, PROBLEM)


def handle_problems(app: FastAPI) -> None:
    """Have an application answer every error as a problem.

    Args:
        app: The application.
    """

    @app.exception_handler(ProblemError)
    async def known(request: Request, error: ProblemError) -> Reply:
        return reply(error.status, error.detail, headers=error.headers)

    @app.exception_handler(TraceError)
    async def trace(request: Request, error: TraceError) -> Reply:
        pointer = "/" + error.place.replace("[", "/").replace("]", "").replace(".", "/")
        fields = [FieldError(pointer=pointer, detail=error.problem)]
        return reply(422, str(error), errors=fields)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Reply:
        fields = [
            FieldError(
                pointer="/" + "/".join(str(part) for part in entry["loc"][1:]), detail=entry["msg"]
            )
            for entry in error.errors()
        ]
        if any(entry["type"] == "json_invalid" for entry in error.errors()):
            return reply(400, "expected JSON", errors=fields)
        return reply(422, f"{fields[0].pointer}: {fields[0].detail}", errors=fields)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Reply:
        return reply(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Reply:
        return reply(500, type(error).__name__)


class Limits:
    """Reads a request whole, within bounds, before anybody works on it; checks the API key.

    Args:
        app: The application behind it.
        body_bytes: Largest body.
        receive_s: Seconds that a body may take to come in.
        api_key: Key that `Authorization: Bearer` must carry; None asks for none.
    """

    def __init__(
        self, app: ASGIApp, *, body_bytes: int, receive_s: float, api_key: str | None
    ) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._receive_s = receive_s
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is over a limit; hand on all others."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, unread = dict(scope["headers"]), _Body(receive)
        if not self._may_enter(scope["path"], headers.get(b"authorization", b"")):
            detail = "expected Authorization: Bearer KEY"
            refusal = reply(401, detail, headers={"WWW-Authenticate": "Bearer"})
        else:
            body = await self._read(headers, unread)
            if isinstance(body, bytes):
                await self._app(scope, _replay(body, receive), send)
                return
            refusal = body
        refusal.headers["Connection"] = "close"
        await refusal(scope, unread, _lingering(unread, send, self._receive_s))

    def _may_enter(self, path: str, given: bytes) -> bool:
        """Whether a request has the key; health is everybody's."""
        if self._api_key is None or path in ("/healthz", "/readyz"):
            return True
        scheme, _, key = given.partition(b" ")
        expected = self._api_key.encode("utf-8", "surrogateescape")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | Reply:
        """The whole body, or what is wrong with it."""
        length = headers.get(b"content-length", b"0")
        too_large = reply(413, f"expected at most {self._body_bytes} bytes")
        if length.isdigit() and int(length) > self._body_bytes:
            return too_large
        try:
            body = await asyncio.wait_for(self._collect(receive), self._receive_s)
        except asyncio.TimeoutError:
            return reply(408, f"expected the whole request within {self._receive_s:g} seconds")
        return too_large if body is None else body

    async def _collect(self, receive: Receive) -> bytes | None:
        """The body; None if it is too large."""
        parts, size = [], 0
        while True:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size > self._body_bytes:
                return None
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)


class _Body:
    """The channel of a request, which remembers whether more of its body is to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self._more = bool(message.get("more_body"))
        return message

    async def drain(self) -> None:
        """Read and forget what is left, until the client is silent for `LINGER_S`."""
        with suppress(asyncio.TimeoutError):
            while self._more:
                await asyncio.wait_for(self(), LINGER_S)


def _lingering(body: _Body, send: Send, limit_s: float) -> Send:
    """A channel that ends an answer when the client has sent all, but not much later.

    A connection that is closed while bytes of the request are unread is reset, and a reset may
    overtake the answer: the client would see a broken connection and not the refusal.

    Args:
        body: What is left of the request.
        send: The channel of the answer.
        limit_s: Seconds after which it ends in any case.
    """

    async def send_then_drain(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(body.drain(), limit_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_then_drain


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body, then whatever the client does next."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
