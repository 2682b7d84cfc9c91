"""Several groups: averages spread from group to group until all peers have the global one (Moshpit SGD)."""

from __future__ import annotations

import itertools

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.runs import next_bits
from tests.averaging.test_averager import averagers
from tests.swarm.rounds import begin_of, key, members


def step_all(peers: list[DecentralizedAverager]) -> list[int]:
    """One step of all peers at once; how many were in the group of each."""
    return [len(control.result(60.0)) for control in [peer.step(wait=False) for peer in peers]]


def held_by(peers: list[DecentralizedAverager]) -> torch.Tensor:
    values = []
    for peer in peers:
        with peer.get_tensors() as (tensor,):
            values.append(tensor.clone())
    return torch.stack(values)


def test_pairs_of_eight_peers_have_the_global_average_after_three_rounds() -> None:
    torch.manual_seed(0)
    tensors = [[torch.randn(3)] for _ in range(8)]
    bits = [f"{number // 2:02b}" for number in range(8)]
    with averagers(tensors, target_group_size=2, min_matchmaking_time=20.0, initial_group_bits=bits) as peers:
        before = held_by(peers)
        mean, spread = before.mean(0), before.std(0)
        for number in range(1, 6):
            assert step_all(peers) == [2] * 8
            now = held_by(peers)
            assert torch.allclose(now.mean(0), mean, atol=1e-6, rtol=0), "the mean of all was not kept"
            assert torch.all(now.std(0) <= spread + 1e-6)
            spread = now.std(0)
            # Each value is held by the two that made it, bit for bit.
            assert len({tuple(row.tolist()) for row in now}) <= 4
            if number >= 3:
                assert torch.all(spread < 1e-6), f"not yet the same after {number} rounds"


def test_peers_of_other_bits_are_not_averaged_with() -> None:
    tensors = [[torch.full((3,), float(i))] for i in range(4)]
    with averagers(tensors, min_matchmaking_time=1.0, initial_group_bits=["00", "00", "01", "10"]) as peers:
        controls = [peer.step(wait=False, timeout=limit) for peer, limit in zip(peers, (60, 60, 4, 4), strict=True)]
        assert all(len(control.result(60.0)) == 2 for control in controls[:2])
        for control in controls[2:]:
            with pytest.raises(shoal.AveragingError, match="no result within"):
                control.result(60.0)
        assert torch.equal(tensors[0][0], torch.full((3,), 0.5))
        assert [tensors[2][0][0].item(), tensors[3][0][0].item()] == [2.0, 3.0]
        assert [peer.get_group_bits() for peer in peers[2:]] == ["01", "10"], "only a round moves them on"
        for peer in peers[2:]:
            peer.set_group_bits("11")
        controls = [peer.step(wait=False, timeout=60.0) for peer in peers[2:]]
        assert all(len(control.result(60.0)) == 2 for control in controls)


@pytest.mark.usefixtures("others_are_awaited")  # the members of a group may find each other one by one
def test_groups_of_one_set_of_bits_list_what_their_members_gather() -> None:
    tensors = [[torch.ones(1)] for _ in range(8)]
    with averagers(tensors, target_group_size=4, min_matchmaking_time=20.0, initial_group_bits="000") as peers:
        controls = [peer.step(wait=False, gather={"batch": 123 + number}) for number, peer in enumerate(peers)]
        told = {peer.peer_id: {"batch": 123 + number} for number, peer in enumerate(peers)}
        for control in controls:
            gathered = control.result(60.0)
            assert len(gathered) == 4
            assert all(told[peer] == said for peer, said in gathered.items())
        assert all(len(peer.get_group_bits()) == 3 for peer in peers)


@pytest.mark.parametrize("attempt", range(5))
def test_members_of_a_group_come_into_different_ones(attempt: int) -> None:
    group = members(1, 2, 3, 4)
    begin = begin_of(group, attempt=attempt)
    moved = [next_bits("0110", begin, key(number), 4) for number in (1, 2, 3, 4)]
    assert sorted(moved) == ["1000", "1001", "1010", "1011"]
    assert next_bits("", begin, key(1), 4) == ""
    assert next_bits("01", begin, key(9), 4) == "01", "who was not in the round stays"


def test_the_grid_mixes_all_whatever_the_rotation() -> None:
    """16 peers in groups of 4: two rounds reach everybody, since members of a group part."""
    bits = {number: f"{number // 4:02b}" for number in range(1, 16)} | {0: "00"}
    knows: dict[int, set[int]] = {number: {number} for number in bits}
    for ballot in range(1, 3):
        moved = {}
        for group in {*bits.values()}:
            numbers = [number for number in bits if bits[number] == group]
            assert len(numbers) == 4
            begin = begin_of(members(*numbers), attempt=ballot * 7 + int(group, 2))
            together = set(itertools.chain.from_iterable(knows[number] for number in numbers))
            for number in numbers:
                knows[number] = together
                moved[number] = next_bits(group, begin, key(number), 4)
        bits = moved
    assert all(len(known) == 16 for known in knows.values())


@pytest.mark.parametrize("bits", ["2", "0b01", None, "0" * 65])
def test_bits_are_zeros_and_ones(bits: str) -> None:
    with shoal.DHT(start=True) as dht:
        with pytest.raises(ValueError, match="group bits"):
            DecentralizedAverager([torch.zeros(1)], dht, prefix="test", start=False, initial_group_bits=bits)
        averager = DecentralizedAverager([torch.zeros(1)], dht, prefix="test", start=False)
        with pytest.raises(ValueError, match="group bits"):
            averager.set_group_bits(bits)
