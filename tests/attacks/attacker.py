"""The attacker as a process of its own, with one identity: joins as a member or connects as a stranger, and attacks
until it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import shoal
from shoal.dht.messages import SERVICE as DHT_SERVICE
from shoal.dht.messages import Sender, Store, Stored
from shoal.dht.records import DHTRecord
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Reply, Service
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Role
from shoal.swarm.swarm import Swarm
from tests.attacks import forged
from tests.attacks.attack import MemberAttack, StrangerAttack
from tests.attacks.attacks import ATTACKS, POISONS
from tests.attacks.honest import RUN_ID, TARGET, make_model, make_optimizer
from tests.telling import say

log = logging.getLogger(__name__)


def attacked(strands: int) -> str:
    """The run that is attacked: that of the honest peers, or of the first of its strands."""
    return RUN_ID if strands == 1 else f"{RUN_ID}/strand/0.{strands}"


class Inside:
    """A member of the run, made by `shoal.Optimizer`, whose every message an attack may change.

    Args:
        dht: its place in the DHT.
        trains: whether it brings samples; else it is an auxiliary peer, which a run with strands has not.
        strands: of the run. Where it has several, the first strand's own run is attacked.
    """

    target = float(TARGET)
    buffers: Sequence[Any]
    _swarm: Swarm  # from `obey` on

    def __init__(self, dht: shoal.DHT, trains: bool, strands: int) -> None:
        self.trains, self.scale, self._model = trains or strands > 1, 1.0, make_model()
        self.run_id, self._strands = attacked(strands), strands
        self.optimizer = make_optimizer(dht, self._model, strands, auxiliary=not self.trains)
        self.node, self.buffers, self.name = dht.node, (), b""

    async def obey(self, attack: MemberAttack) -> None:
        """From now on the attack decides; on the reactor."""
        gradients: Any = self.optimizer._gradients
        swarm = self.optimizer._run.swarm if self._strands == 1 else None
        while swarm is None:  # it is in the run of a strand once it trains
            await asyncio.sleep(0.02)
            swarm = gradients.averagers[0].engine.swarm
        self._swarm, self._channel, self.rules = swarm, swarm._channel, swarm.rules
        self._say, self._ask = self._channel.notify, self._channel.ask
        self.scale = attack.scale
        forged.sign_with(self._swarm._signer)

        def notify(keys: Iterable[bytes], message: Any, buffers: Any = (), name: bytes = b"") -> None:
            keys = list(keys)
            self.buffers, self.name = buffers, name
            said = attack.sends(keys, message)
            if said is not None:
                self._say(keys, said, attack.sends_bytes(keys, message, buffers), name)

        async def ask(key: bytes, message: Any, timeout: float, buffers: Any = ()) -> Reply:
            return await self._ask(key, attack.asks(key, message), timeout, buffers)

        service = self._swarm.service
        _, handler = self.node._services[service.name]

        def handle(peer: PeerID, message: Any, buffers: Sequence[memoryview]) -> Any:
            return attack.hears(peer, message, lambda: handler(peer, message, buffers))

        self._channel.notify, self._channel.ask = notify, ask  # type: ignore[method-assign]
        self.node._services[service.name] = (service, handle)

    def train(self) -> None:
        """What a trainer's thread does; a member that is put out, or errs, goes on."""
        while True:
            try:
                if self.trains:
                    inputs = torch.randn(1, 16)
                    (self._model(inputs).sum() * self.scale).backward()
                    time.sleep(0.1)
                    self.optimizer.step(batch_size=1)
                    self.optimizer.zero_grad()
                else:
                    self.optimizer.step()
            except (shoal.AveragingError, RuntimeError) as error:
                log.warning("%s", error)
                time.sleep(0.2)

    @property
    def tip(self) -> Tip:
        """Where the run is, as far as this peer knows."""
        return self._swarm.behind or self._swarm.tip

    @property
    def me(self) -> Member:
        return self._swarm.me

    @property
    def terms(self) -> msg.Terms:
        return self._swarm.peer.terms

    def members(self) -> list[Member]:
        """Those that are connected, this peer included."""
        return self._swarm.peer.view.connected()

    def others(self) -> list[bytes]:
        """The keys of all peers of the run that are connected, whatever they think of this one."""
        return [m.key for m in self.members() if m.key != self.me.key]

    def say(self, keys: Iterable[bytes], message: Any) -> None:
        self._say(keys, message)

    def say_with(self, keys: Iterable[bytes], message: Any, buffers: Sequence[Any], name: bytes) -> None:
        self._say(keys, message, buffers, name)

    def end_round(self) -> None:
        """End the round that this peer coordinates, if it does."""
        peer = self._swarm.peer
        if peer.leading is not None and not peer.leading.over:
            peer.out.extend(peer.leading.abort("not yet"))
            self._swarm._perform()

    def serve_instead(self, service: Service, handler: Any) -> None:
        """Answer the messages of a service in another way than shoal does."""
        self.node._services[service.name] = (service, handler)

    def ask_soon(self, key: bytes, message: Any) -> None:
        async def ask() -> None:
            with contextlib.suppress(P2PError, TimeoutError):
                await self._ask(key, message, 5.0)

        self.node.spawn(ask())


