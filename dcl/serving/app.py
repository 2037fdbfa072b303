"""The HTTP application: runs, sessions, traces, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dcl import __version__
from dcl.attribution import Attribution, Attributor
from dcl.errors import DclError
from dcl.formats import otlp as otlp_format
from dcl.live.aio import AsyncMonitor
from dcl.live.alarms import AlarmRules, Event
from dcl.live.monitor import Judgement, Monitor, QueueBounds
from dcl.live.openruns import Arrival, Bounds
from dcl.live.thresholds import StepThresholds
from dcl.serving import otlp
from dcl.serving.batcher import Batcher
from dcl.serving.metrics import Metrics
from dcl.serving.problems import (
    Limits,
    ProblemDetails,
    ProblemError,
    Reply,
    handle_problems,
    responses,
)
from dcl.trajectory import Trajectory, Turn

_RETRY_S = 1
_LOG = logging.getLogger("uvicorn.error")  # where uvicorn tells of everything but requests
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How much a server takes on.

    Args:
        api_key: Key that every request must carry, but for health; None asks for none.
        body_bytes: Largest body, also after unpacking.
        request_s: Seconds for a request to come in, and again to be answered.
        batch: Runs that are scored together.
        waiting: Runs that may wait to be scored; one more is answered 429.
        events: Events that are kept for `GET /v1/events`.
        state: Folder in which sessions outlive the process; None keeps nothing.
        bounds: How much is kept of the sessions.
        queue: How many turns of sessions may wait; one more is answered 429.
        rules: When alarms are raised and cleared.
        thresholds: From which probability on a fault is declared; None takes those of the model.
    """

    api_key: str | None = None
    body_bytes: int = 16 << 20
    request_s: float = 30.0
    batch: int = 16
    waiting: int = 256
    events: int = 10_000
    state: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)
    queue: QueueBounds = field(default_factory=QueueBounds)
    rules: AlarmRules = field(default_factory=AlarmRules)
    thresholds: StepThresholds | None = None


class _Body(BaseModel):
    """A part of a request; unknown keys are ignored."""

    model_config = ConfigDict(strict=True)


