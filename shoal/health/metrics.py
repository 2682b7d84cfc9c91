"""Health records as Prometheus metrics. A trainer and a monitor use the same names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.health.record import FaultKind, Health, name_of
from shoal.p2p.identity import PeerID

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Metrics = list[Metric]
LABELS = ["run", "peer"]
LOOPBACK = "127.0.0.1"
# The names by which a browser may call this machine. Requests with other names are refused, so that a page on another
# host can't read the metrics by letting its own name point to this machine (DNS rebinding).
OWN_NAMES = [LOOPBACK, "localhost"]


def families(run_id: str, records: Iterable[tuple[PeerID, Health]]) -> Metrics:
    """All metrics of these peers; see docs/guides/watching.md."""
    info = InfoMetricFamily("shoal_peer", "What a peer is.", labels=LABELS)
    loss = GaugeMetricFamily("shoal_loss", "Mean of the losses that were reported last.", labels=LABELS)
    downloads = CounterMetricFamily("shoal_downloads", "States that were downloaded.", labels=LABELS)
    faults = CounterMetricFamily("shoal_faults", "What went wrong, by kind.", labels=[*LABELS, "kind"])
    seconds = SummaryMetricFamily("shoal_round_seconds", "Time of epochs' ends, by phase.", labels=[*LABELS, "phase"])
    sent = CounterMetricFamily("shoal_bytes", "Bytes of tensors.", labels=[*LABELS, "direction"])
    gauges = {
        "shoal_epoch": "Epochs behind the parameters.",
        "shoal_epoch_seconds": "Seconds of an epoch, the mean of the last ones.",
        "shoal_members": "Members that the peer is connected to, itself included.",
        "shoal_samples_per_second": "Samples that the peer makes in a second.",
        "shoal_step_seconds": "Seconds of a training step, the median of the last ones.",
        "shoal_epoch_samples": "Samples that the peer has in this epoch.",
        "shoal_memory_bytes": "Resident memory of the process.",
        "shoal_joining": "Whether the peer loads the run's state.",
        "shoal_waits_for_newcomers_seconds": "Seconds for which its round still waits for newcomers.",
    }
    counters = {
        "shoal_samples": "Samples that the peer has made.",
        "shoal_steps": "Training steps that the peer has made.",
        "shoal_cpu_seconds": "CPU time of the process.",
    }
    of = {name: GaugeMetricFamily(name, text, labels=LABELS) for name, text in gauges.items()}
    since = {name: CounterMetricFamily(name, text, labels=LABELS) for name, text in counters.items()}
    for peer, health in records:
        who, totals = [run_id, name_of(peer)], health.totals
        info.add_metric(
            who,
            {"id": str(peer), "version": health.version, "torch": health.torch, "device": health.device,
             "role": health.role.value},
        )  # fmt: skip
        if health.loss is not None:
            loss.add_metric(who, health.loss)
        downloads.add_metric(who, totals.downloads)
        for kind in FaultKind:  # also kinds with 0, since Prometheus' increase() does not see a step from nothing to 1
            faults.add_metric([*who, kind.value], health.faults.get(kind, 0))
        for phase in ("waiting", "matchmaking", "exchange", "step"):
            seconds.add_metric([*who, phase], count_value=totals.rounds, sum_value=getattr(totals, phase))
        for direction in ("sent", "received"):
            sent.add_metric([*who, direction], getattr(totals, direction))
        values = (health.epoch, health.epoch_seconds, health.members, health.samples_per_second, health.step_seconds,
                  health.samples, health.memory, health.joining is not None, health.waits)  # fmt: skip
        for gauge, value in zip(of.values(), values, strict=True):
            gauge.add_metric(who, value)
        for counter, value in zip(since.values(), (totals.samples, totals.steps, health.cpu_seconds), strict=True):
            counter.add_metric(who, value)
    return [info, loss, downloads, faults, seconds, sent, *of.values(), *since.values()]


class Collects(Collector):
    """A collector that calls a function whenever Prometheus asks.

    Args:
        collect: returns the current metrics.
    """

    def __init__(self, collect: Callable[[], Metrics]) -> None:
        self._collect = collect

    def collect(self) -> Metrics:
        return self._collect()


def registry_of(collect: Callable[[], Metrics]) -> CollectorRegistry:
    """A registry with these metrics and no others."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collects(collect))
    return registry


def _only_by_own_names(app: WSGIApplication) -> WSGIApplication:
    """The app, restricted to requests that call this machine by one of OWN_NAMES."""

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").partition(":")[0] in OWN_NAMES:
            return app(environ, start_response)
        start_response("400 Bad Request", [("Content-Type", "text/plain")])
        return [b"Invalid host header"]

    return checked


class _Silent(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer:
    """Serves `/metrics` over HTTP on loopback, in a thread of its own, until it is closed. It answers only requests
    that call this machine by one of OWN_NAMES.

    Args:
        port: the port to listen on; 0 for any free one.
        collect: returns the current metrics; called in that thread.

    Attributes:
        port: the port in use.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(self, port: int, collect: Callable[[], Metrics]) -> None:
        app = _only_by_own_names(make_wsgi_app(registry_of(collect)))
        self._server = make_server(LOOPBACK, port, app, ThreadingWSGIServer, _Silent)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="shoal-metrics", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Stop listening. Calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
