"""The optimizer of rank 0 of a cluster speaks for all of its ranks: what it does for them in each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from shoal.cluster.cluster import Cluster
from shoal.cluster.gang import ClusterError, Gang
from shoal.cluster.messages import Report, Verdict
from shoal.cluster.whole import Whole
from shoal.swarm.protocol.tip import Tip

T = TypeVar("T")


class Speaker:
    """Rank 0's side of the calls that all ranks make at once.

    Args:
        cluster: its ranks.
        params: of the model, as an optimizer takes them.
        extras: the tensors beside them that all ranks hold.

    Attributes:
        gang: the ties to the other ranks.
        whole: the parameters in one piece.
        state: the tip of the parameters and the groups of the optimizer, once there is one.
    """

    def __init__(self, cluster: Cluster, params: Iterable[Any], extras: Sequence[Tensor]) -> None:
        self.gang, self.whole, self._extras = Gang(cluster.group), Whole(cluster.group, params), extras
        self.state: Callable[[], tuple[Tip, Sequence[Mapping[str, Any]]]] | None = None
        self._sent: Tip | None = None  # whose parameters the others have
        self._compared = False

    def lead(self, call: str, act: Callable[[int], T], samples: int = 0, *, moves: bool = False) -> T:
        """Make one call for all ranks.

        Args:
            call: its name, which all must have called.
            act: what rank 0 does, given the samples of all ranks.
            samples: of this rank.
            moves: whether the parameters change though the epoch may not.

        Raises:
            ClusterError: if a rank is lost, or has called something else.
        """
        if call == "step":
            with self.gang.collectives():
                self.whole.gather_gradients()
        reports = self.gang.hear_reports()
        try:
            self._compare(call, reports)
            result = act(samples + sum(report.samples for report in reports))
        except BaseException as error:  # Ctrl-C, too: the others wait for a verdict
            self._tell(error, None, moves)
            raise
        self._tell(None, result, moves)
        return result

    def forget(self) -> None:
        """The parameters of this rank were set otherwise: the others get them in the next call."""
        self._sent = None

    def _compare(self, call: str, reports: Sequence[Report]) -> None:
        names = self.gang.names
        for rank, report in enumerate(reports, 1):
            if report.call != call:
                raise ClusterError(
                    f"{names[0]} has called {call} and {names[rank]} {report.call}: the ranks of a cluster make the "
                    "same calls"
                )
        if call != "step" or self._compared:
            return
        self._compared, mine = True, self.whole.digest()
        for rank, report in enumerate(reports, 1):
            if report.digest != mine:
                raise ValueError(
                    f"{names[0]} and {names[rank]} have other gradients: wrap the model in DistributedDataParallel, or "
                    "reduce the gradients before `step`"
                )

    def _tell(self, error: BaseException | None, result: object, moves: bool) -> None:
        said = "" if error is None else f"{type(error).__name__}: {error}"[:4096]
        if self.state is None:
            return self.gang.say(Verdict(0, False, error=said))
        tip, groups = self.state()
        changed = moves or tip != self._sent
        options = [{name: value for name, value in group.items() if type(value) is float} for group in groups]
        self.gang.say(Verdict(tip.epoch, changed, options, said, bool(result)))
        if changed:
            with self.gang.collectives():
                self.whole.spread(self._extras)
            self._sent = tip
