"""Each option of `DecentralizedAverager` does what it says."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.exchange import Exchange
from shoal.compression import CompressionInfo, Float16Compression, NoCompression, RoleAdaptiveCompression, TensorRole
from shoal.swarm.protocol.messages import Begin, Part, Result
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Swarm
from tests.averaging.test_averager import averagers


def step_all(peers: list[DecentralizedAverager], **options: Any) -> None:
    for control in [peer.step(wait=False, **options) for peer in peers]:
        control.result(60.0)


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[Begin]:
    """Every BEGIN that is followed."""
    seen: list[Begin] = []
    original = Exchange.__init__

    def init(self: Exchange, vectors: Any, me: bytes, begin: Begin, *rest: Any) -> None:
        seen.append(begin)
        original(self, vectors, me, begin, *rest)

    monkeypatch.setattr(Exchange, "__init__", init)
    return seen


def test_alpha_moves_tensors_a_part_of_the_way() -> None:
    tensors = [[torch.full((5,), float(i))] for i in (0, 4)]
    with averagers(tensors, averaging_alpha=[0.25, 1.0]) as peers:
        step_all(peers)
    assert torch.equal(tensors[0][0], torch.full((5,), 0.5))
    assert torch.equal(tensors[1][0], torch.full((5,), 2.0))


def test_parts_are_as_large_as_it_is_said(begins: list[Begin]) -> None:
    for part, elements in ((1 << 16, 1 << 14), (1 << 18, 1 << 16)):
        with averagers([[torch.zeros(1 << 20)] for _ in range(2)], part_size_bytes=part) as peers:
            step_all(peers)
        assert begins[-1].chunk_elements == elements


def test_a_member_with_too_little_to_reduce_reduces_nothing(begins: list[Begin]) -> None:
    def reduced(**options: Any) -> list[int]:
        bandwidth = [1.0, 1.0, 1.0, 0.7]
        with averagers([[torch.zeros(1 << 18)] for _ in range(4)], bandwidth=bandwidth, **options) as peers:
            step_all(peers)
            slow = [member.peer for member in begins[-1].members].index(peers[3].peer_id)
        starts = begins[-1].starts
        return [starts[slow + 1] - starts[slow], starts[-1]]

    some, chunks = reduced()
    assert some < chunks / 10
    assert reduced(min_vector_size=(1 << 18) // 10) == [0, chunks]
    assert some > 0, "this test shows nothing"


def test_compression_by_role_and_name() -> None:
    codec = RoleAdaptiveCompression(gradient=Float16Compression(), default=NoCompression())
    roles = [TensorRole.GRADIENT, TensorRole.PARAMETER]
    third = torch.full((5000,), 1 / 3)
    tensors = [[third.clone(), third.clone()] for _ in range(2)]
    infos = [CompressionInfo(n, (5000,), torch.float32, role) for n, role in enumerate(roles)]
    with averagers(tensors, compression=codec, tensor_infos=[infos, infos]) as peers:
        step_all(peers)
    for gradient, parameter in tensors:
        assert torch.equal(gradient, third.half().float())  # the mean of two equal numbers is exact
        assert torch.equal(parameter, third)
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match="tensor_infos"):
        DecentralizedAverager([torch.zeros(2)], dht, prefix="test", start=False, tensor_infos=infos)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (Part, "sender_timeout"),
        pytest.param(Result, "reducer_timeout", marks=pytest.mark.long),
        pytest.param(Part, "next_chunk_timeout", marks=pytest.mark.long),
    ],
)
def test_who_owes_too_long_is_left_out(kind: type, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member answers, but keeps its parts, or its results, to itself."""
    tensors = [[torch.full((50_000,), float(i))] for i in range(3)]
    others = {
        "sender_timeout": 100.0,
        "reducer_timeout": 100.0,
        "next_chunk_timeout": 100.0,
        "allreduce_timeout": 100.0,
    }
    if option == "next_chunk_timeout":
        others = {"allreduce_timeout": 100.0}
    original = Exchange.__init__
    with averagers(tensors, **{**others, option: 3.0}) as peers:
        silent = peers[2].peer_id.key

        def init(self: Exchange, vectors: Any, me: bytes, begin: Begin, send: Any, fault: Any) -> None:
            def keeping(keys: Any, message: Any, buffers: Any, name: bytes) -> None:
                if not (me == silent and isinstance(message, kind)):
                    send(keys, message, buffers, name)

            original(self, vectors, me, begin, keeping, fault)

        monkeypatch.setattr(Exchange, "__init__", init)
        began = time.monotonic()
        controls = [peer.step(wait=False, allow_retries=False, timeout=90.0) for peer in peers]
        for control in controls[:2]:
            control.result(100.0)
        assert time.monotonic() - began < 60.0
        assert isinstance(controls[2].exception(100.0), shoal.AveragingError | None)
    assert torch.equal(tensors[0][0], tensors[1][0])


