"""Checkpoints through torch.distributed.checkpoint: each rank writes and reads its own strands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.clusters import Clusters, clusters
from tests.cluster.test_clusters import check_alike, check_numbers

pytestmark = pytest.mark.processes


def trained(folder: Path, kind: str, size: int, **options: Any) -> Clusters:
    """One cluster, after it has come to its last epoch."""
    told = {"optimizer": "adamw", "strands": 4, "target": 4 * size, **options}
    with clusters(folder, size, **told) as made:
        made.add(kind, size, 0)
        assert made.ended() == [[0] * size], made.logs()
    return made


def loaded(made: Clusters) -> tuple[int, str]:
    """The epoch and the digest with which each rank has begun."""
    found = {
        (said["loaded"], said["digest"])
        for rank in range(len(made.all[0]))
        for said in made.said(0, rank)
        if "loaded" in said
    }
    assert len(found) == 1, made.logs()
    return found.pop()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("fsdp2", ""),
        ("ddp", "diloco"),
        pytest.param("fsdp2", "diloco", marks=pytest.mark.long),
    ],
)
def test_it_goes_on_as_if_there_had_been_no_end(tmp_path: Path, kind: str, mode: str) -> None:
    """Saved by two ranks, loaded and saved by one, then by four, and loaded by two again."""
    files = [str(tmp_path / f"checkpoint {number}") for number in range(3)]
    whole = trained(tmp_path / "0", kind, 2, epochs=6, mode=mode).digests(0, 0)
    first = trained(tmp_path / "1", kind, 2, epochs=3, save_strands=files[0], mode=mode)
    sizes = [sum(file.stat().st_size for file in Path(files[0]).glob(f"__{rank}_*")) for rank in range(2)]
    assert 0.7 < sizes[0] / sizes[1] < 1.4
    alone = trained(tmp_path / "2", "plain", 1, epochs=3, load_strands=files[0], save_strands=files[1], mode=mode)
    more = trained(tmp_path / "3", "fsdp2", 4, epochs=3, load_strands=files[1], save_strands=files[2], mode=mode)
    again = trained(tmp_path / "4", kind, 2, epochs=6, load_strands=files[2], mode=mode)
    assert loaded(alone) == loaded(more) == loaded(again) == (3, first.digests(0, 0)[3]) == (3, whole[3])
    assert [again.digests(0, rank) for rank in range(2)] == [{e: whole[e] for e in (4, 5, 6)}] * 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ddp_goes_on_as_fsdp(tmp_path: Path, optimizer: str) -> None:
    file = str(tmp_path / "checkpoint")
    trained(tmp_path / "1", "ddp", 2, epochs=3, save_strands=file, optimizer=optimizer)
    made = trained(tmp_path / "2", "fsdp2", 2, epochs=6, load_strands=file, optimizer=optimizer)
    assert list(made.digests(0, 1)) == [4, 5, 6]
    check_numbers(made, optimizer, 2, 6)


def test_a_lone_process_goes_on_from_epoch_0(tmp_path: Path) -> None:
    """A checkpoint from before the first step has no optimizer state, though it has room for it."""
    file = str(tmp_path / "checkpoint")
    trained(tmp_path / "1", "fsdp2", 2, epochs=0, save_strands=file)
    made = trained(tmp_path / "2", "plain", 1, epochs=2, load_strands=file)
    assert loaded(made)[0] == 0
    check_alike(made, 2)
    check_numbers(made, "adamw", 1, 2)


def test_another_number_of_strands_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    trained(tmp_path / "1", "ddp", 2, epochs=1, save_strands=file)
    with clusters(tmp_path / "2", 2, optimizer="adamw", strands=2, epochs=2, load_strands=file) as made:
        made.add("ddp", 2, 0)
        assert made.ended() == [[3, 3]], made.logs()
        assert "cut into 2 strands" in made.said(0, 0)[-1]["error"], made.logs()
