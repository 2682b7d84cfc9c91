"""`/metrics`: a trainer's own numbers, in the format of Prometheus, under the names that Grafana's file asks for."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal.health.metrics import LABELS, MetricsServer, families
from shoal.health.record import FaultKind, name_of
from shoal.p2p.identity import Identity
from tests.health.records import health
from tests.monitor.processes import trainers
from tests.waiting import wait_until
from tests.workers.monitored import Monitored

ROOT = Path(__file__).parents[2]
PEER = Identity(bytes(32)).peer_id
FULL = health(faults=dict.fromkeys(FaultKind, 2))


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Values by name, with their labels."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def served() -> str:
    with MetricsServer(0, lambda: families("my run", [(PEER, FULL)])) as server:
        return read(server.port)


def test_faults_that_did_not_happen_are_zeros() -> None:
    """So that Grafana shows the first of each kind: `increase` needs a value before it."""
    with MetricsServer(0, lambda: families("my run", [(PEER, health(faults={FaultKind.FORK: 1}))])) as server:
        found = samples(read(server.port))["shoal_faults_total"]
    assert {labels["kind"]: value for labels, value in found} == {
        kind.value: float(kind is FaultKind.FORK) for kind in FaultKind
    }


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:{port}", 200), ("127.0.0.1", 200), ("elsewhere.example", 400), ("elsewhere.example:{port}", 400)],
)
def test_only_who_asks_for_this_machine_is_answered(host: str, status: int) -> None:
    """A page whose name is suddenly that of this machine (DNS rebinding) asks for its own name."""
    with (
        MetricsServer(0, lambda: families("my run", [(PEER, FULL)])) as server,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as asking,
    ):
        asking.request("GET", "/metrics", headers={"Host": host.format(port=server.port)})
        answer = asking.getresponse()
        assert (answer.status, b"shoal_epoch" in answer.read()) == (status, status == 200)


def test_every_number_is_the_records() -> None:
    found = samples(served())
    assert found["shoal_epoch"] == [({"run": "my run", "peer": name_of(PEER)}, 16.0)]
    assert found["shoal_samples_total"][0][1] == 640.0
    assert {labels["phase"]: value for labels, value in found["shoal_round_seconds_sum"]} == {
        "waiting": 1.6, "matchmaking": 0.32, "exchange": 4.8, "step": 0.8
    }  # fmt: skip
    assert {value for _, value in found["shoal_round_seconds_count"]} == {16.0}
    assert {labels["direction"]: value for labels, value in found["shoal_bytes_total"]} == {
        "sent": 64_000_000.0, "received": 64_000_016.0
    }  # fmt: skip
    assert len(found["shoal_faults_total"]) == len(FaultKind)
    assert all(set(LABELS) <= labels.keys() for values in found.values() for labels, _ in values)


def test_promtool_takes_it(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: it is in Debian's package prometheus")
    done = subprocess.run(["promtool", "check", "metrics"], input=served(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "grafana").glob("*.json")), ids=lambda path: path.name)
def test_every_query_of_grafana_names_what_there_is(path: Path) -> None:
    there = samples(served())
    dashboard = json.loads(path.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in [*queries, *(variable["query"] for variable in dashboard["templating"]["list"])]:
        names = re.findall(r"shoal_\w+", query)
        assert names
        for name in names:
            assert name in there, f"{query}: there is no {name}"
            labels = set(re.findall(r"by \((\w+)\)", query)) | set(re.findall(r"(\w+)=", query))
            assert labels <= there[name][0][0].keys(), query
    legends = {label for panel in dashboard["panels"] for t in panel["targets"]
               for label in re.findall(r"{{(\w+)}}", t["legendFormat"])}  # fmt: skip
    assert legends <= {*LABELS, "phase", "direction", "kind"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in dashboard["panels"]}) == len(places)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "grafana").glob("*.json")), ids=lambda path: path.name)
def test_prometheus_understands_every_query_of_grafana(path: Path, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: it is in Debian's package prometheus")
    queries = [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]
    asked = [re.sub(r"\$\w+", "1m", query) for query in queries]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # which is YAML, too
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "grafana").glob("*.json")), ids=lambda path: path.name)
def test_grafanas_own_types_know_every_field(path: Path) -> None:
    """What they do not know is lost when they read it and write it again. The two fields are for the import only."""
    needed = "pip install grafana-foundation-sdk has Grafana's types, against which the dashboard is checked"
    types = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=needed)
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    dashboard = json.loads(path.read_text())
    written = json.loads(encoder().encode(types.Dashboard.from_json(dashboard)))
    assert {name for name in dashboard if name.startswith("__")} == {"__inputs", "__requires"}
    assert lost({name: value for name, value in dashboard.items() if not name.startswith("__")}, written, "") == []


def lost(given: Any, written: Any, place: str) -> list[str]:
    """Where something of `given` is missing from `written`, or is another."""
    if isinstance(given, dict) and isinstance(written, dict):
        return [one for name in given for one in lost(given[name], written.get(name), f"{place}.{name}")]
    if isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        pairs = zip(given, written, strict=True)
        return [one for index, pair in enumerate(pairs) for one in lost(*pair, f"{place}[{index}]")]
    return [] if given == written else [place]


def make(dht: shoal.DHT, **arguments: Any) -> shoal.Optimizer:
    model = torch.nn.Linear(4, 1)
    return shoal.Optimizer(
        dht=dht,
        run_id="metrics",
        target_batch_size=8,
        batch_size_per_step=8,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **arguments,
    )


def test_a_port_that_is_taken_is_an_error_and_nothing_is_left() -> None:
    with shoal.DHT(start=True) as dht, socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use"):
            make(dht, metrics_port=taken.getsockname()[1])
        optimizer = make(dht, metrics_port=0)  # the run was not entered before
        port = optimizer.metrics_port
        assert port
        assert samples(read(port))["shoal_epoch"][0][1] == 0.0
        optimizer.shutdown()
        with pytest.raises(urllib.error.URLError):
            read(port)


def test_an_optimizer_that_is_not_made_leaves_no_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with shoal.DHT(start=True) as dht:
        first = make(dht)
        with pytest.raises(ValueError, match="already served"):
            make(dht, metrics_port=port)
        with pytest.raises(urllib.error.URLError):
            read(port)
        first.shutdown()


@pytest.mark.parametrize("port", [-1, 65536, True, "80"])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match="metrics_port="):
        make(dht, metrics_port=port)


@pytest.mark.processes
@pytest.mark.long
def test_a_trainer_tells_its_own_numbers() -> None:
    with trainers(2) as peers:
        peers.train()
        wait_until(lambda: peers.all[0].ask(Monitored.health)["epoch"] >= 2)
        peers.pause()
        own = peers.all[0].ask(Monitored.health)
        wait_until(lambda: peers.all[0].ask(Monitored.health)["number"] > own["number"] + 1)
        own = peers.all[0].ask(Monitored.health)
        found = {name: values[0][1] for name, values in samples(read(own["port"])).items()}
        for name in ("epoch", "loss", "members", "samples_per_second", "step_seconds", "epoch_seconds"):
            assert found[f"shoal_{name}"] == pytest.approx(own[name])
        assert found["shoal_samples_total"] == own["samples_made"] > 0
        assert found["shoal_steps_total"] == own["steps_made"] > 0