def test_an_averager_that_is_asked_for_its_state() -> None:
    tensors = [[torch.full((3,), float(i))] for i in range(4)]
    with averagers(tensors, client_mode=[False, False, False, True]) as peers:
        for peer, priority in zip(peers, (3.0, 5.0, 4.0), strict=False):
            peer.state_sharing_priority = priority
        peers[1].allow_state_sharing = False

        def loaded_by(number: int) -> float:
            state = peers[number].load_state_from_peers(timeout=20.0)
            assert state is not None
            return state[1][0][0].item()

        assert loaded_by(0) == 2.0
        assert loaded_by(2) == 0.0
        assert loaded_by(3) == 2.0
        peers[1].allow_state_sharing = True
        assert loaded_by(0) == 1.0
        peers[0].state_sharing_priority = 10.0
        assert loaded_by(2) == 0.0
        peers[3].allow_state_sharing, peers[3].state_sharing_priority = True, 20.0
        assert loaded_by(1) == 3.0, "a client gives its state over the connection that it made"


def test_the_state_is_a_snapshot_of_what_the_user_says() -> None:
    calls = 0
    state = {"x": 123}
    tensors = [torch.randn(3), torch.randint(0, 5, (3,))]

    class Averager(DecentralizedAverager):
        def get_current_state(self) -> tuple[Any, ...]:
            nonlocal calls
            calls += 1
            return state, tensors

    with shoal.DHT(start=True) as one, shoal.DHT(one.get_visible_maddrs(), start=True) as other:
        donor = Averager([torch.zeros(3)], one, prefix="test", start=True)
        newcomer = Averager([torch.zeros(3)], other, prefix="test", start=True, allow_state_sharing=False)
        assert calls == 0
        got = newcomer.load_state_from_peers()
        assert calls == 1
        assert got is not None
        assert got[0] == state
        assert all(torch.equal(a, b) for a, b in zip(got[1], tensors, strict=True))
        tensors[1][2] = 9
        state["y"] = 1
        assert got[0] != state
        assert got[1][1][2] != 9
        again = newcomer.load_state_from_peers()
        assert calls == 2
        assert again is not None
        assert again[0] == state
        assert again[1][1][2] == 9
        newcomer.shutdown()
        donor.shutdown()


def test_a_state_that_is_nested_too_deeply_is_an_error_of_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
    monkeypatch.setattr(DecentralizedAverager, "get_current_state", lambda self: (nested, [torch.zeros(3)]))
    with (
        averagers([[torch.zeros(3)], [torch.zeros(3)]]) as (_, newcomer),
        pytest.raises(shoal.AveragingError, match=r"can't be read: .*recursion"),
    ):
        newcomer.load_state_from_peers(timeout=10.0)


def test_an_averager_can_be_made_before_its_dht_is_started() -> None:
    dht = shoal.DHT(start=False)
    peer = DecentralizedAverager([torch.zeros(3)], dht, start=False, prefix="test")
    try:
        dht.run_in_background()
        peer.run_in_background()
        assert peer.peer_id == dht.peer_id
    finally:
        peer.shutdown()
        dht.shutdown()


