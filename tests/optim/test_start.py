"""What it costs to make an Optimizer, and what is left of it: no process, few threads, little memory, no time."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from tests.forked import ROOT

# What a plain run imports beyond torch and its optimizer, and beyond the standard library's that torch has imported.
NEEDED = {"_cffi_backend", "_openssl", "blake3", "cryptography", "msgspec", "resource", "shoal"}
COMMAND = [sys.executable, "-m", "tests.optim.starting"]


@pytest.mark.timed
def test_making_one_is_cheap_and_a_kill_leaves_nothing() -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            measured: dict[str, Any] = json.loads(process.stdout.readline())
        finally:
            process.kill()
    print(measured)
    assert measured["epoch"] == 1
    # CPU seconds, in those of importing torch. Without byte code the import takes twice as long.
    assert measured["import_cpu"] < 0.5
    assert measured["dht_cpu"] < 0.05
    assert measured["optimizer_cpu"] < 0.15
    assert measured["of_torch"] == []
    assert set(measured["imports"]) <= NEEDED
    assert measured["memory"] < 60, "MB more than torch alone"
    assert measured["threads"] <= 6
    assert measured["python_threads"] == ["shoal-reactor"]
    assert measured["children"] == []
    _, _, host, _, port, *_ = measured["address"].split("/")
    with socket.socket() as client:
        client.settimeout(5)
        assert client.connect_ex((host, int(port))) != 0, "somebody still listens"


@pytest.mark.timed
@pytest.mark.long
def test_nothing_runs_after_shutdown() -> None:
    done = subprocess.run([*COMMAND, "--stop"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["left"] == {"threads": 0, "python_threads": []}
    assert not done.stderr


@pytest.mark.parametrize("options", [{"target_batch_size": 8}, {"outer": shoal.DiLoCo(inner_steps=2)}], ids=repr)
def test_making_one_looks_over_the_objects_of_the_process_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Counter[str]()

    def count(name: str, look: Callable[..., list[object]]) -> None:
        def counted(*given: object) -> list[object]:
            looks[name] += 1
            return look(*given)

        monkeypatch.setattr(gc, name, counted)

    count("get_objects", gc.get_objects)
    count("get_referrers", gc.get_referrers)
    model = torch.nn.Linear(10, 10)
    with shoal.DHT(start=True) as dht:
        params, sgd = model.parameters(), lambda params: torch.optim.SGD(params, lr=0.1)
        shoal.Optimizer(
            dht=dht, run_id="looks", batch_size_per_step=8, params=params, optimizer=sgd, **options
        ).shutdown()
    assert looks == {"get_objects": 1}
