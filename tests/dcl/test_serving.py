from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import schemathesis
import uvicorn
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.core.result import Ok
from tiny import make_run, write_model
from typer.testing import CliRunner

from dcl import cli
from dcl.attribution import Attributor
from dcl.formats import otlp
from dcl.live.monitor import QueueBounds
from dcl.runtime import load
from dcl.serving.app import ServerSettings, TurnBody, create_app
from dcl.trajectory import TurnKind

SAID = (("a", "the sum"), ("b", "is wrong"), ("a", "again"))
RUN = make_run(*SAID, id="r 1/ü?")
TURNS = [turn.to_dict() for turn in RUN.turns]
PROBLEM = "application/problem+json"

Row = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


class Gate:
    """The scorer of a model that waits for a test to open it."""

    def __init__(self, model: Path) -> None:
        attributor = load(model, threads=1)
        self.inner: Any = attributor.scorer
        self.attributor = Attributor(attributor.bagger, self, attributor.calibration)
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, bags: Any) -> Any:
        self._wait()
        return self.inner(bags)

    def encoder(self, windows: Any) -> Any:
        return self.inner.encoder(windows)

    def score(self, *args: Any) -> Any:
        self._wait()
        return self.inner.score(*args)

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()

    def _wait(self) -> None:
        self.reached.set()
        self.open.wait()


@contextmanager
def serving(load_model: Any, settings: ServerSettings | None = None) -> Iterator[httpx.Client]:
    """A client of a real server on the loopback."""
    config = uvicorn.Config(
        create_app(load_model, settings), port=0, log_level="critical", ws="none"
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=60) as client:
            until_ready(client)
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def until_ready(client: httpx.Client) -> None:
    while client.get("/readyz").status_code != 200:
        pass


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with serving(partial(load, model, threads=1)) as client:
        yield client


def test_one_run(client: httpx.Client, model: Path) -> None:
    answer = client.post("/v1/attribute", json=RUN.to_dict())
    assert answer.status_code == 200
    assert answer.json() == load(model, threads=1)(RUN).to_dict()
    best = client.post("/v1/attribute", params={"top_k": 2}, json=RUN.to_dict()).json()
    assert len(best["faults"]) == 2


def test_many_runs_at_once(client: httpx.Client, model: Path) -> None:
    runs = [make_run(("a", "the sum"), ("b", "wrong " * i), id=str(i)) for i in range(20)]
    answer = client.post("/v1/attribute/batch", json={"runs": [run.to_dict() for run in runs]})
    attributor = load(model, threads=1)
    assert answer.json()["results"] == [attributor(run).to_dict() for run in runs]


def test_a_session_is_judged_turn_by_turn(client: httpx.Client, model: Path) -> None:
    path = "/v1/sessions/a%20session%20%C3%BC"
    assert client.get(path).status_code == 404
    events: list[Row] = []
    for i, turn in enumerate(TURNS):
        answer = client.post(f"{path}/turns", json={"task": RUN.task, "turns": [turn], "first": i})
        assert answer.status_code == 200, answer.text
        events += answer.json()["events"]
    expected = load(model, threads=1)(RUN).to_dict()
    assert [event["event"] for event in events] == ["raised"]
    assert answer.json()["faults"] == expected["faults"]
    again = client.post(f"{path}/turns", json={"turns": TURNS[1:], "first": 1}).json()
    assert (again["turns"], again["missing"], again["events"]) == (3, 0, [])
    shown = client.get(path).json()
    assert shown["agents"] == expected["agents"]
    final = client.delete(path).json()
    assert (final["event"], final["turns"], final["faults"]) == ("final", 3, expected["faults"])
    assert client.get(path).status_code == client.delete(path).status_code == 404