class Outside:
    """A peer that is connected to the others, and no member of the run.

    Args:
        dht: its place in the DHT, as a client.
        addresses: of the others.
        strands: of the run. Where it has several, the first strand's own run is attacked.
    """

    def __init__(self, dht: shoal.DHT, addresses: Iterable[str], strands: int) -> None:
        self.node, self.run_id = dht.node, attacked(strands)
        self._service = Service(forged.SERVICE.format(run_id=self.run_id), msg.Message)
        self._where = {a.peer_id: a for a in map(Multiaddr, addresses) if a.peer_id is not None}
        self.peers = list(self._where)
        self._me = Member(self.node.peer_id.key, (), Role.CLIENT)
        for peer, address in self._where.items():
            self.node.learn(peer, [address])

    def where(self, peer: PeerID) -> tuple[str, int]:
        address = self._where[peer]
        return address.host, address.port

    async def hello(self, peer: PeerID) -> msg.Hello | None:
        """What that peer says of itself to one that has other terms, and so is no member."""
        terms = msg.Terms({"optimizer": "Another"}, bytes(32))
        hello = forged.hello(self._me, terms, Tip.genesis(self.run_id))
        with contextlib.suppress(P2PError, TimeoutError):
            return await self.node.call(peer, self._service, hello, msg.Hello, timeout=5)
        return None

    def say(self, peer: PeerID, message: Any) -> None:
        self.node.notify([peer], self._service, message)

    async def ask(self, peer: PeerID, message: Any) -> Reply:
        return await self.node.call_for_buffers(peer, self._service, message, timeout=5)

    async def store(self, peer: PeerID, records: list[DHTRecord]) -> list[bool]:
        """Which of the records that peer keeps."""
        with contextlib.suppress(P2PError, TimeoutError):
            request = Store(Sender(True, ()), records, False)
            return (await self.node.call(peer, DHT_SERVICE, request, Stored, timeout=5)).kept
        return []

    def store_soon(self, peer: PeerID, records: list[DHTRecord]) -> None:
        self.node.spawn(self.store(peer, records))


async def attack_inside(inside: Inside, attack: MemberAttack) -> None:
    await inside.obey(attack)
    tip, again = None, 0.0
    while True:
        if inside.tip != tip:
            tip = inside.tip
            await attack.at_tip()
        if time.monotonic() >= again:
            again = time.monotonic() + attack.every
            await attack.again()
        await asyncio.sleep(0.02)


async def attack_outside(attack: StrangerAttack) -> None:
    while True:
        until = time.monotonic() + attack.every
        await attack.again()
        await asyncio.sleep(max(0.01, until - time.monotonic()))


def join(dht: shoal.DHT, trains: bool, strands: int) -> Inside:
    """Become a member; as long as the run refuses that, the attack comes to nothing."""
    refused = 0
    while True:
        try:
            return Inside(dht, trains, strands)
        except shoal.AveragingError as error:
            log.warning("not in the run: %s", error)
            if not refused:
                say(addresses=[], peer=str(dht.peer_id))  # it has begun
            refused += 1
            say(event="gained", refusals=refused)
            time.sleep(1.0)


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(filename=options["log"], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kind, addresses = (ATTACKS | POISONS)[options["attack"]], options["initial_peers"]
    is_member = issubclass(kind, MemberAttack)
    dht = shoal.DHT(addresses, start=True, client_mode=not is_member, identity_path=options["identity"])
    attack: MemberAttack | StrangerAttack
    if issubclass(kind, MemberAttack):
        inside = join(dht, kind.trains, options["strands"])
        attack = kind(inside)
        threading.Thread(target=inside.train, daemon=True).start()
        future = dht.submit(attack_inside(inside, attack))
    else:
        attack = kind(Outside(dht, addresses, options["strands"]))
        future = dht.submit(attack_outside(attack))
    say(addresses=[], peer=str(dht.peer_id))
    while not future.done():
        time.sleep(1.0)
        say(event="gained", **attack.gained)
    future.result()


if __name__ == "__main__":
    main()
