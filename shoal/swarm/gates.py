"""The gates of a node. All services of one closed run share one gate."""

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

_told_open: set[str] = set()  # the open runs of which this process has logged that they are open
_lock = threading.Lock()


def admit_to(node_of: Callable[[], Node], run_id: str, membership: Source | None) -> None:
    """Make the gate of a node for a closed run, with this peer's membership. Does nothing in an open run.

    Call this before the services of the run are made. It may take as long as the source of the membership does.

    Args:
        node_of: returns the node. In an open run it is not called.
        run_id: the name of the run.
        membership: the membership as the user gives it: the line, a file or a function; None for an open run, or if
            the node has a gate already.

    Raises:
        ValueError: for an open run with a membership, for a closed run without one, and for what `Holder` refuses.
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
        what = "give the line of text, the name of a file, or a function that returns one"
        raise ValueError(f"membership={membership!r}: {what}")
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
    """The gate of this node for that run; None if there is none yet."""
    gate = node.shared.get(_name(run))
    return gate if isinstance(gate, Gate) else None
