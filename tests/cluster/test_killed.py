"""A rank that is killed in any phase of an epoch ends its cluster by name, and the other peers go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.clusters import clusters
from tests.soaked import only_in_soak

pytestmark = pytest.mark.processes

MATCHMAKING_SECONDS = 5.0  # for which the others would wait for a member that they expect
PHASES = {  # by the number of strands: a phase, and the rank that is killed in it
    1: [("committed", 0), ("stepping", 0)],
    4: [
        ("accumulating", 1),
        ("in a strand's round", 1),
        ("in the run's round", 0),
        ("committed", 0),
        ("stepping", 1),
        ("downloading", 1),
    ],
}


@pytest.mark.long
@only_in_soak
@pytest.mark.parametrize("strands", [1, 4])
def test_its_cluster_ends_and_the_others_have_one_step_for_each_epoch(tmp_path: Path, strands: int) -> None:
    """One cluster after the other loses a rank."""
    options: dict[str, Any] = {"optimizer": "adamw", "epochs": 4000, "waits": False, "pause": 0.1, "strands": strands}
    options["matchmaking_time"] = MATCHMAKING_SECONDS
    with clusters(tmp_path, 5, **options) as made:
        made.add("ddp", 2, 0)
        made.add("plain", 1, 2)
        made.wait(lambda: len(made.digests(1, 0)) > 3)
        for number, (phase, lost) in enumerate(PHASES[strands], 2):
            victims = made.add("fsdp2", 2, 3, dies=phase, dying=lost)
            made.wait(lambda victims=victims: all(victim.process.poll() is not None for victim in victims))
            assert victims[lost].wait(1.0) == -9, made.logs()
            mate = 1 - lost
            assert victims[mate].wait(1.0) not in (0, -9), made.logs()
            assert f"rank {lost} (process {victims[lost].process.pid} on " in made.log(number, mate), made.logs()
            assert phase == "downloading" or len(made.digests(number, mate)) > 1, "it was killed before it had trained"
            before = max(made.digests(0, 0))
            made.wait(lambda before=before: max(made.digests(0, 0)) > before + 3, 10.0)
        for number in (0, 1):
            waited, around = made.longest_wait(number)
            assert waited < MATCHMAKING_SECONDS, f"the others waited for one that was killed: {around}"
        for number, rank in ((0, 1), (1, 0), *((victim, 0) for victim in range(2, len(made.all)))):
            mine, theirs = made.digests(0, 0), made.digests(number, rank)
            assert all(mine[epoch] == digest for epoch, digest in theirs.items() if epoch in mine)