def test_nobody_who_shares_is_no_state_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Neither for ever nor silently (as the reference's downloader)."""
    with averagers([[torch.zeros(3)] for _ in range(2)], allow_state_sharing=False) as peers:
        assert peers[0].load_state_from_peers(timeout=20.0) is None
        assert "this peer does not share its state" in caplog.text
    caplog.clear()
    with averagers([[torch.zeros(3)]]) as (peer,):
        assert peer.load_state_from_peers(timeout=20.0) is None
        assert "nobody to ask" in caplog.text


def test_what_an_averager_says_of_itself() -> None:
    tensors = [[torch.zeros(3, 2), torch.zeros(())] for _ in range(3)]
    options: dict[str, Any] = {"client_mode": [True, False, False], "auxiliary": [False, True, False]}
    with averagers(tensors, declare_state_period=5.0, daemon=False, request_timeout=1.0, **options) as peers:
        assert [peer.mode for peer in peers] == [Role.CLIENT, Role.AUXILIARY, Role.NODE]
        assert [peer.allow_state_sharing for peer in peers] == [False, False, True]
        assert {peer.total_size for peer in peers} == {7}
        assert len({peer.schema_hash for peer in peers}) == 1
        assert all(peer.is_alive() and peer.request_timeout == 1.0 for peer in peers)


def test_the_state_has_names_and_roles_beside_it() -> None:
    infos = [CompressionInfo("weight", (3,), torch.float32, TensorRole.PARAMETER)]
    with averagers([[torch.ones(3)] for _ in range(2)], tensor_infos=[infos, None]) as (named, unnamed):
        unnamed.set_group_bits("01")
        for peer, expected in ((named, infos), (unnamed, None)):
            data, tensors, told = peer.get_current_state()
            assert data == {"group_key": peer.get_group_bits()}
            assert torch.equal(tensors[0], torch.ones(3))
            assert told == peer.tensor_infos == expected
        unnamed.set_group_bits("")


def test_group_bits_with_and_without_waiting() -> None:
    with averagers([[torch.zeros(3)]]) as (peer,):
        assert peer.set_group_bits("01", wait=True) is None
        assert (peer.get_group_bits(), peer.get_group_bits(wait=True)) == ("01", "01")
        peer.set_group_bits("10", wait=False).result(0)
        assert peer.get_group_bits(wait=False).result(0) == "10"
        with pytest.raises(ValueError, match="group bits '2'"):
            peer.set_group_bits("2", wait=False)


def test_an_averager_starts_while_its_user_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, original = asyncio.Event(), Swarm.start

    async def slowly(self: Swarm, **given: Any) -> None:
        await begun.wait()
        await original(self, **given)

    monkeypatch.setattr(Swarm, "start", slowly)
    with shoal.DHT(start=True) as dht:
        peer = DecentralizedAverager([torch.zeros(3)], dht, prefix="test", start=False)
        with pytest.raises(RuntimeError, match="not started"):
            peer.wait_until_ready()
        with pytest.raises(TimeoutError):
            peer.run_in_background(timeout=0.05)
        assert not peer.is_alive()
        peer.shutdown()  # ends the start, too
        with pytest.raises(RuntimeError, match="not started, or was shut down"):
            peer.step()
        peer.run_in_background(await_ready=False)
        with pytest.raises(TimeoutError):
            peer.wait_until_ready(timeout=0.05)
        dht.reactor.loop.call_soon_threadsafe(begun.set)
        peer.wait_until_ready(timeout=60.0)
        assert peer.is_alive()
        peer.shutdown()
        assert not peer.is_alive()


def test_a_start_that_failed_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Swarm, **given: Any) -> None:
        raise OSError("no network")

    with shoal.DHT(start=True) as dht:
        peer = DecentralizedAverager([torch.zeros(3)], dht, prefix="test", start=False)
        with monkeypatch.context() as patched:
            patched.setattr(Swarm, "start", fails)
            with pytest.raises(OSError, match="no network"):
                peer.run_in_background()
        assert not peer.is_alive()
        peer.run_in_background()
        assert peer.is_alive()
        peer.shutdown()


def test_every_argument_of_the_reference_is_there() -> None:
    import inspect

    names = {
        "averaged_tensors", "dht", "start", "prefix", "target_group_size", "min_group_size", "initial_group_bits",
        "min_matchmaking_time", "request_timeout", "averaging_alpha", "part_size_bytes", "allreduce_timeout",
        "next_chunk_timeout", "sender_timeout", "reducer_timeout", "compression", "error_feedback", "state_compression",
        "tensor_infos", "bandwidth", "min_vector_size", "auxiliary", "allow_state_sharing", "declare_state_period",
        "client_mode", "daemon", "shutdown_timeout", "membership",
    }  # fmt: skip
    assert set(inspect.signature(DecentralizedAverager.__init__).parameters) - {"self"} == names
