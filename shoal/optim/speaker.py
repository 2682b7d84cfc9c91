"""Leads the calls that all ranks of a cluster make at once: the side of rank 0, whose optimizer speaks for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from shoal.cluster.cluster import Cluster
from shoal.cluster.gang import Gang
from shoal.cluster.messages import Go, Report, Verdict
from shoal.cluster.strands import Strands
from shoal.cluster.ties import ClusterError
from shoal.cluster.whole import Whole
from shoal.interrupts import raised_by
from shoal.optim.crew import Crew
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.tip import Tip

T = TypeVar("T")


class Speaker:
    """Rank 0's side of the calls that all ranks make at once.

    Args:
        cluster: the ranks of the cluster.
        params: the model's parameters, in the form that an optimizer takes.
        extras: the extra tensors, which all ranks hold.

    Attributes:
        gang: the connections to the other ranks.
        crew: tells the other ranks what to do, if they carry strands.
        whole: the parameters in one piece, or the pieces of rank 0's strands.
        losses: the loss and the samples of each other rank in the present step.
        state: returns the tip of the parameters and the parameter groups; None until the optimizer is made.
    """

    def __init__(self, cluster: Cluster, params: Iterable[Any], extras: Sequence[Tensor]) -> None:
        self.gang, self._extras = Gang(cluster.group), extras
        self.crew = Crew(self.gang)
        try:
            self.whole = parameters_of(cluster, params)
        except BaseException:  # Ctrl-C, too: the others must not wait
            self.gang.leave()
            raise
        self.state: Callable[[], tuple[Tip, Sequence[Mapping[str, Any]]]] | None = None
        self.losses: list[tuple[Loss | None, float]] = []
        self._sent: Tip | None = None  # the tip of the parameters that the others have
        self._leads = False

    @property
    def strands(self) -> Strands | None:
        """The pieces that this rank steps, if ranks carry strands; else None."""
        return self.whole if isinstance(self.whole, Strands) else None

    def lead(
        self,
        call: str,
        act: Callable[[int], T],
        prepare: Callable[[], int] = lambda: 0,
        collect: Callable[[], object] | None = None,
        *,
        moves: bool = False,
    ) -> T:
        """Make one call for all ranks. If this rank raises an error, the others hear of it.

        Args:
            call: the name of the call, which all ranks must make.
            act: what rank 0 does, given the number of samples of all ranks.
            prepare: what rank 0 does first, alone. It returns the number of samples of rank 0.
            collect: a collective of all ranks before `act`, for sharded parameters.
            moves: whether the parameters may change even if the epoch does not.

        Returns:
            What `act` returns.

        Raises:
            ClusterError: if a rank is lost, has raised an error or has made another call.
            ValueError: if ranks have different gradients.
        """
        if self._leads:  # a callback of the user, within a call of all ranks
            return act(prepare())
        self._leads = True
        try:
            try:
                samples = prepare()
                if collect is not None and self.whole.gathers_alone:  # as the others do before they report
                    collect()
            except Exception as error:
                self._hear(call, 0, error, moves)
                raise
            reports = self._hear(call, samples, None, moves)
            samples += sum(report.samples for report in reports)
            self.losses = [(msgspec.convert(each.loss, Loss | None), each.samples) for each in reports]
            try:
                if collect is not None and not self.whole.gathers_alone:
                    self.gang.say(Go())
                    with self.gang.collectives():
                        collect()
                result = act(samples)
                self.crew.hear()
            except BaseException as error:  # Ctrl-C, too: the others wait for a verdict
                self._tell(error, None, moves)
                raise
            self._tell(None, result, moves)
            return result
        finally:
            self._leads = False

    def forget(self) -> None:
        """Note that this rank's parameters were set in another way. The others get them in the next call."""
        self._sent = None

    def _hear(self, call: str, samples: int, refused: Exception | None, moves: bool) -> list[Report]:
        """Receive the reports of the other ranks for this call. If they do not fit together, tell all ranks why."""
        try:
            self.crew.hear()
            reports = self.gang.hear_reports()
            if refused is None:
                self._compare(call, samples, reports)
        except (ClusterError, ValueError) as error:
            self._tell(refused or error, None, moves)
            raise
        if refused is not None:
            self._tell(refused, None, moves)
        return reports

    def _compare(self, call: str, samples: int, reports: Sequence[Report]) -> None:
        names, gradients = self.gang.names, self.whole.gradients if call == "step" else b""
        for rank, report in enumerate(reports, 1):
            if report.error:
                raise ClusterError(f"{names[rank]} has raised {report.error}")
            if report.call != call:
                raise ClusterError(
                    f"{names[0]} has called {call} and {names[rank]} {report.call}: the ranks of a cluster make the "
                    "same calls"
                )
            if report.gradients != gradients:
                raise ValueError(
                    f"{names[0]} and {names[rank]} have gradients of other parameters: the ranks of a cluster make the "
                    "same calls of `backward` and `zero_grad`"
                )
        mine = self.whole.digest() if samples and any(report.digest for report in reports) else b""
        for rank, report in enumerate(reports, 1):
            if mine and report.digest not in (b"", mine):
                raise ValueError(
                    f"{names[0]} and {names[rank]} have other gradients: wrap the model in DistributedDataParallel, or "
                    "reduce the gradients before `step`"
                )

    def _tell(self, error: BaseException | None, result: object, moves: bool) -> None:
        with contextlib.suppress(ClusterError):  # which every call of the gang raises
            self.crew.hear()
        error = raised_by(error)
        said = "" if error is None else f"{type(error).__name__}: {error}"[:4096]
        if self.state is None:
            return self.gang.say(Verdict(0, False, error=said))
        tip, groups = self.state()
        changed = moves or tip != self._sent or (self.strands is not None and self.strands.is_ahead)
        options = [{name: value for name, value in group.items() if type(value) is float} for group in groups]
        self.gang.say(Verdict(tip.epoch, changed, options, said, bool(result)))
        if changed:
            with self.gang.collectives():
                self.whole.spread(self._extras)
            self._sent = tip


def parameters_of(cluster: Cluster, params: Iterable[Any]) -> Whole | Strands:
    """The parameters that a rank's optimizer steps: the whole model at rank 0, or the pieces of the rank's strands.

    Raises:
        ValueError: for parameters that can't be cut into strands.
    """
    if cluster.strands > 1:
        return Strands(cluster, params)
    assert cluster.group is not None
    return Whole(cluster.group, params)
