"""An OpenAI-compatible server on loopback that misbehaves as it is told, request by request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Answer: 4"},
        }
    ],
    "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
}


Text = str | Callable[[dict[str, Any]], str] | None


class FaultServer(ThreadingHTTPServer):
    """Serves one fault of the list a request, and good replies when the list is empty.

    Args:
        faults: Names of faults, see `Handler`.
        text: What good replies say, by the request if it is a function; None keeps the default.
    """

    daemon_threads = True

    def __init__(self, faults: list[str], text: Text = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = list(faults)
        self.text = text
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = 0
        self.most = 0
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the game."""


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server: FaultServer

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.request_body = body
        with server.guard:
            server.requests.append(body)
            server.headers.append({k.lower(): v for k, v in self.headers.items()})
            fault = server.faults.pop(0) if server.faults else "good"
            server.busy += 1
            server.most = max(server.most, server.busy)
        try:
            getattr(self, fault)()
        finally:
            with server.guard:
                server.busy -= 1

    def good(self) -> None:
        reply = json.loads(json.dumps(GOOD))
        text = self.server.text
        if text is not None:
            text = text if isinstance(text, str) else text(self.request_body)
            reply["choices"][0]["message"]["content"] = text
        self.send(json.dumps(reply))

    def last(self) -> None:
        self.good()
        self.close_connection = True

    def wait(self) -> None:
        time.sleep(0.05)
        self.good()

    def send(
        self, text: str, status: int = 200, kind: str = "application/json", **more: str
    ) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def limited(self) -> None:
        self.send('{"error": {"message": "slow down"}}', 429, Retry_After="0.01")

    def broken(self) -> None:
        self.send('{"error": {"message": "oops"}}', 500)

    def unavailable(self) -> None:
        self.send("<html>down</html>", 503, "text/html")

    def refused(self) -> None:
        key = self.headers["Authorization"]
        self.send(json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}}), 401)

    def cut(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "5000")
        self.end_headers()
        self.wfile.write(b'{"choices": [{"mess')
        self.close_connection = True

    def hang_up(self) -> None:
        self.close_connection = True

    def slow(self) -> None:
        data = json.dumps(GOOD).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for byte in data:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.05)

    def malformed(self) -> None:
        self.send('{"choices": [')

    def empty(self) -> None:
        self.send(json.dumps(GOOD | {"choices": []}))

    def silent(self) -> None:
        choices = [{"index": 0, "message": {"role": "assistant", "content": None}}]
        self.send(json.dumps(GOOD | {"choices": choices}))

    def blank(self) -> None:
        choices = [{"index": 0, "message": {"role": "assistant", "content": "  "}}]
        self.send(json.dumps(GOOD | {"choices": choices}))

    def page(self) -> None:
        self.send("<html>Sign in</html>", 200, "text/html")

    def list(self) -> None:
        self.send("[1, 2]")


FAULTS = [
    "limited",
    "broken",
    "unavailable",
    "cut",
    "hang_up",
    "malformed",
    "empty",
    "silent",
    "blank",
    "page",
    "list",
]


@contextmanager
def serve(*faults: str, text: Text = None) -> Iterator[FaultServer]:
    """A running server."""
    server = FaultServer(list(faults), text)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
