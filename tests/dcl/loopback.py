"""An endpoint on this machine that speaks the OpenAI API and says what a test tells it to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | list[dict[str, Any]] | None
"""A chat message, the output items of a response, or None for an error."""

_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class Endpoint(ThreadingHTTPServer):
    """Gives the answers in their order; `asked` holds what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Base URL for a client."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        answer = self.server.answers.pop(0)
        if answer is None:
            self.send_error(400, "no")
        elif body.get("stream"):
            self._reply("text/event-stream", "".join(_chunks(answer)))
        else:
            reply = _response(answer, body) if isinstance(answer, list) else _completion(answer)
            self._reply("application/json", json.dumps(reply))

    def _reply(self, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    return {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [choice], "usage": _USAGE,
    }  # fmt: skip


def _chunks(answer: Answer) -> Iterator[str]:
    assert isinstance(answer, dict)
    calls = answer.get("tool_calls") or []
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{"content": word} for word in re.findall(r"\S+\s*", answer.get("content") or "")]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    for delta in deltas:
        chunk = {
            "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }  # fmt: skip
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _response(items: list[dict[str, Any]], body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "r", "object": "response", "created_at": 1, "model": "m", "output": items,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "completed",
        "instructions": body.get("instructions"),
        "usage": {
            "input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def call(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    """A chat message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """An endpoint that listens within the block."""
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
