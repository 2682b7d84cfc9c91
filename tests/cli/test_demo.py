"""The demo for real, made short: peers that train together over sockets. ``make demo`` is the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import shoal
from shoal.cli.demo.peer import run_peer
from shoal.cli.demo.script import DemoSettings, GradientCodec

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_two_peers_stay_identical_and_learn(tmp_path: Path) -> None:
    """With compression, which makes it the harder to stay identical."""
    options = ("--peers", "2", "--epochs", "10", "--no-kill", "--compression", "float16")
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "demo", *options, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    # Ten epochs are too few to beat a bigram model, and may be over before the newcomer has imported torch.
    assert report["problems"] == [], done.stdout
    assert done.returncode == 0
    assert any("bigram" in one for one in report["unreached"])
    assert "as promised, as far as it went" in done.stdout
    assert report["digests of all peers equal"] == "yes, in 10 epochs"
    assert report["held-out loss after, nats per byte"] < report["held-out loss before, nats per byte"] - 1


@pytest.mark.parametrize(
    ("compression", "codec"),
    [
        (GradientCodec.NONE, shoal.compression.NoCompression),
        (GradientCodec.FLOAT16, shoal.compression.Float16Compression),
    ],
)
def test_gradients_travel_as_chosen(tmp_path: Path, compression: GradientCodec, codec: type) -> None:
    text = tmp_path / "text"
    text.write_text("a text of no meaning\n" * 1000)
    settings = DemoSettings(out=tmp_path, epochs=10, compression=compression, data=text)
    parent, turns = mock.Mock(), mock.Mock()
    turns.acquire.side_effect = KeyboardInterrupt  # the parent does not let the peer go on
    with mock.patch.object(shoal, "DHT") as dht, mock.patch.object(shoal, "Optimizer") as optimizer:
        dht.return_value.get_visible_maddrs.return_value = []
        with pytest.raises(KeyboardInterrupt):
            run_peer(parent, turns, 0, [], settings)
    assert type(optimizer.call_args.kwargs["grad_compression"]) is codec
