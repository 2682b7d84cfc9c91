"""`DecentralizedAverager` over real sockets: means, roles, groups, gathered data, state, errors."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.swarm.contacts import Contacts


@contextmanager
def averagers(tensors: Sequence[list[torch.Tensor]], **options: Any) -> Iterator[list[DecentralizedAverager]]:
    """An averager for each list of tensors; an option that is a list holds one value for each."""
    started: list[DecentralizedAverager | shoal.DHT] = []
    try:
        dhts: list[shoal.DHT] = []
        for _ in tensors:
            dhts.append(shoal.DHT(dhts[0].get_visible_maddrs() if dhts else [], start=True))
            started.append(dhts[-1])
        made = []
        for number, (mine, dht) in enumerate(zip(tensors, dhts, strict=True)):
            own = {k: v[number] if isinstance(v, list) else v for k, v in options.items()}
            made.append(DecentralizedAverager(mine, dht, prefix="test", start=True, **own))
            started.append(made[-1])
        yield made
    finally:
        for each in reversed(started):
            each.shutdown()


def four_peers() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(123, generator=generator), torch.randn(3, generator=generator)] for _ in range(4)]


def weighted_mean(tensors: list[list[torch.Tensor]], weights: list[float]) -> list[torch.Tensor]:
    total = sum(weights) or 1.0
    return [
        sum((t.double() * w for t, w in zip(column, weights, strict=True)), torch.zeros(())) / total
        for column in zip(*tensors, strict=True)
    ]


ROLES = [
    *(["client"] * c + ["auxiliary"] * a + ["node"] * (4 - c - a) for c, a in itertools.product(range(3), range(3))),
    ["auxiliary"] * 4,
    ["client", "auxiliary", "auxiliary", "auxiliary"],
    ["node", "auxiliary", "auxiliary", "auxiliary"],
    ["client", "client", "client", "node"],
]


@pytest.mark.parametrize("roles", ROLES, ids=lambda roles: "-".join(role[0] for role in roles))
@pytest.mark.parametrize("weighted", [False, True])
def test_exact_mean_whatever_the_roles(roles: list[str], weighted: bool) -> None:
    tensors = four_peers()
    weights: list[float] = [0.5, 7.0, 2.25, 1.0] if weighted else [1.0] * 4
    counted = [0.0 if role == "auxiliary" else w for w, role in zip(weights, roles, strict=True)]
    expected = weighted_mean(tensors, counted)
    before = [[t.clone() for t in mine] for mine in tensors]
    options = {
        "client_mode": [role == "client" for role in roles],
        "auxiliary": [role == "auxiliary" for role in roles],
    }
    with averagers(tensors, target_group_size=4, min_matchmaking_time=30.0, **options) as peers:
        futures = [
            peer.step(weight=w, gather={"role": role}, wait=False)
            for peer, w, role in zip(peers, counted, roles, strict=True)
        ]
        results = [future.result(60) for future in futures]
        assert all(result == results[0] for result in results)
        assert results[0] == {p.peer_id: {"role": r} for p, r in zip(peers, roles, strict=True)}
        held = []
        for peer, role, old in zip(peers, roles, before, strict=True):
            with peer.get_tensors() as averaged:
                if role == "auxiliary":
                    assert all(torch.equal(a, b) for a, b in zip(averaged, old, strict=True))
                else:
                    held.append(torch.cat([t.flatten() for t in averaged]))
                    for ours, exact in zip(averaged, expected, strict=True):
                        assert torch.allclose(ours.double(), exact, atol=1e-6)
        assert all(torch.equal(h, held[0]) for h in held)


def test_more_peers_than_a_group_form_several() -> None:
    with averagers(
        [[torch.full((5,), float(i))] for i in range(8)], target_group_size=4, min_matchmaking_time=30.0
    ) as peers:
        futures = [peer.step(gather=number, wait=False) for number, peer in enumerate(peers)]
        groups = [tuple(sorted(future.result(60).values())) for future in futures]
        assert all(len(group) == 4 for group in groups)
        assert sorted(set().union(*groups)) == list(range(8))
        for peer, group in zip(peers, groups, strict=True):
            with peer.get_tensors() as (tensor,):
                assert torch.allclose(tensor, torch.full((5,), sum(group) / 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_and_odd_shapes(dtype: torch.dtype) -> None:
    values = [[torch.randn(3, 5).to(dtype), torch.randn(()), torch.empty(0), torch.randn(2, 2).t()] for _ in range(3)]
    expected = weighted_mean(values, [1.0] * 3)
    with averagers(values, target_group_size=3) as peers:
        for future in [peer.step(wait=False) for peer in peers]:
            future.result(60)
        for mine in values[1:]:
            assert all(torch.equal(a, b) for a, b in zip(mine, values[0], strict=True))
        tolerance = torch.finfo(dtype).eps * 4
        for ours, exact in zip(values[0], expected, strict=True):
            assert torch.allclose(ours.double(), exact, atol=max(tolerance, 1e-6), rtol=tolerance)


def test_float16_compression_keeps_peers_equal() -> None:
    tensors = [[torch.randn(1000)] for _ in range(4)]
    expected = weighted_mean(tensors, [1.0] * 4)[0]
    codec = shoal.compression.Float16Compression()
    with averagers(tensors, target_group_size=4, compression=codec) as peers:
        for future in [peer.step(wait=False) for peer in peers]:
            future.result(60)
    assert all(torch.equal(mine, tensors[0][0]) for (mine,) in tensors)
    assert torch.allclose(tensors[0][0].double(), expected, atol=4e-3)


def test_too_few_peers_raise_and_change_nothing() -> None:
    tensor = torch.randn(3)
    before = tensor.clone()
    with averagers([[tensor]]) as (peer,), pytest.raises(shoal.AveragingError, match=r"no result within \d"):
        peer.step(timeout=1.0, scheduled_time=shoal.get_dht_time() + 0.2)
    assert torch.equal(tensor, before)


def test_peers_of_another_layout_or_codec_are_refused_by_name() -> None:
    tensors = [[torch.randn(4)], [torch.randn(4)], [torch.randn(5)]]
    with averagers(tensors, min_matchmaking_time=5.0) as peers:
        futures = [peer.step(wait=False, timeout=60.0) for peer in peers]
        with pytest.raises(
            shoal.AveragingError, match=r"averaged_tensors\[0\] is float32\[5\] here, and float32\[4\] there"
        ):
            futures[2].result(60)
        assert len(futures[0].result(60)) == len(futures[1].result(60)) == 2
    codecs = [shoal.compression.NoCompression()] * 2 + [shoal.compression.Float16Compression()]
    with averagers([[torch.randn(4)] for _ in range(3)], min_matchmaking_time=5.0, compression=codecs) as peers:
        futures = [peer.step(wait=False, timeout=60.0) for peer in peers]
        with pytest.raises(shoal.AveragingError, match="compression is float16"):
            futures[2].result(60)
        assert len(futures[0].result(60)) == 2


def test_a_peer_with_nan_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """By an error if it is put out of the round, as by a coordinator that has seen it; else by a WARNING."""
    told = ""
    tensors = [[torch.full((10,), float(i))] for i in range(4)]
    tensors[3][0][7] = float("nan")
    with averagers(tensors, target_group_size=4) as peers:
        futures = [peer.step(wait=False, timeout=60.0, allow_retries=False) for peer in peers]
        for future in futures[:3]:
            future.result(60)
        try:
            futures[3].result(60)
        except shoal.AveragingError as error:
            told = str(error)
    assert "not finite (NaN or infinity)" in caplog.text + told
    for (tensor,) in tensors[:3]:
        assert torch.equal(tensor, torch.ones(10))


def test_state_is_downloaded_whole() -> None:
    with averagers([[torch.randn(3), torch.randn(2, 2)] for _ in range(3)]) as peers:
        peers[0].allow_state_sharing = peers[2].allow_state_sharing = False
        loaded = peers[0].load_state_from_peers()
        assert loaded is not None
        with peers[1].get_tensors() as theirs:
            assert all(torch.equal(a, b) for a, b in zip(loaded[1], theirs, strict=True))


def test_the_state_can_be_asked_for_as_soon_as_a_peer_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start has not ended yet then."""
    met, go_on, start = threading.Event(), threading.Event(), Contacts.start

    async def held(self: Contacts) -> None:
        await start(self)
        met.set()
        await asyncio.to_thread(go_on.wait, 20)

    with averagers([[torch.zeros(2)]]) as (peer,), shoal.DHT(peer.dht.get_visible_maddrs(), start=True) as dht:
        monkeypatch.setattr(Contacts, "start", held)
        other = DecentralizedAverager([torch.ones(2)], dht, prefix=peer.prefix, start=False)
        try:
            other.run_in_background(await_ready=False)
            assert met.wait(20)
            loaded = peer.load_state_from_peers()
        finally:
            go_on.set()
        other.wait_until_ready()
        other.shutdown()
    assert loaded is not None
    assert loaded[1][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client_mode": True, "auxiliary": True}, "choose one"),
        ({"target_group_size": 1}, "min_group_size"),
        ({"bandwidth": -1.0}, "bandwidth"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], reason: str) -> None:
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match=reason):
        DecentralizedAverager([torch.zeros(2)], dht, prefix="test", start=False, **options)


def test_arguments_of_step_that_make_no_sense() -> None:
    with averagers([[torch.zeros(2)]]) as (peer,):
        for weight in (-1.0, float("nan"), float("inf"), "1"):
            with pytest.raises(ValueError, match="weight"):
                peer.step(weight=weight)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gather"):
            peer.step(gather=object())
        with pytest.raises(ValueError, match="gather takes"):
            peer.step(gather=b"0" * 100_000)
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match=r"averaged_tensors\[1\]"):
        DecentralizedAverager([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], dht, prefix="test", start=False)


def test_nothing_is_left_running() -> None:
    with averagers([[torch.zeros(2)] for _ in range(2)], target_group_size=2) as peers:
        for future in [peer.step(wait=False) for peer in peers]:
            future.result(60)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")] == []