def _whole(value: Any) -> Any:
    """A whole number that is written as `1.0`, which JSON Schema allows, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Step = Annotated[int, Field(ge=-(2**53), le=2**53), BeforeValidator(_whole)]
Place = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_whole)]


class TurnBody(_Body):
    """One entry of a log: who said or did what."""

    agent: str = Field(min_length=1, pattern=r"\S", description="Name of the speaker")
    content: str
    role: str = ""
    kind: Literal[
        "message", "thought", "tool_call", "tool_result", "handoff", "system", "final"
    ] = "message"
    step: Step | None = Field(None, description="Number in the log")
    source: str = ""


class RunBody(_Body):
    """A run, in the native format."""

    id: str
    task: str = ""
    turns: list[TurnBody] = Field(min_length=1)


class RunsBody(_Body):
    """Several runs."""

    runs: list[RunBody] = Field(min_length=1, max_length=256)


class TurnsBody(_Body):
    """New turns of a session."""

    turns: list[TurnBody] = Field(min_length=1, max_length=1000)
    task: str = ""
    first: Place | None = Field(
        None,
        description="Position of the first of them in the run; turns that came before are left out",
    )


class Server:
    """What the endpoints share.

    Args:
        load: Gives the model.
        settings: How much it takes on.
    """

    def __init__(
        self,
        load: Callable[[], Attributor],
        settings: ServerSettings,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.settings = settings
        self._load = load
        self._fail = fail
        self._events: deque[tuple[int, Event]] = deque(maxlen=settings.events)
        self._told = 0
        self.monitor: AsyncMonitor | None = None
        self.batcher: Batcher | None = None
        self.metrics = Metrics(lambda: {} if self.monitor is None else self.monitor.monitor.stats())

    @asynccontextmanager
    async def run(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the model and bring back the sessions; at the end judge what waits."""
        opening = asyncio.create_task(self._open())
        opening.add_done_callback(self._tell_failure)
        try:
            yield
        finally:
            await asyncio.wait([opening])
            if self.monitor is not None:
                await self.monitor.close()
            if self.batcher is not None:
                await asyncio.to_thread(self.batcher.close)

    def _tell_failure(self, opening: asyncio.Task[None]) -> None:
        """Say why it will never be ready."""
        error = None if opening.cancelled() else opening.exception()
        if error is not None:
            _LOG.error("not ready, and will not be: %s", error)
            if self._fail is not None:
                self._fail(error)

    async def _open(self) -> None:
        """Get ready, then keep events as they are told."""
        settings = self.settings
        attributor = await asyncio.to_thread(self._load)
        monitor = await asyncio.to_thread(
            lambda: Monitor(
                lambda: attributor,
                bounds=settings.bounds,
                queue=settings.queue,
                rules=settings.rules,
                thresholds=settings.thresholds,
                state=settings.state,
            )
        )
        self.batcher = Batcher(attributor, batch=settings.batch, waiting=settings.waiting)
        self.monitor = AsyncMonitor(monitor)
        self._tasks = [asyncio.create_task(self._read_events(self.monitor))]
        with suppress(AttributeError, RuntimeError, ValueError):  # Windows; not the main thread
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, lambda: self._tasks.append(asyncio.create_task(self.reload()))
            )

    async def reload(self) -> None:
        """Load the model again and use it from now on; the old one stays if that fails."""
        try:
            attributor = await asyncio.to_thread(self._load)
            monitor = self.ready_monitor().monitor
            await asyncio.to_thread(monitor.reload, lambda: attributor)
        except (DclError, OSError) as error:
            _LOG.error("the model stays as it was: %s", error)
            return
        if self.batcher is not None:
            self.batcher.attributor = attributor
        _LOG.info("the model was loaded again")

    async def _read_events(self, monitor: AsyncMonitor) -> None:
        """Number the events and keep the newest."""
        async for event in monitor.events():
            self.metrics.told(event)
            self._events.append((self._told, event))
            self._told += 1

    def events_after(self, after: int, limit: int) -> tuple[list[Event], int]:
        """Events from a number on, and the number to go on with."""
        found = [(number, event) for number, event in self._events if number >= after][:limit]
        following = found[-1][0] + 1 if found else max(after, self._told)
        return [event for _, event in found], min(following, self._told)

    def ready_monitor(self) -> AsyncMonitor:
        """The monitor.

        Raises:
            ProblemError: If the model is still being loaded.
        """
        if self.monitor is None:
            raise ProblemError(503, "the model is being loaded", retry_s=_RETRY_S)
        return self.monitor

    async def attribute(self, runs: Sequence[Trajectory]) -> list[Attribution]:
        """Attribute runs.

        Raises:
            ProblemError: If too many wait, or it takes too long.
        """
        self.ready_monitor()
        futures = None if self.batcher is None else self.batcher.submit(runs)
        if futures is None:
            raise ProblemError(429, "too many runs wait", retry_s=_RETRY_S)
        return list(await self._in_time(asyncio.gather(*futures)))

    async def judge(self, arrivals: Sequence[Arrival]) -> list[Judgement]:
        """Keep and judge arrivals.

        Raises:
            ProblemError: If too many wait, it takes too long, or they cannot be kept.
        """
        monitor = self.ready_monitor()
        if len(arrivals) > self.settings.queue.turns:
            raise ProblemError(413, f"expected at most {self.settings.queue.turns} turns at once")
        try:
            judged = await self._in_time(monitor.judge(*arrivals))
        except OSError as error:
            raise ProblemError(503, f"the state cannot be written: {error.strerror}") from None
        if judged is None:
            raise ProblemError(429, "too many turns wait", retry_s=_RETRY_S)
        return judged

    async def look(self, run_id: str) -> Judgement:
        """A run as it stands.

        Raises:
            ProblemError: If too many turns wait, or it takes too long.
        """
        found = await self._in_time(self.ready_monitor().look(run_id))
        if found is None:
            raise ProblemError(429, "too many turns wait", retry_s=_RETRY_S)
        return found

    async def _in_time(self, work: Awaitable[T]) -> T:
        """The result, if it comes in time."""
        try:
            return await asyncio.wait_for(work, self.settings.request_s)
        except asyncio.TimeoutError:
            seconds = self.settings.request_s
            detail = f"no answer within {seconds:g} seconds; what was sent may still be judged"
            raise ProblemError(503, detail, retry_s=_RETRY_S) from None


RunId = Annotated[str, PathParameter(min_length=1, max_length=512, description="Name of the run")]
Threshold = Annotated[
    float | None, Query(ge=0, le=1, description="Declare faults from here on, not as the model has")
]
TopK = Annotated[int | None, Query(ge=1, le=1000, description="Declare the likeliest faults")]


