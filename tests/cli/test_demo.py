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
from shoal.cli.demo.settings import FEWEST_EPOCHS, DemoSettings, GradientCodec

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_two_peers_stay_identical_and_learn(tmp_path: Path) -> None:
    """With compression, which makes it the harder to stay identical."""
    options = ("--peers", "2", "--epochs", str(FEWEST_EPOCHS), "--no-kill", "--compression", "float16")
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
    assert "as promised, as far as 10 epochs show" in done.stdout
    assert report["digests_equal"].startswith("yes")
    assert report["epochs_compared"] >= FEWEST_EPOCHS
    assert report["loss_after"] < report["loss_before"] - 1


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
    settings = DemoSettings(out=str(tmp_path), epochs=10, compression=compression, data=str(text))
    parent = mock.Mock()
    parent.recv.side_effect = KeyboardInterrupt  # it does not let the peer go on
    with mock.patch.object(shoal, "DHT") as dht, mock.patch.object(shoal, "Optimizer") as optimizer:
        dht.return_value.get_visible_maddrs.return_value = []
        with pytest.raises(KeyboardInterrupt):
            run_peer(parent, 0, "run", [], settings)
    assert type(optimizer.call_args.kwargs["grad_compression"]) is codec
