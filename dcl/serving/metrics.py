"""What Prometheus reads from `/metrics`; every label has a bounded set of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dcl.live.alarms import Event
from dcl.taxonomy import MODES

_COUNTERS: Mapping[str, tuple[str, str | None, Mapping[str, str]]] = {
    "dcl_turns": ("Turns judged.", None, {"turns": ""}),
    "dcl_turns_lost": (
        "Turns that were not judged.",
        "reason",
        {
            "refused_full": "queue_full",
            "refused_malformed": "malformed",
            "refused_closed": "closed",
            "lost_run_full": "run_full",
            "lost_before": "before",
        },
    ),
    "dcl_turns_repeated": ("Turns that had come before.", None, {"repeated": ""}),
    "dcl_runs_opened": ("Runs opened.", None, {"opened": ""}),
    "dcl_runs_closed": (
        "Runs closed.",
        "reason",
        {name: name for name in ("ended", "idle", "evicted", "closed")},
    ),
    "dcl_events": (
        "Events told.",
        "kind",
        {name: name for name in ("raised", "cleared", "final")},
    ),
    "dcl_events_lost": ("Events that nobody read in time.", None, {"lost_events": ""}),
    "dcl_errors": (
        "Errors.",
        "stage",
        {"errors": "model", "state_errors": "state", "worker_errors": "worker",
         "unreadable": "spans"},
    ),
    "dcl_reloads": ("Models loaded while running.", None, {"reloads": ""}),
}  # fmt: skip
_GAUGES: Mapping[str, tuple[str, str]] = {
    "dcl_open_runs": ("open_runs", "Runs that are going on."),
    "dcl_open_runs_bytes": ("open_bytes", "Memory of the runs that are going on, roughly."),
    "dcl_queue_turns": ("waiting", "Turns that wait to be judged."),
    "dcl_queue_bytes": ("waiting_bytes", "Characters of the turns that wait."),
}


class _Stats(Collector):
    """The counts of a monitor, read when they are asked for."""

    def __init__(self, stats: Callable[[], Mapping[str, int]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """One family for each name."""
        now = self._stats()
        for name, (text, label, values) in _COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([value] if label else [], now.get(key, 0))
            yield family
        for name, (key, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, now.get(key, 0))


class Metrics:
    """All metrics of one server.

    Args:
        stats: Gives the counts of the monitor.
    """

    def __init__(self, stats: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Stats(stats))
        labels = ("route", "status")
        self._requests = Counter(
            "dcl_http_requests", "Requests answered.", labels, registry=self.registry
        )
        self._seconds = Histogram(
            "dcl_http_request_seconds",
            "Time from request to answer.",
            ("route",),
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self._findings = Counter(
            "dcl_findings", "Alarms raised, by error mode.", ("mode",), registry=self.registry
        )
        for name in [*(mode.value for mode in MODES), "none"]:
            self._findings.labels(name)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            route: Template of the path, or `other`.
            status: HTTP status.
            seconds: From request to answer.
        """
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def told(self, event: Event) -> None:
        """Count an event."""
        if event.kind == "raised":
            for finding in event.findings:
                mode = finding.fault.mode
                self._findings.labels("none" if mode is None else mode.value).inc()
