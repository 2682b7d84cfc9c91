"""The public DHT class, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.dht import DHT, DHTNode, RecordValidator, SchemaValidator, SignatureValidator, get_dht_time, records
from shoal.dht.records import DHTRecord, ValueWithExpiration
from shoal.dht.validation import owner_marker
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sockets import SocketTransport
from shoal.reach import asking
from shoal.reach.probe import DialBack


@pytest.fixture
def swarm() -> Iterator[list[DHT]]:
    """Four peers."""
    with ExitStack() as stack:
        first = stack.enter_context(DHT(start=True))
        others = [stack.enter_context(DHT(first.get_visible_maddrs(), start=True)) for _ in range(3)]
        yield [first, *others]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_store_and_get(swarm: list[DHT]) -> None:
    expiration = get_dht_time() + 60
    assert swarm[1].store("key", {"a": [1, None, b"x"]}, expiration)
    for dht in swarm:
        assert dht.get("key") == ValueWithExpiration({"a": [1, None, b"x"]}, expiration)
        assert dht.get("nothing") is None
        assert dht.is_alive()


def test_a_value_is_encoded_once_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    encode = records.encode_value

    def counting(value: object) -> bytes:
        encoded.append(value)
        return encode(value)

    checked: list[DHTRecord] = []

    class Asked(RecordValidator):
        def validate(self, record: DHTRecord) -> bool:
            checked.append(record)
            return True

    monkeypatch.setattr(records, "encode_value", counting)
    value = {"a": [1, 2]}
    with DHT(start=True, record_validators=[Asked()]) as dht:
        stored = dht.store("key", value, get_dht_time() + 60, return_future=True)
        value["a"].append(3)
        assert stored.result(60)
        assert (len(encoded), len(checked)) == (1, 1)
        found = dht.get("key")
        assert found is not None
        assert found.value == {"a": [1, 2]}, "it was encoded after `store` had returned"


def test_return_future(swarm: list[DHT]) -> None:
    stored = swarm[0].store("key", 1, get_dht_time() + 60, return_future=True)
    assert isinstance(stored, Future)
    assert stored.result(60) is True
    found = swarm[1].get("key", return_future=True).result(60)
    assert found is not None
    assert found.value == 1


def test_subkeys_by_many_peers_and_their_expiration(swarm: list[DHT], monkeypatch: pytest.MonkeyPatch) -> None:
    soon, later = get_dht_time() + 100, get_dht_time() + 200
    for index, dht in enumerate(swarm):
        expiration = soon if index == 0 else later
        assert dht.store("members", [index], expiration, subkey=owner_marker(dht.peer_id))
    expected = {owner_marker(dht.peer_id): [index] for index, dht in enumerate(swarm)}
    for dht in swarm:
        found = dht.get("members", latest=True)
        assert found is not None
        assert {subkey: entry.value for subkey, entry in found.value.items()} == expected
    monkeypatch.setattr("shoal.dht.records.time", SimpleNamespace(time=lambda: soon + 1.0))
    del expected[owner_marker(swarm[0].peer_id)]
    for dht in swarm:
        found = dht.get("members")
        assert found is not None
        assert {subkey: entry.value for subkey, entry in found.value.items()} == expected


def test_another_peers_subkey_can_not_be_written(swarm: list[DHT]) -> None:
    assert not swarm[0].store("members", 1, get_dht_time() + 60, subkey=owner_marker(swarm[1].peer_id))


def test_store_and_get_of_subkeys_are_fast(swarm: list[DHT]) -> None:
    times = []
    for index in range(20):
        start = time.perf_counter()
        assert swarm[1].store("members", index, get_dht_time() + 60, subkey=owner_marker(swarm[1].peer_id))
        assert swarm[2].get("members", latest=True) is not None
        times.append(time.perf_counter() - start)
    # 2 ms where nothing else runs, so few that were not held up by others show it.
    assert sorted(times)[2] < 0.05, times


def test_client_mode(swarm: list[DHT]) -> None:
    with DHT(swarm[0].get_visible_maddrs(), client_mode=True, start=True) as client:
        assert client.get_visible_maddrs() == []
        assert client.node.addresses == []
        assert client.store("key", "from a client", get_dht_time() + 60)
        assert [dht.get("key") for dht in swarm] == [client.get("key", latest=True)] * 4

        async def knows_client(_dht: DHT, dht_node: DHTNode) -> bool:
            return dht_node.table.get(client.peer_id) is not None

        assert not any(dht.run_coroutine(knows_client) for dht in swarm)


def test_identity_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with DHT(start=True, identity_path=path) as dht:
        peer_id = dht.peer_id
        addresses = dht.get_visible_maddrs()
    # The same list of initial peers serves every node, the first one included.
    with DHT(addresses, start=True, identity_path=path) as dht:
        assert dht.peer_id == peer_id


def test_two_processes_with_one_identity_are_both_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A home folder was copied, and with it the identity of the node through which its copy is to join."""

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    options: dict[str, Any] = {"identity_path": tmp_path / "identity", "start": True}
    with DHT(**options) as first, DHT(first.get_visible_maddrs(), **options) as second:
        assert first.peer_id == second.peer_id
        deadline = time.monotonic() + 60
        while len(warned()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(warned()) == 2
        assert all(f"another process uses the identity of this one, peer {first.peer_id}" in text for text in warned())
    with DHT(**options) as again:
        assert again.peer_id == first.peer_id
    assert len(warned()) == 2, "a restart is no twin"


def test_an_initial_peer_that_was_started_again_is_found_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(DHT(identity_path=tmp_path / "identity", start=True))
        [address] = first.get_visible_maddrs()
        client = stack.enter_context(DHT([address], client_mode=True, start=True))
        first.shutdown()
        assert not client.store("key", 1, get_dht_time() + 60)
        host = f"/ip4/{address.host}/tcp/{address.port}"
        again = stack.enter_context(DHT(identity_path=tmp_path / "identity", host_maddrs=[host], start=True))
        deadline = time.monotonic() + 60
        while not client.store("key", 1, get_dht_time() + 60):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert again.get("key").value == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "is_client", "warned"),
    [({}, True, True), ({"client_mode": False}, False, True), ({"client_mode": True}, True, False)],
)
def test_who_joins_through_another_machine_and_listens_on_loopback_is_told_so(
    options: dict[str, Any],
    is_client: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def resolve(_transport: SocketTransport, _address: Multiaddr) -> list[ipaddress.IPv4Address]:
        return [ipaddress.IPv4Address("127.0.0.1")]

    monkeypatch.setattr(SocketTransport, "resolve", resolve)
    monkeypatch.setattr(SocketTransport, "source", lambda *_: "203.0.113.9")
    with DHT(start=True) as first:
        [address] = first.get_visible_maddrs()
        initial = f"/dns4/other.example/tcp/{address.port}/p2p/{first.peer_id}"
        with DHT([initial], start=True, **options) as second:
            assert second.client_mode == is_client
            assert bool(second.get_visible_maddrs()) != is_client
            mine = [f"/{own.protocol}/{own.host}/tcp/{own.port}" for own in second.node.addresses]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == warned
    if warned:
        ways_out = ("host_maddrs=['/ip4/0.0.0.0/tcp/31337']", "port_mapping=True", "shoal node --relay")
        for part in (mine[0], "203.0.113.9", "listens on loopback only", *ways_out):
            assert part in warnings[0]


def test_a_peer_that_only_relays_reach_is_no_client_and_keeps_nothing_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def nobody_answers(*_: object) -> bool:
        return False

    monkeypatch.setattr(DialBack, "_answers", nobody_answers)
    with DHT(start=True, relay=True) as first, monkeypatch.context() as patch:
        patch.setattr(SocketTransport, "source", lambda *_: "203.0.113.9")
        for host_maddrs in ("/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/0"):
            with DHT(first.get_visible_maddrs(), host_maddrs=[host_maddrs], start=True, await_ready=False) as second:
                assert not second.client_mode, "known when it has started, for which it is waited"
                assert second.dht_node.client_mode
                [relay] = first.get_visible_maddrs()
                assert second.get_visible_maddrs() == [relay.by_relay(second.peer_id)]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("client_mode", [None, False])
def test_on_loopback_nobody_is_asked(client_mode: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("a peer on loopback was asked")

    monkeypatch.setattr(asking, "probe", never)
    with DHT(start=True, client_mode=client_mode) as first:
        assert not first.client_mode
        with DHT(first.get_visible_maddrs(), start=True, client_mode=client_mode) as second:
            assert not second.client_mode
            assert second.get_visible_maddrs()


def test_whether_it_is_a_client_is_not_known_before_the_start() -> None:
    assert DHT(client_mode=False).client_mode is False
    with pytest.raises(RuntimeError, match="was not started"):
        DHT().client_mode  # noqa: B018 (it is a property)


def test_validators(swarm: list[DHT]) -> None:
    with DHT(swarm[0].get_visible_maddrs(), start=True, record_validators=[SchemaValidator({"number": int})]) as strict:
        assert not strict.store("number", "x", get_dht_time() + 60)
        assert swarm[0].store("text", 1, get_dht_time() + 60)
        assert strict.get("text") is not None
        strict.add_validators([SchemaValidator({"text": str})])
        assert strict.get("text", latest=True) is None


def test_a_validator_of_ones_own(swarm: list[DHT]) -> None:
    class Short(RecordValidator):
        def validate(self, record: DHTRecord) -> bool:
            return len(record.value) < 10

    rules = [Short(), SignatureValidator(Identity())]
    with DHT(swarm[0].get_visible_maddrs(), start=True, record_validators=rules) as strict:
        assert not strict.store("key", "much too long", get_dht_time() + 60)
        assert strict.store("key", "short", get_dht_time() + 60)


def test_run_coroutine(swarm: list[DHT]) -> None:
    async def sum_of(dht: DHT, dht_node: DHTNode) -> int:
        assert dht_node is dht.dht_node
        assert asyncio.get_running_loop() is dht.reactor.loop
        await dht_node.store("key", 1, get_dht_time() + 60)
        found = await dht_node.get("key")
        return found.value + 1 if found else 0

    assert swarm[0].run_coroutine(sum_of) == 2
    assert swarm[0].run_coroutine(sum_of, return_future=True).result(60) == 2

    async def fails(_dht: DHT, _dht_node: DHTNode) -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        swarm[0].run_coroutine(fails)


def test_waiting_on_the_reactors_thread_is_refused(swarm: list[DHT]) -> None:
    async def waits(dht: DHT, _dht_node: DHTNode) -> object:
        return dht.get("key")

    with pytest.raises(RuntimeError, match="reactor's thread"):
        swarm[0].run_coroutine(waits)


# -- start and end


def test_shutdown_can_be_repeated_and_ends_what_is_under_way(swarm: list[DHT]) -> None:
    dht = DHT(start=True)  # beside others, so that the reactor goes on

    async def forever(_dht: DHT, _dht_node: DHTNode) -> None:
        await asyncio.sleep(3600)

    future = dht.run_coroutine(forever, return_future=True)
    dht.shutdown()
    dht.shutdown()
    assert swarm[0].is_alive()
    assert future.cancelled()
    assert not dht.is_alive()
    for use in (lambda: dht.get("key"), dht.get_visible_maddrs, lambda: dht.node, lambda: dht.reactor):
        with pytest.raises(RuntimeError, match="was shut down"):
            use()


def test_it_starts_when_told_to() -> None:
    dht = DHT()
    assert not dht.is_alive()
    for use in (lambda: dht.peer_id, lambda: dht.get("key"), lambda: dht.reactor):
        with pytest.raises(RuntimeError, match="was not started"):
            use()
    dht.run_in_background(await_ready=False)
    dht.wait_until_ready(60)
    assert dht.is_alive()
    with pytest.raises(RuntimeError, match="started before"):
        dht.run_in_background()
    dht.shutdown()
    with DHT() as started, DHT(start=True) as other:
        assert started.is_alive()
        assert other.is_alive()


def test_it_starts_without_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}").with_peer(Identity().peer_id)
        dht = DHT([address], start=True, await_ready=False)
        assert not dht.is_alive()
        assert dht.peer_id
        dht.shutdown()


def test_an_end_that_takes_too_long_is_given_up(
    swarm: list[DHT], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dht = DHT(start=True, shutdown_timeout=0.1)
    dht_node = dht.dht_node
    monkeypatch.setattr(dht_node, "close", lambda: asyncio.sleep(3600))
    dht.shutdown()
    assert "did not end within 0.1 s" in caplog.text
    monkeypatch.undo()
    swarm[0].run_coroutine(lambda _dht, _node: dht_node.node.close())


def test_unreachable_initial_peers_are_named_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.p2p.node.DIAL_TIMEOUT", 100.0)  # it is the other one that counts
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = socket.socket()
        free.bind(("127.0.0.1", 0))  # bound, and nobody listens
        ports = [free.getsockname()[1], silent.getsockname()[1]]
        addresses = [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").with_peer(Identity().peer_id) for port in ports]
        start = time.monotonic()
        with pytest.raises(PeerUnreachable, match="none of the initial peers answered") as error:
            DHT(addresses, start=True, bootstrap_timeout=2.0)
        assert time.monotonic() - start < 40
        free.close()
    for address in addresses:
        assert f"\n  {address}: " in str(error.value)


def test_a_start_that_takes_too_long_can_be_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}").with_peer(Identity().peer_id)
        dht = DHT([address])
        with pytest.raises(TimeoutError):
            dht.run_in_background(timeout=0.2)
    assert not dht.is_alive()


def test_to_wait_in_vain_for_a_start_does_not_end_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}").with_peer(Identity().peer_id)
        dht = DHT([address])
        dht.run_in_background(await_ready=False)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                dht.wait_until_ready(0.1)
        dht.shutdown()
        with pytest.raises(RuntimeError, match="was shut down"):
            dht.wait_until_ready()
    with DHT(start=True) as joined:
        joined.shutdown()
        with pytest.raises(RuntimeError, match="was shut down"):
            joined.wait_until_ready()


def test_an_address_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            DHT(host_maddrs=[address], start=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_peers": ["nonsense"]}, "initial_peers: 'nonsense' is not an address"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/1"]}, "/p2p/<peer id>"),
        ({"host_maddrs": ["/ip4/127.0.0.1/udp/1"]}, "host_maddrs"),
        ({"host_maddrs": []}, "host_maddrs is empty"),
        ({"client_mode": True}, "client_mode=True needs initial_peers"),
        ({"num_replicas": 0}, "num_replicas"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DHT(**arguments, start=True)  # type: ignore[arg-type]


def test_a_single_address_is_no_list() -> None:
    with pytest.raises(TypeError, match="must be a list"):
        DHT("/ip4/127.0.0.1/tcp/1")


def test_records_that_make_no_sense(swarm: list[DHT]) -> None:
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        swarm[0].store("key", bytes(70_000), get_dht_time() + 60)
    with pytest.raises(TypeError, match="plain data"):
        swarm[0].store("key", object(), get_dht_time() + 60)
    with pytest.raises(ValueError, match="expiration time"):
        swarm[0].store("key", 1, float("nan"))
    with pytest.raises(TypeError, match="str, bytes or int"):
        swarm[0].get(None)  # type: ignore[call-overload]


def test_visible_addresses() -> None:
    public = Multiaddr("/dns4/example.org/tcp/4000")
    with DHT(host_maddrs=["/ip4/0.0.0.0/tcp/0"], announce_maddrs=[public], start=True) as everywhere:
        first, *rest = everywhere.get_visible_maddrs(latest=True)
        assert first == public.with_peer(everywhere.peer_id)
        assert "0.0.0.0" not in [address.host for address in rest]
        assert rest[-1].host == "127.0.0.1"
        assert {address.port for address in rest} == {everywhere.node.addresses[0].port}
        with DHT([rest[-1]], start=True) as other:
            assert other.is_alive()


def test_an_interpreter_that_forgets_to_shut_down_ends() -> None:
    program = """
from shoal.dht.dht import DHT
first = DHT(start=True)
second = DHT(first.get_visible_maddrs(), start=True)
print(second.get("key"))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "None\n", "")


def test_a_forked_child_can_ask_for_addresses_and_nothing_else() -> None:
    """Scripts for the reference fork workers that join their parent's DHT; its other calls would wait for a thread that
    is not there."""
    with DHT(start=True) as dht:
        expected = dht.get_visible_maddrs()
        child = os.fork()
        if child == 0:
            try:
                refused = False
                try:
                    dht.get("key")
                except RuntimeError as error:
                    refused = "does not run in this process" in str(error)
                os._exit(0 if refused and dht.get_visible_maddrs() == expected else 1)
            finally:
                os._exit(2)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a thread that it does not have")
        assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_nodes_on_a_loop_of_the_users_own() -> None:
    async def scenario() -> None:
        first = await DHTNode.create()
        second = await DHTNode.create(
            [str(first.visible_addresses()[0])], record_validator=SchemaValidator({"n": int}), num_replicas=2
        )
        assert await second.store("n", 7, get_dht_time() + 60)
        assert not await second.store("n", "seven", get_dht_time() + 60)
        found = await first.get("n", latest=True)
        assert found is not None
        assert found.value == 7
        address = str((await second.get_visible_maddrs())[0])
        await second.shutdown()
        with pytest.raises(PeerUnreachable):
            await DHTNode.create([address], bootstrap_timeout=1.0)
        alone = await DHTNode.create([address], bootstrap_timeout=1.0, ensure_bootstrap_success=False)
        await asyncio.gather(alone.shutdown(), first.shutdown())

    asyncio.run(scenario())
