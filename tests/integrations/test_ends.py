"""How training ends: peers that evaluate one state decide alike, and end with one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.tiny import language_model
from tests.integrations.training import TOGETHER, by_epoch, training
from tests.soaked import only_in_soak

pytestmark = pytest.mark.processes

BEST = 4
EVALUATED = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "quality", "greater_is_better": True,
}  # fmt: skip


@pytest.mark.long
def test_peers_stop_early_together_with_the_best_model(tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / name), "pause": pause} for name, pause in (("a", 0.005), ("b", 0.02))]
    with training(*own, framework="transformers", steps=30, run=TOGETHER, early=True, args=EVALUATED) as one:
        told = one.finish()
    by_epoch(peer.events for peer in told)
    model = language_model()
    model.load_state_dict(load_file(tmp_path / "a" / f"checkpoint-{BEST}" / "model.safetensors"), strict=False)
    best = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    for peer in told:
        assert peer.done["steps"] == BEST + 4  # two evaluations that were worse
        assert peer.late_downloads == 0
        assert peer.done["parameters"] == best


@pytest.mark.long
@pytest.mark.parametrize("framework", [pytest.param("transformers", marks=only_in_soak), "accelerate"])
def test_a_peer_that_always_overflows_follows_the_run(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / "a"), "poison": "all", "scaler": True}, {"folder": str(tmp_path / "b")}]
    with training(*own, framework=framework, steps=20, run=TOGETHER, pause=0.005) as one:
        told = one.finish()
    by_epoch(peer.events for peer in told)
    for peer in told:
        assert peer.late_downloads == 0
        assert peer.epochs[-1] == 20
        scheduled = [0.01 * (1 - n / 20) if framework == "transformers" else 0.01 * 0.9**n for n in range(20)]
        assert peer.done["rates"] == pytest.approx([scheduled[epoch - 1] for epoch in peer.epochs])
    assert told[0].done["parameters"] == told[1].done["parameters"]


def test_an_overflow_on_one_peer_costs_that_batch_only(tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / "a"), "poison": 5, "scaler": True}, {"folder": str(tmp_path / "b")}]
    with training(*own, framework="accelerate", steps=20, run=TOGETHER, pause=0.005) as one:
        told = one.finish()
    by_epoch(peer.events for peer in told)
    assert told[0].done["scale"] == 2.0**15  # halved once
    for peer in told:
        assert peer.late_downloads == 0
        assert peer.epochs[-1] == 20
        assert peer.done["warnings"] == []
    assert told[0].done["parameters"] == told[1].done["parameters"]
