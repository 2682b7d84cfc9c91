"""The examples of the frameworks: two processes of unequal speed train together, and an ordinary script has at most
three lines fewer."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from tests.forked import ROOT, ForkedProcess
from tests.integrations.training import by_epoch

EXAMPLES = ["transformers_trainer", "lightning_module", "accelerate_loop", "lora"]
EPOCH = re.compile(r"^epoch (\d+): \S+ samples of (\d+) peers?, .* state (\w+), tip", re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_at_most_three_lines_are_more_than_in_an_ordinary_script(example: str) -> None:
    tree = ast.parse((ROOT / "examples" / f"{example}.py").read_text())
    code = ast.unparse(tree.body[1:])  # type: ignore[arg-type]  # without the docstring, each statement in one line
    assert sum(bool(re.search(r"\bshoal\b", line)) for line in code.splitlines()) <= 3


def history(printed: str) -> list[dict[str, Any]]:
    return [
        {"kind": "epoch", "epoch": int(number), "peers": int(peers), "digest": digest, "time": 0.0}
        for number, peers, digest in EPOCH.findall(printed)
    ]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes_train_together(example: str, tmp_path: Path) -> None:
    pauses = {"0.0005": tmp_path / "fast.log", "0.002": tmp_path / "slow.log"}
    temporary = {"TMPDIR": str(tmp_path)}
    with shoal.DHT(start=True) as node:
        address = str(node.get_visible_maddrs()[0])
        processes = [
            ForkedProcess("tests.integrations.example", example, pause, address, environment=temporary, log=log)
            for pause, log in pauses.items()
        ]
        try:
            codes = [process.wait(150) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    printed = [log.read_text() for log in pauses.values()]
    assert codes == [0, 0], printed
    assert not any("Traceback" in text for text in printed), printed
    histories = [history(text) for text in printed]
    by_epoch(histories)
    assert sum(event["peers"] == 2 for event in histories[0]) >= 5, printed
    for text in printed:
        assert text.count("downloaded the state") <= 2, printed
