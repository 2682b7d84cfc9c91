"""The recipes for TensorBoard and Weights & Biases, as the guide has them, write what a real run reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "watching.md").read_text()
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTS = "writes_to(lambda name, value, step: print(step, name, value))"
NAMES = ["bytes/sent", "run/peers", "run/samples", "seconds/allreduce", "seconds/matchmaking", "seconds/step",
         "seconds/waiting"]  # fmt: skip


def recipe_for(what: str) -> str:
    """What the guide's table has for it."""
    row = re.search(rf"^\| {re.escape(what)} \| `(.*)` \|$", GUIDE, re.MULTILINE)
    assert row is not None, f"the guide has no recipe for {what}"
    return row.group(1)


def run(what: str, folder: Path, before: str, after: str) -> str:
    """Run the guide's code until it is over with training, where `add_scalar` is that of the recipe."""
    blocks = PYTHON.findall(GUIDE)
    last = next(number for number, block in enumerate(blocks) if PRINTS in block)
    code = "".join(blocks[: last + 1]).replace(PRINTS, f"writes_to({recipe_for(what)})")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HOME": str(folder), "WANDB_DIR": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true",
    }  # fmt: skip
    command = [sys.executable, "-c", "\n".join([before, code, after])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_tensorboard_has_what_the_run_reports(tmp_path: Path) -> None:
    if find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    read = """
optimizer.on_event.__closure__[0].cell_contents.__self__.flush()  # of the SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("runs/mine")
events.Reload()
for name in events.Tags()["scalars"]:
    print("read", name, [event.step for event in events.Scalars(name)])
"""
    said = run("TensorBoard", tmp_path, "import torch.utils.tensorboard", read)
    assert sorted(line for line in said.splitlines() if line.startswith("read ")) == [f"read {n} [4]" for n in NAMES]


@pytest.mark.long
def test_weights_and_biases_has_what_the_run_reports(tmp_path: Path) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    read = f"""
wandb.log({{"over": 1}}, step=logged.step + 1)  # what was logged before is in the summary then
for name in {NAMES}:
    print("read", name, logged.summary["_step"], logged.summary[name] is not None)
wandb.finish()
"""
    said = run("Weights & Biases", tmp_path, "import wandb; logged = wandb.init(project='shoal')", read)
    assert [line for line in said.splitlines() if line.startswith("read ")] == [f"read {name} 4 True" for name in NAMES]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
