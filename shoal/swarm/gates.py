"""The gates of a node: one for each closed run that it is in, which all its services of that run share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from shoal.dht.records import get_dht_time
from shoal.membership.holder import Holder, Source
from shoal.membership.run import ClosedRun
from shoal.p2p.node import Node
from shoal.swarm.gate import Gate

log = logging.getLogger(__name__)

_told_open: set[str] = set()  # the open runs of which this process has said what they are
_lock = threading.Lock()


def admit_to(node_of: Callable[[], Node], run_id: str, membership: Source | None) -> None:
    """Have a node's services of a closed run show a membership; in an open run, there is none. To be called before
    they are made; may take as long as the source does.

    Args:
        node_of: gives the node, which an open run does not need to have yet.
        run_id, membership: as users give them.

    Raises:
        ValueError: for an open run with a membership, and for a closed one without; and as `Holder`.
    """
    run = ClosedRun.of(run_id)
    if run is None:
        if membership is not None:
            raise ValueError(
                f"run_id={run_id!r} is an open run, which needs no membership: leave membership= out, or give the id "
                "that `shoal keys run` has printed (name@key)"
            )
        with _lock:
            is_new = run_id not in _told_open and not any(run_id.startswith(f"{told}/") for told in _told_open)
            _told_open.add(run_id)
        if is_new:
            log.info(
                "%r is an open run: whoever knows an address of a peer and the run id can join it, contribute to it "
                "and download its state; `shoal keys run` makes a closed one", run_id
            )  # fmt: skip
        return
    node = node_of()
    if membership is None:
        gate_of(node, run_id)  # raises if there is none yet
        return
    if not (callable(membership) or isinstance(membership, str | os.PathLike)):
        raise ValueError(
            f"membership={membership!r}: give the line of text, the name of a file, or a function that returns one"
        )
    holder = Holder(membership, run, node.peer_id, get_dht_time())
    with _lock:
        present = _shared(node, run)
        if present is None or not present.in_use:
            node.shared[_name(run)] = Gate(node, run, holder)
        elif holder.membership.serial >= present.holder.membership.serial:
            present.holder = holder


def gate_of(node: Node, run_id: str) -> Gate | None:
    """This node's gate of the run; None if the run is open.

    Raises:
        ValueError: if the run is closed, and `admit_to` was not called.
    """
    run = ClosedRun.of(run_id)
    if run is None:
        return None
    gate = _shared(node, run)
    if gate is None:
        raise ValueError(
            f"{run.run_id!r} is a closed run: give membership=, the line (or its file) that its owner gets from "
            f"`shoal keys admit {run.run_id} {node.peer_id}`"
        )
    return gate


def _name(run: ClosedRun) -> str:
    return f"gate of {run.run_id}"


def _shared(node: Node, run: ClosedRun) -> Gate | None:
    """The gate that services of this node have for that run, if one of them has made it."""
    gate = node.shared.get(_name(run))
    return gate if isinstance(gate, Gate) else None
