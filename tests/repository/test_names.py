"""One name, one thing: no two public classes have the same name, but for those that are meant to."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.forked import ROOT

FRAMEWORKS = "what a framework sees of a run has one name, whichever the framework is"
TORCH = "the name is torch's, and what it stands for as well"
ALLOWED = {
    "ClusterStrategy": FRAMEWORKS,
    "Ends": FRAMEWORKS,
    "InSwarm": FRAMEWORKS,
    "SwarmStrategy": FRAMEWORKS,
    "GradScaler": TORCH,
    "SGD": TORCH,
    "QHM": "the state of the functional form, and the optimizer that has one, as in torch's own pairs",
    "Join": "torch's context manager, and the message JOIN of the run's protocol",
    "Part": "of a closed run, in the public API; and the message PART of the run's protocol",
    "Ping": "the same question of two services",
    "Pong": "its answer",
    "PutOut": "a member that was put out: as the swarm remembers it, and as a health record has it",
}


def test_no_public_class_has_the_name_of_another() -> None:
    places = defaultdict[str, list[Path]](list)
    for path in sorted((ROOT / "shoal").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= shared.keys(), "a reason for a name that nobody shares any more"
