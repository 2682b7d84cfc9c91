"""A rank's share of the state of a cluster. It does what rank 0 tells through `Crew`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.optim.checkpoint import WholeState
from shoal.optim.closures import Closure
from shoal.optim.crew import Crew
from shoal.optim.donors import Carrier
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_replica import Answer, StrandReplica
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.tip import Tip


class Share:
    """The strands of a rank that is not rank 0.

    Args:
        crew: tells this rank when rank 0 no longer wants the average that it waits for.
        replica: the state of these strands.
        gradients: the gradients, or the drift, of these strands.

    Attributes:
        checkpoint: saves and loads these strands.
        own: the part of a checkpoint that this rank saves, or that it has loaded.
    """

    def __init__(self, crew: Crew, replica: StrandReplica, gradients: StrandGradients | StrandDrift) -> None:
        self._gradients, self._crew, self._replica = gradients, crew, replica
        self.checkpoint, self.own = replica.checkpoint, dict[str, Any]()
        self._known: dict[str, Callable[..., Any]] = {
            "accumulate": self._accumulate,
            "reset": gradients.reset,
            "close": gradients.close_here,
            "begin": gradients.begin_rounds,
            "average": self._average,
            "go on": lambda: None,
            "norms": gradients.norms_here,
            "step": self._step,
            "digest": replica.digest,
            "enter": gradients.enter_here,
            "leave": gradients.leave_here,
            "take over": replica.take_over_here,
            "compare": replica.compare,
            "me": lambda: replica.states.me,
            "meet": lambda first: replica.states.meet(msgspec.convert(first, Carrier)),
            "download": self._download,
            "make ready": replica.make_ready_here,
            "load": replica.load_here,
            "drop": replica.drop_here,
            "publish": replica.publish,
            "state dict": self.checkpoint.state_dict,
            "load state dict": lambda: replica.load_state_here(WholeState()),
            "give strands": self._give,
            "check strands": lambda: self.checkpoint.misfit(self.own),
            "take strands": lambda: replica.take_strands_here(self.own),
        }
        if isinstance(gradients, StrandDrift):
            self._known |= {
                "begin epoch": gradients.begin,
                "go on accumulating": gradients.go_on,
                "take back": gradients.take_back,
                "remember": gradients.remember,
                "publish drift": gradients.publish,
                "apply": lambda used: gradients.apply(used=used),
            }

    @property
    def epoch(self) -> int:
        """The epoch of the state."""
        return self._replica.tip.epoch

    def do(self, what: str, given: Sequence[Any]) -> Any:
        """Do what rank 0 has told this rank to do, with the arguments `given`. Errors pass through."""
        return self._known[what](*given)

    def _give(self, common: bytes) -> None:
        self.own = self.checkpoint.save(common)

    def _accumulate(self, batch_size: float, loss: Any = None) -> None:
        if isinstance(self._gradients, StrandDrift):
            told = msgspec.convert(loss, Loss | None)
            self._gradients.accumulate(batch_size, None if told is None else Closure(None, told))
        else:
            self._gradients.accumulate(batch_size)

    def _average(self, timeout: float) -> bytes:
        try:
            return self._gradients.average_here(timeout, self._crew.interrupted())
        except Behind:  # rank 0 has given up the round, or gives it up when it hears this
            return b""

    def _step(self, tip: Any, options: bytes, factor: float, loss: Any) -> None:
        self._gradients.scale_by(factor)
        told = msgspec.convert(tip, Tip), options
        loss = msgspec.convert(loss, Loss | None)
        self._replica.step(self._gradients.as_grad, *told, with_state=False, loss=loss)

    def _download(self, tip: Any, timeout: float, of_strand: Any) -> Answer:
        carriers = msgspec.convert(of_strand, list[list[Carrier]])
        return self._replica.download_here(msgspec.convert(tip, Tip), timeout, carriers)

    def stop(self) -> None:
        """Leave the runs of the strands, and stop serving newcomers."""
        self._gradients.stop()
        self._replica.states.stop()