def test_events_are_kept_in_order(client: httpx.Client) -> None:
    start = client.get("/v1/events", params={"after": 2**50}).json()
    for name in ("e1", "e2"):
        client.post(f"/v1/sessions/{name}/turns", json={"turns": TURNS})
        client.delete(f"/v1/sessions/{name}")
    seen: list[tuple[str, str]] = []
    following = start["next"]
    while len(seen) < 4:
        page = client.get("/v1/events", params={"after": following, "limit": 1}).json()
        seen += [(event["run"], event["event"]) for event in page["events"]]
        following = page["next"]
    assert seen == [("e1", "raised"), ("e1", "final"), ("e2", "raised"), ("e2", "final")]
    assert client.get("/v1/events", params={"after": following}).json()["events"] == []


def span(number: int, said: str, trace: str) -> Row:
    messages = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": said}]}])
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": "ab"[number % 2],
        "gen_ai.output.messages": messages,
    }
    return {
        "traceId": trace * 16,
        "spanId": f"{number:016x}",
        "name": "chat",
        "startTimeUnixNano": str(number),
        "endTimeUnixNano": str(number + 1),
        "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in attributes.items()],
    }


def document(*spans: Row) -> Row:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def as_protobuf(document: Row) -> bytes:
    text = json.dumps(document)

    def to_base64(found: re.Match[str]) -> str:
        return f'"{found[1]}": "{base64.b64encode(bytes.fromhex(found[2])).decode()}"'

    row = json.loads(re.sub(r'"(traceId|spanId)": "(\w+)"', to_base64, text))
    data: bytes = ParseDict(row, ExportTraceServiceRequest()).SerializeToString()
    return data


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
def test_traces_are_sessions(client: httpx.Client, model: Path, kind: str, packed: bool) -> None:
    one, other = f"{len(kind):x}{packed:x}", f"{len(kind):x}{packed + 2:x}"
    spans = [span(i, text, one) for i, text in enumerate(["the sum", "is wrong", "again"], 1)]
    for part in (document(spans[2], span(1, "x", other)), document(*spans[:2])):
        body = json.dumps(part).encode() if "json" in kind else as_protobuf(part)
        headers = {"Content-Type": kind} | ({"Content-Encoding": "gzip"} if packed else {})
        content = gzip.compress(body) if packed else body
        answer = client.post("/v1/traces", content=content, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert answer.content == (b"{}" if "json" in kind else b"")
    (example,) = otlp.parse(document(*spans), "")
    shown = client.get(f"/v1/sessions/{one * 16}").json()
    assert shown["agents"] == load(model, threads=1)(example.trajectory).to_dict()["agents"]
    assert client.get(f"/v1/sessions/{other * 16}").json()["turns"] == 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"Content-Type": "application/json"}, 400),
        (b"[]", {"Content-Type": "application/json"}, 400),
        (b'{"resourceSpans": 3}', {"Content-Type": "application/json"}, 422),
        (b"\xff\xff", {"Content-Type": "application/x-protobuf"}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Type": "application/json", "Content-Encoding": "br"}, 415),
        (b"{}", {"Content-Type": "application/json", "Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"{}")[:-4], {"Content-Encoding": "gzip"}, 400),
    ],
)
def test_traces_that_cannot_be_read(
    client: httpx.Client, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = client.post("/v1/traces", content=content, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "pointer"),
    [
        ("POST", "/v1/attribute", {"turns": TURNS}, 422, "/id"),
        ("POST", "/v1/attribute", {"id": "x", "turns": []}, 422, "/turns"),
        ("POST", "/v1/attribute", {"id": "x", "turns": [{"agent": "a"}]}, 422, "/turns/0/content"),
        ("POST", "/v1/attribute", {"id": "x", "turns": [{"agent": " ", "content": ""}]}, 422,
         "/turns/0/agent"),
        ("POST", "/v1/attribute?threshold=2", RUN.to_dict(), 422, "/threshold"),
        ("POST", "/v1/sessions/x/turns", {"turns": [{**TURNS[0], "kind": "y"}]}, 422,
         "/turns/0/kind"),
        ("POST", "/v1/sessions/x/turns", {"turns": [{**TURNS[0], "step": 1.5}]}, 422,
         "/turns/0/step"),
        ("GET", "/nowhere", None, 404, None),
        ("PUT", "/v1/attribute", None, 405, None),
    ],
)  # fmt: skip
def test_errors_are_problems(
    client: httpx.Client, method: str, path: str, body: Row | None, status: int, pointer: str | None
) -> None:
    answer = client.request(method, path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    row = answer.json()
    assert (row["status"], row["type"]) == (status, "about:blank")
    assert row["title"]
    assert row["detail"]
    if pointer:
        assert pointer in [error["pointer"] for error in row["errors"]]


def test_what_is_no_json_is_400(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"{", b"\xff", b"[" * 100_000):
        answer = client.post("/v1/attribute", content=content, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)


def test_text_that_is_no_unicode_survives(client: httpx.Client) -> None:
    body = b'{"id": "\\ud800", "turns": [{"agent": "a", "content": "\\ud83d"}]}'
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/attribute", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.content.startswith(b'{"id": "\\ud800"')


def test_metrics_have_bounded_labels(client: httpx.Client) -> None:
    client.post("/v1/sessions/metrics/turns", json={"turns": TURNS})
    client.get("/v1/sessions/metrics")
    client.get("/some/odd/path")
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["dcl_turns_total",] >= 3
    assert values["dcl_events_total", "raised"] >= 1
    assert values["dcl_findings_total", "FM-2.1"] >= 0
    assert values["dcl_open_runs",] >= 1
    assert values["dcl_turns_lost_total", "queue_full"] == 0
    routes = {sample.labels["route"] for sample in families["dcl_http_requests"].samples}
    assert {"/v1/sessions/{run_id}/turns", "/v1/sessions/{run_id}", "other"} <= routes
    assert not any("metrics/" in route for route in routes)
    assert all(family.documentation for family in families.values())


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_the_kinds_of_turns_are_ours() -> None:
    kinds = get_args(TurnBody.model_fields["kind"].annotation)
    assert list(kinds) == [kind.value for kind in TurnKind]


def test_the_server_keeps_to_its_description(client: httpx.Client) -> None:
    """Requests made from the OpenAPI document, right and wrong ones, checked by schemathesis."""
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
    paths = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        paths.append(operation.path)

        @settings(max_examples=8, derandomize=True, database=None)
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(timeout=60)

        check()
    assert {"/v1/attribute", "/v1/sessions/{run_id}/turns", "/v1/traces", "/metrics"} <= set(paths)


def test_a_key_is_asked_for(model: Path) -> None:
    settings = ServerSettings(api_key="secret")
    with serving(partial(load, model, threads=1), settings) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = client.get("/metrics", headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (401, PROBLEM)
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/healthz").status_code == 200
        given = {"Authorization": "Bearer secret"}
        assert client.get("/metrics", headers=given).status_code == 200


def test_large_and_slow_requests_are_refused(model: Path) -> None:
    settings = ServerSettings(body_bytes=1000, request_s=0.2)
    with serving(partial(load, model, threads=1), settings) as client:
        assert client.post("/v1/attribute", content=b"x" * 1001).status_code == 413
        parts = (b"x" * 600 for _ in range(2))
        assert client.post("/v1/attribute", content=parts).status_code == 413
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        bomb = gzip.compress(b" " * 100_000)
        assert client.post("/v1/traces", content=bomb, headers=packed).status_code == 413
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as slow:
            slow.sendall(b"POST /v1/attribute HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_client_that_sends_on_after_a_refusal_still_reads_it(model: Path) -> None:
    settings = ServerSettings(body_bytes=1000)
    with serving(partial(load, model, threads=1), settings) as client:
        address = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(address) as sender:
            sender.sendall(
                b"POST /v1/attribute HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
            )
            sender.sendall(b"x" * 9_000_000)
            assert sender.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/attribute", RUN.to_dict()), ("/v1/sessions/r/turns", {"turns": TURNS[:1]})],
)
def test_too_much_at_once_is_answered_429(model: Path, path: str, body: Row) -> None:
    gate = Gate(model)
    settings = ServerSettings(waiting=1, batch=1, queue=QueueBounds(turns=1))
    with serving(lambda: gate.attributor, settings) as client:
        gate.shut()
        answers: list[int] = []

        def send() -> None:
            answers.append(client.post(path, json=body).status_code)

        senders = [threading.Thread(target=send)]
        senders[0].start()
        gate.reached.wait()  # the first is being judged; one more may wait
        senders += [threading.Thread(target=send) for _ in range(3)]
        for sender in senders[1:]:
            sender.start()
        while len(answers) < 2:
            pass
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["content-type"] == PROBLEM
        gate.open.set()
        for sender in senders:
            sender.join()
        assert sorted(answers) == [200, 200, 429, 429]


def test_an_answer_that_takes_too_long_is_503(model: Path) -> None:
    gate = Gate(model)
    with serving(lambda: gate.attributor, ServerSettings(request_s=0.2)) as client:
        gate.shut()
        answer = client.post("/v1/attribute", json=RUN.to_dict())
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
        gate.open.set()
        assert client.post("/v1/attribute", json=RUN.to_dict()).status_code == 200


def test_a_server_that_is_killed_has_lost_nothing_it_acknowledged(
    model: Path, tmp_path: Path
) -> None:
    attributor = load(model, threads=1)
    acknowledged = 0
    for moment in range(3):
        with process(model, tmp_path / "state") as (server, client):
            if acknowledged:
                shown = client.get("/v1/sessions/r").json()
                assert acknowledged <= shown["turns"] <= acknowledged + 1
                acknowledged = shown["turns"]
            for _ in range(moment + 1):
                turn = TURNS[acknowledged % 3]
                answer = client.post(
                    "/v1/sessions/r/turns",
                    json={"task": RUN.task, "turns": [turn], "first": acknowledged},
                )
                assert answer.status_code == 200
                acknowledged = answer.json()["turns"]
            sender = threading.Thread(
                target=send_quietly, args=(client, TURNS[acknowledged % 3], acknowledged)
            )
            sender.start()
            os.kill(server.pid, signal.SIGKILL)
            sender.join()
    with process(model, tmp_path / "state") as (_, client):
        shown = client.get("/v1/sessions/r").json()
        count = shown["turns"]
        assert acknowledged <= count <= acknowledged + 1
        said = [(str(turn["agent"]), str(turn["content"])) for turn in (TURNS * 9)[:count]]
        assert shown["agents"] == attributor(make_run(*said, id="r")).to_dict()["agents"]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal on this platform")
def test_a_hangup_loads_the_model_again(model: Path, tmp_path: Path) -> None:
    with process(model, tmp_path / "state") as (server, client):
        client.post("/v1/sessions/r/turns", json={"task": RUN.task, "turns": TURNS[:2]})
        os.kill(server.pid, signal.SIGHUP)
        while "dcl_reloads_total 1.0" not in client.get("/metrics").text:
            assert server.poll() is None
        answer = client.post("/v1/sessions/r/turns", json={"turns": TURNS[2:], "first": 2}).json()
        expected = load(model, threads=1)(make_run(*SAID, id="r")).to_dict()
        assert (answer["agents"], answer["missing"]) == (expected["agents"], 0)


def send_quietly(client: httpx.Client, turn: Row, first: int) -> None:
    """Send a turn to a server that is about to be killed."""
    with suppress(httpx.HTTPError):
        client.post("/v1/sessions/r/turns", json={"turns": [turn], "first": first})


@contextmanager
def process(model: Path, state: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`dcl serve` in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--model", str(model), "--state", str(state), "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "dcl.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while True:
                assert server.poll() is None, server.communicate()[1]
                try:
                    until_ready(client)
                    break
                except httpx.TransportError:
                    continue
            yield server, client
    finally:
        server.kill()
        server.communicate()


def test_serving_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(cli.app, ["serve"])
    assert result.exit_code == 2
    assert 'pip install "dcl-attribution[serve]"' in result.stderr


def test_a_server_that_cannot_get_ready_says_why_and_ends(tmp_path: Path) -> None:
    words = ["serve", "--port", "0", "--model", str(tmp_path / "nowhere")]
    done = subprocess.run(
        [sys.executable, "-m", "dcl.cli", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 4
    assert f"error: {tmp_path / 'nowhere'}" in done.stderr
    assert "Traceback" not in done.stderr
