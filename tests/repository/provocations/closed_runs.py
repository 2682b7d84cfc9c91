"""What provokes the messages that the guide to closed runs promises."""

from __future__ import annotations

import time
from pathlib import Path

import shoal
from shoal.membership import OwnerKey, Part
from shoal.p2p.identity import PeerID
from shoal.swarm.gate import Gate
from shoal.swarm.gates import gate_of
from tests.repository.error_tables import Scene, provokes, raised

OWNER = OwnerKey("guide")
RUN_ID = OWNER.run.run_id


def line(peer: PeerID, part: Part = Part.TRAIN, *, days: float = 1.0, ago: float = 0.0) -> str:
    return OWNER.admit(peer, [part], days, time.time() - ago)


def member(scene: Scene) -> tuple[shoal.Optimizer, Gate]:
    """A peer of the run, which is alone there."""
    dht = scene.another_dht()
    made = scene.optimizer(dht, run_id=RUN_ID, membership=line(dht.peer_id), matchmaking_time=0.2)
    gate = gate_of(dht.node, RUN_ID)
    assert gate is not None
    return made, gate


@provokes("… is a closed run: give membership=")
def joins_without_a_membership(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID))


@provokes("… is an open run, which needs no membership")
def joins_an_open_run_with_one(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(membership=line(scene.dht.peer_id)))


@provokes("'@' stands before the 52 characters of its owner's key")
def mistypes_the_run_id(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID[:-1], membership=line(scene.dht.peer_id)))


@provokes("the membership is of the peer …, and this one is …")
def takes_the_membership_of_another(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID, membership=line(PeerID(bytes(32)))))


@provokes("the membership has expired (…)")
def comes_too_late(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID, membership=line(scene.dht.peer_id, ago=2 * 86400.0)))


@provokes("… is neither a membership nor a file that can be read")
def mistypes_the_file(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID, membership=Path(scene.folder / "nothing")))


@provokes("this membership is of the run …, not of …")
def takes_the_membership_of_another_run(scene: Scene) -> str:
    other = OwnerKey("other").admit(scene.dht.peer_id, [Part.TRAIN], 1.0, time.time())
    return raised(lambda: scene.optimizer(run_id=RUN_ID, membership=other))


@provokes("the membership of … permits this peer to …, not to …")
def trains_as_a_client(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(run_id=RUN_ID, membership=line(scene.dht.peer_id, Part.CLIENT)))


# -- in the log


@provokes("… is an open run: whoever knows an address of a peer and the run id can join it")
def makes_an_open_run(scene: Scene) -> None:
    scene.optimizer()


@provokes("the owner of … has revoked this peer's membership")
def is_revoked(scene: Scene) -> None:
    made, gate = member(scene)
    made._run.call(lambda: gate.hear(OWNER.revoke([made.dht.peer_id], None, time.time()), ""))


@provokes("this peer's membership of … expires …")
def has_a_membership_that_ends(scene: Scene) -> None:
    dht = scene.another_dht()
    scene.optimizer(dht, run_id=RUN_ID, membership=line(dht.peer_id, days=4 / 86400))
    time.sleep(4.5)  # three quarters of the time, and until it is looked for


@provokes("the owner has pinned … and nobody in reach holds that state")
def nobody_holds_the_pinned_state(scene: Scene) -> None:
    made, gate = member(scene)
    pin = OWNER.pin(f"7:100:{'ab' * 32}", None, time.time())
    made._run.call(lambda: gate.hear("", pin))
    made.step(batch_size=8)