def create_app(
    load: Callable[[], Attributor],
    settings: ServerSettings | None = None,
    *,
    fail: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The application.

    Args:
        load: Gives the model; called in a thread when the application starts.
        settings: How much it takes on.
        fail: Called where the model or the state cannot be opened, so that it will never be ready;
            None goes on answering that it is not.
    """
    server = Server(load, settings or ServerSettings(), fail)
    app = FastAPI(
        title="dcl",
        version=__version__,
        description="Which agent failed, how, and at which turn.",
        lifespan=server.run,
        default_response_class=Reply,
        responses=responses(400, 401, 408, 413, 422, 500, 503),
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = server
    handle_problems(app)
    _add_runs(app, server)
    _add_sessions(app, server)
    _add_traces(app, server)
    _add_health(app, server)
    _describe_problems(app)

    limits = server.settings
    app.add_middleware(
        Limits,
        body_bytes=limits.body_bytes,
        receive_s=limits.request_s,
        api_key=limits.api_key,
    )

    @app.middleware("http")
    async def measure(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        start, status = time.perf_counter(), 500
        try:
            response = await call_next(request)
            status = response.status_code
            return response
        finally:
            route = getattr(request.scope.get("route"), "path", "other")
            server.metrics.answered(route, status, time.perf_counter() - start)

    return app


def _add_runs(app: FastAPI, server: Server) -> None:
    """Whole runs."""

    @app.post("/v1/attribute", responses=responses(429), tags=["runs"])
    async def attribute(
        run: RunBody, threshold: Threshold = None, top_k: TopK = None
    ) -> dict[str, Any]:
        """Attribute one run; the answer is laid out as `dcl attribute --output json` has it."""
        (found,) = await server.attribute([_trajectory(run)])
        return found.to_dict(threshold=threshold, top_k=top_k)

    @app.post("/v1/attribute/batch", responses=responses(429), tags=["runs"])
    async def attribute_many(
        body: RunsBody, threshold: Threshold = None, top_k: TopK = None
    ) -> dict[str, Any]:
        """Attribute several runs, in order."""
        found = await server.attribute([_trajectory(run) for run in body.runs])
        return {"results": [each.to_dict(threshold=threshold, top_k=top_k) for each in found]}


def _add_sessions(app: FastAPI, server: Server) -> None:
    """Runs that are going on."""

    @app.post("/v1/sessions/{run_id}/turns", responses=responses(429), tags=["sessions"])
    async def add_turns(run_id: RunId, body: TurnsBody) -> dict[str, Any]:
        """Judge a run with new turns; they are on the disk when the answer comes."""
        arrivals = [Arrival(run_id, _turn(turn), body.task) for turn in body.turns]
        if body.first is not None:
            arrivals = [replace(each, at=i) for i, each in enumerate(arrivals, body.first)]
        judged = await server.judge(arrivals)
        events = [event.to_dict() for each in judged for event in each.events]
        return {**_session(run_id, judged[-1]), "events": events}

    @app.get("/v1/sessions/{run_id}", responses=responses(404, 429), tags=["sessions"])
    async def show_session(run_id: RunId) -> dict[str, Any]:
        """The latest judgement of a run that is going on."""
        judgement = await server.look(run_id)
        if judgement.attribution is None:
            raise ProblemError(404, "there is no open run of this name, or it has no turn yet")
        return _session(run_id, judgement)

    @app.delete("/v1/sessions/{run_id}", responses=responses(404, 429), tags=["sessions"])
    async def end_session(run_id: RunId) -> dict[str, Any]:
        """End a run; gives its last event."""
        (judged,) = await server.judge([Arrival(run_id, None)])
        if not judged.events:
            raise ProblemError(404, "there is no open run of this name")
        return judged.events[-1].to_dict()

    @app.get("/v1/events", tags=["sessions"])
    async def show_events(
        after: Annotated[int, Query(ge=0, le=2**53, description="`next` of the last answer")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """The newest events of all runs; those that nobody asked for in time are gone."""
        events, following = server.events_after(after, limit)
        return {"events": [event.to_dict() for event in events], "next": following}


def _add_traces(app: FastAPI, server: Server) -> None:
    """OTLP/HTTP."""

    @app.post(
        "/v1/traces",
        responses={
            200: {"content": {otlp.PROTOBUF: {}}, "description": "All spans were taken"},
            **responses(415, 429),
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {otlp.JSON: {"schema": {"type": "object"}}, otlp.PROTOBUF: {}},
            }
        },
        tags=["traces"],
    )
    async def take_traces(request: Request) -> Response:
        """Take spans as OTLP; each trace is a session that is named by the id of the trace."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = request.headers.get("content-encoding", "").strip().lower()
        document = otlp.decode(await request.body(), kind, encoding, server.settings.body_bytes)
        traces = [(trace, spans) for trace, spans in otlp_format.split(document) if trace]
        if traces:
            await server.judge([Arrival(trace, None, spans=spans) for trace, spans in traces])
        return Response(otlp.encode(kind), media_type=kind)


def _add_health(app: FastAPI, server: Server) -> None:
    """What an operator asks."""

    @app.get("/healthz", tags=["health"])
    async def show_health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def show_readiness() -> dict[str, str]:
        """Whether the model is loaded and the sessions are back."""
        server.ready_monitor()
        return {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["health"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def show_metrics() -> Response:
        """Counts for Prometheus."""
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _describe_problems(app: FastAPI) -> None:
    """Put the schema of errors where the descriptions of the endpoints point to."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        described = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= described.pop("$defs", {})
        schemas["ProblemDetails"] = described
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _turn(body: TurnBody) -> Turn:
    """The turn of a body."""
    return Turn.from_dict(body.model_dump(exclude_none=True))


def _trajectory(body: RunBody) -> Trajectory:
    """The run of a body."""
    return Trajectory.from_dict(body.model_dump(exclude_none=True))


def _session(run_id: str, judgement: Judgement) -> dict[str, Any]:
    """A run as it stands."""
    found = judgement.attribution
    row: dict[str, Any] = {"id": run_id} if found is None else found.to_dict()
    turns = 0 if found is None else len(found.steps)
    return {**row, "turns": turns, "missing": judgement.missing}
