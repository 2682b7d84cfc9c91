"""What provokes the lines of the log that the guides explain, in the order of their table; at the end those of the
table under "When peers do not find each other"."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.optim.group_options import GroupOptions
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sockets import SocketTransport
from shoal.reach.mapper import MappingFailed
from shoal.reach.natpmp import NatPmp
from shoal.reach.probe import DialBack
from shoal.reach.upnp import Upnp
from shoal.swarm.loading import refusal
from shoal.swarm.protocol import peer as protocol_peer
from shoal.swarm.protocol import reach
from shoal.swarm.protocol.messages import Pause, Progress
from shoal.swarm.protocol.newcomers import Newcomers
from shoal.swarm.protocol.tip import Tip
from tests.optim.closing import Reads
from tests.optim.lack import Lack
from tests.optim.models import make_model
from tests.optim.test_fallback import together as epoch_of
from tests.optim.test_timeouts import deafen, together
from tests.p2p.test_hostile import stranger
from tests.repository.error_tables import Scene, provokes, raised


def pair(scene: Scene, **arguments: Any) -> list[shoal.Optimizer]:
    """Two peers of a run."""
    return [scene.optimizer(dht, **arguments) for dht in (scene.dht, scene.another_dht())]


def wait_for(scene: Scene, text: str) -> None:
    """Until the log has it; if it never has, the test says so."""
    deadline = time.monotonic() + 100
    while text not in scene.log.text and time.monotonic() < deadline:
        time.sleep(0.02)


def look_again(optimizer: shoal.Optimizer) -> None:
    """Have it look into the directory of the run now, and not in half a minute."""
    optimizer.dht.reactor.loop.call_soon_threadsafe(optimizer._run.swarm.contacts._look_now.set)


@provokes("…: trying again")
def a_round_does_not_end(scene: Scene) -> None:
    times = {"next_chunk_timeout": 60.0, "allreduce_timeout": 1.0, "averaging_timeout": 3.0}
    peers = pair(scene, **times)
    deafen(peers[1])
    together(peers, peers[0])


@provokes(
    "no average (…): going on with this peer's own gradients",
    "no result within … s (…; N members are connected)",
)
def the_other_never_joins(scene: Scene) -> None:
    # Until the other has said so, nobody knows that it takes part.
    scene.ends.enter_context(pytest.MonkeyPatch.context()).setattr(protocol_peer, "SETTLE_SECONDS", 1.0)
    pair(scene, matchmaking_time=60.0, averaging_timeout=1.0)[0].step(batch_size=64)


@provokes("no average (the round's step needs options …): going on with this peer's own gradients and options")
def it_cannot_use_its_own_rounds(scene: Scene) -> None:
    optimizer = scene.optimizer()
    # Only a fault, or another thread that writes into the groups meanwhile, brings this about.
    misfit = "lr is 'high', and 0.1 at this peer"
    scene.ends.enter_context(pytest.MonkeyPatch.context()).setattr(GroupOptions, "misfit", lambda *_: misfit)
    optimizer.step(batch_size=64)


@provokes("N peers are here, and min_peers=M: the next step tries again")
def too_few_are_here(scene: Scene) -> None:
    scene.optimizer(min_peers=2, matchmaking_time=0.5).step(batch_size=64)


@provokes("could not download the state that others hold: …")
def the_donor_gives_nothing(scene: Scene) -> None:
    first = scene.optimizer(load_state_timeout=1.0)
    first.step(batch_size=64)

    async def never() -> Any:
        await asyncio.Event().wait()

    (donor,) = first._donors._donors
    donor._take_snapshot = never
    scene.optimizer(scene.another_dht(), load_state_timeout=1.0).step(batch_size=8)


@provokes("could not download …: the state takes N s, an epoch N s, and the run waits N s at most: …")
def its_line_is_slow(scene: Scene) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise refusal(91.0, Pause(0.0, 12.0, 0.1, 6.4))

    scene.optimizer().step(batch_size=64)
    newcomer = scene.optimizer(scene.another_dht())
    newcomer._run.download = refuse  # type: ignore[method-assign]
    newcomer.step(batch_size=8)


@provokes("… needs N s to load the state over its line, and the run may wait at most N s for newcomers now …")
def the_line_of_another_is_slow(_: Scene) -> None:
    tip = Tip.genesis("run")
    Newcomers(0.1).claims(bytes(32), Progress(tip, 0.0, 1e6, seconds=300.0, loading=True, asks=True), 0.0, leads=True)


@provokes("there is no memory for …")
def the_newcomer_has_no_memory(scene: Scene) -> None:
    scene.optimizer().step(batch_size=64)
    newcomer = scene.optimizer(scene.another_dht())
    with Lack(1):
        newcomer.step(batch_size=8)


@provokes("this peer has left its state of epoch … for that of epoch …")
def it_restarts_from_an_older_checkpoint(scene: Scene) -> None:
    first = scene.optimizer()
    first.step(batch_size=64)
    saved = first.state_dict()
    for _ in range(2):  # one epoch it would replay
        first.step(batch_size=64)
    second = scene.optimizer(scene.another_dht())
    second.load_state_dict(saved)
    second.step(batch_size=8)
    second.step(batch_size=8)


@provokes("this peer's gradients are not finite …: it joins without them")
def the_loss_diverges(scene: Scene) -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    scene.optimizer(params=model.parameters(), averaging_timeout=1.0).step(batch_size=64)


@provokes("step was told of … samples, and no parameter has a gradient")
def it_steps_without_backward(scene: Scene) -> None:
    scene.optimizer(params=make_model().parameters()).step(batch_size=64)


@provokes("all gradients of this peer are zero in an epoch of … samples")
def it_clears_the_gradients_before_the_step(scene: Scene) -> None:
    optimizer = scene.optimizer()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step(batch_size=64)


@provokes("N BatchNorm2d of the model keep running statistics that are not in extra_tensors")
def it_leaves_the_running_statistics_out(scene: Scene) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    scene.optimizer(params=model.parameters())


@provokes("what was written into the model while a step was under way in the background is overwritten by that step")
def it_changes_the_model_while_a_step_is_under_way(scene: Scene) -> None:
    optimizer = scene.optimizer(delay_optimizer_step=True)
    optimizer.step(batch_size=64)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = torch.ones_like(parameter)
    optimizer.state_dict()  # which waits for that step


@provokes("the gradients overflowed (grad_scaler): they are not used")
def scaled_gradients_overflow(scene: Scene) -> None:
    model = make_model()
    optimizer = scene.optimizer(params=model.parameters())
    scaler = shoal.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 10), torch.inf)).sum()).backward()
    optimizer.step(batch_size=8, grad_scaler=scaler)


@provokes(
    "this thread trains several models, and that of the run … has …: while the thread waits in another run, rounds of "
    "this one begin without it"
)
def one_of_two_optimizers_of_a_thread_can_not_be_lent(scene: Scene) -> None:
    scene.optimizer(run_id="generator")
    scene.optimizer(run_id="critic", reuse_grad_buffers=True)


@provokes("this peer's parameters differ from those of peers that compute alike")
def somebody_writes_to_the_parameters(scene: Scene) -> None:
    peers = pair(scene)
    epoch_of(peers, 32)
    with torch.no_grad():
        peers[1].param_groups[0]["params"][0][0, 0] += 1.0
    epoch_of(peers, 32)  # the digests of this round are from before that
    epoch_of(peers, 32)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


@provokes("lr is … here, and … at most peers of the run")
def the_learning_rates_differ(scene: Scene) -> None:
    peers = pair(scene, optimizer=sgd)
    peers[0].param_groups[0]["lr"] = 0.5
    epoch_of(peers, 32)


@provokes("lr of the parameter groups differs from that of most peers …, and takes too much to be told")
def the_learning_rates_of_many_groups_differ(scene: Scene) -> None:
    peers = []
    for dht, rate in ((scene.dht, 0.001), (scene.another_dht(), 0.002)):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate * (n + 1)} for n in range(150)]
        peers.append(scene.optimizer(dht, params=groups, optimizer=sgd))
    epoch_of(peers, 32)


@provokes("lr of the parameter groups changes between steps of one epoch")
def a_scheduler_is_stepped_after_each_batch(scene: Scene) -> None:
    optimizer = scene.optimizer()
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for _ in range(12):
        optimizer.step(batch_size=16)
        scheduler.step()


@provokes("lr of the parameter groups was set to …: scheduler= wins")
def a_learning_rate_is_set_beside_the_scheduler(scene: Scene) -> None:
    optimizer = scene.optimizer(scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step(batch_size=64)


@provokes("step(closure): the closure has returned no finite number")
def a_closure_returns_nothing(scene: Scene) -> None:
    scene.optimizer(optimizer=Reads).step(lambda: torch.tensor(float("nan")), batch_size=64)


@provokes("at … answers peer …, and initial_peers names … there")
def an_initial_peer_was_restarted_with_a_new_identity(scene: Scene) -> None:
    [address] = scene.dht.get_visible_maddrs()
    old = address.with_peer(Identity().peer_id)
    scene.ends.enter_context(shoal.DHT([old, address], start=True))


@provokes("this peer's own address stands in initial_peers with an earlier identity: …")
def this_peer_was_restarted_with_a_new_identity(scene: Scene) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    initial = [f"{own}/p2p/{Identity().peer_id}", *scene.dht.get_visible_maddrs()]
    scene.ends.enter_context(shoal.DHT(initial, host_maddrs=[own], start=True))


@provokes("… could not refresh its record in the DHT")
def the_neighbours_in_the_dht_are_gone(scene: Scene) -> None:
    optimizer = scene.optimizer()
    directory: Any = optimizer._run.swarm.contacts._directory

    async def fail(_: Any) -> None:
        raise PeerUnreachable("all are gone")

    directory.publish = fail
    look_again(optimizer)
    wait_for(scene, "could not refresh")


@provokes("this machine's clock is … behind …")
def the_clock_goes_wrong(scene: Scene) -> None:
    late = pair(scene)[1]
    directory: Any = late._run.swarm.contacts._directory
    directory._clock = lambda: shoal.get_dht_time() - 20.0
    look_again(late)
    wait_for(scene, "clock is")


@provokes("refused a message of …")
def a_peer_sends_bytes_that_are_no_message(scene: Scene) -> None:
    async def send(_: shoal.DHT, dht_node: Any) -> None:
        dht_node.node.transport.send([scene.dht.peer_id], b"\xff nonsense")

    scene.another_dht().run_coroutine(send)
    wait_for(scene, "refused a message of")


@provokes("refused a connection: …")
def a_scanner_connects(scene: Scene) -> None:
    async def connect() -> None:
        async with stranger(scene.dht.get_visible_maddrs()[0]) as scanner:
            await scanner.say(b"what are you?")
            await asyncio.to_thread(wait_for, scene, "refused a connection")

    asyncio.run(connect())


# -- when peers do not find each other


def be_impatient(scene: Scene) -> None:
    """Say soon who is missing."""
    scene.ends.enter_context(pytest.MonkeyPatch.context()).setattr(reach, "PATIENCE", 0.5)


@provokes("N known … of the run … can't be reached")
def two_clients_train_without_a_node(scene: Scene) -> None:
    be_impatient(scene)
    for _ in range(2):
        scene.optimizer(scene.another_dht(client_mode=True))
    wait_for(scene, "can't be reached")


@provokes("this peer is alone in the run …, while the DHT has N other …")
def nobody_else_has_this_run_id(scene: Scene) -> None:
    be_impatient(scene)
    scene.optimizer(scene.another_dht())
    wait_for(scene, "is alone in the run")


@provokes("this peer listens on loopback only …")
def it_joins_through_another_machine_and_listens_on_loopback(scene: Scene) -> None:
    async def resolve(*_: object) -> list[ipaddress.IPv4Address]:
        return [ipaddress.IPv4Address("127.0.0.1")]

    patch = scene.ends.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(SocketTransport, "resolve", resolve)
    patch.setattr(SocketTransport, "source", lambda *_: "203.0.113.9")
    [address] = scene.dht.get_visible_maddrs()
    elsewhere = Multiaddr(f"/dns4/other.example/tcp/{address.port}").with_peer(address.peer_id)
    scene.ends.enter_context(shoal.DHT([elsewhere], start=True))


@provokes("this peer can't be reached from outside: …")
def its_port_is_closed(scene: Scene) -> None:
    async def nobody_answers(*_: object) -> bool:
        return False

    patch = scene.ends.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(SocketTransport, "source", lambda *_: "203.0.113.9")
    patch.setattr(DialBack, "_answers", nobody_answers)
    announced = ["/ip4/203.0.113.9/tcp/31337"]
    scene.ends.enter_context(shoal.DHT(scene.dht.get_visible_maddrs(), start=True, announce_maddrs=announced))


@provokes("the router maps no port to this peer …")
def its_router_maps_no_port(scene: Scene) -> None:
    async def refuse(*_: object) -> None:
        raise MappingFailed("it does not speak it")

    patch = scene.ends.enter_context(pytest.MonkeyPatch.context())
    for mapper in (NatPmp, Upnp):
        patch.setattr(mapper, "map", refuse)
    scene.ends.enter_context(shoal.DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/0"], port_mapping=True))


@provokes("another process uses the identity of this one", "two processes use the identity of peer …")
def the_identity_file_was_copied(scene: Scene) -> None:
    path = str(scene.folder / "identity")
    scene.another_dht(identity_path=path)
    raised(lambda: scene.another_dht(identity_path=path))
