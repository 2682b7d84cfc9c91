"""The optimizer of a rank of a cluster that is not rank 0: it holds no state, and does what rank 0 says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from shoal.cluster.cluster import Cluster
from shoal.cluster.gang import ClusterError, Gang
from shoal.cluster.messages import Report
from shoal.cluster.whole import Whole
from shoal.optim.settings import NO_SCALER, WHOLE_SAMPLES, Settings, check_cluster, make_trained

AT_RANK_0 = ("tip", "tracker", "local_progress", "on_event", "dht", "outer_optimizer", "metrics_port", "scheduler")


class Follower(torch.optim.Optimizer):
    """What `shoal.Optimizer` is at the other ranks of a `Cluster`. Every call is made by all ranks at once, and what
    rank 0 raises is raised here as a `ClusterError`.

    Args:
        cluster: its ranks.
        given: the other arguments of `shoal.Optimizer`. Those that are of the run count at rank 0 only.

    Attributes:
        batch_size_per_step: as given; may be set before a step.
        local_epoch: how many epochs the model's parameters have behind them.
    """

    def __init__(self, cluster: Cluster, given: Mapping[str, Any]) -> None:
        settings = Settings.of({**given, "client_mode": bool(given["client_mode"])})
        check_cluster(cluster, settings, given["optimizer"], given["params"])
        self.batch_size_per_step, self.local_epoch = settings.batch_size_per_step, 0
        self._in_background = settings.in_background
        self._extras = list(given["extra_tensors"])
        self._gang, self._whole = Gang(cluster.group), Whole(cluster.group, given["params"])
        self._compared = self._ready = False
        made, _, _ = make_trained(given["optimizer"], self._whole.params, None, on_host=False)
        super().__init__([dict(group) for group in made.param_groups], made.defaults)
        model = iter(self._whole.model)
        for group in self.param_groups:
            group["params"] = [next(model) for _ in group["params"]]
        self._ready = True
        self._trainer = threading.Lock()
        try:
            self._call(Report("shoal.Optimizer"))
        except BaseException:  # Ctrl-C, too: the others must not wait for a rank that has no optimizer
            self._gang.leave()
            raise

    def _call(self, report: Report) -> bool:
        if not self._trainer.acquire(blocking=False):
            raise RuntimeError(f"{report.call}() while another thread is in this optimizer: one thread trains")
        try:
            verdict = self._gang.report(report)
            self.local_epoch = verdict.epoch
            for group, options in zip(self.param_groups, verdict.options, strict=False):
                group.update(options)
            if verdict.changed:
                with self._gang.collectives():
                    self._whole.spread(self._extras)
        finally:
            self._trainer.release()
        if verdict.error:
            raise ClusterError(f"{self._gang.names[0]} has raised {verdict.error}")
        return verdict.value

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: object = None,
    ) -> Tensor | None:
        """See `shoal.Optimizer.step`; `batch_size` is of this rank.

        Raises:
            ClusterError: if a rank is lost, or rank 0 has raised an error.
        """
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("step needs batch_size=…, since the optimizer was made without batch_size_per_step")
        if grad_scaler is not None:
            raise ValueError(NO_SCALER)
        batch_size = WHOLE_SAMPLES.check("batch_size", batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._gang.collectives():
            self._whole.gather_gradients()
        digest = b"" if self._compared else self._whole.digest()
        self._call(Report("step", batch_size, digest))
        self._compared = True
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `.grad`, as torch does."""
        self._whole.clear(set_to_none)
        super().zero_grad(set_to_none)

    def load_state_from_peers(self, *, timeout: float | None = None) -> bool:
        """See `shoal.Optimizer.load_state_from_peers`."""
        return self._call(Report("load_state_from_peers"))

    def load_kept_state(self, path: str | os.PathLike[str]) -> None:
        """See `shoal.Optimizer.load_kept_state`: the file is read at rank 0."""
        self._call(Report("load_kept_state"))

    def state_dict(self) -> dict[str, Any]:
        """The epoch alone: rank 0 has the state of the whole cluster, and saves it for all. Where steps are delayed,
        all ranks call it at once, since the step that rank 0 waits for moves the parameters."""
        if self._in_background:
            self._call(Report("state_dict"))
        return {"state": {"local_epoch": self.local_epoch}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing of the dict is used here: rank 0 loads it, and sends the parameters."""
        self._call(Report("load_state_dict"))

    def report(self, *, loss: float | Tensor) -> None:
        """Nothing: rank 0 tells those who watch the run."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: all peers must have the same parameters from the beginning."""
        if self._ready:
            raise ValueError("the parameters of a run are fixed: give all groups when making the optimizer")
        super().add_param_group(param_group)

    def is_synchronized_with_peers(self) -> bool:
        """Whether this rank is in the cluster: rank 0 knows more."""
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether all ranks of the cluster are there, and none has shut its optimizer down here."""
        try:
            self._gang.check()
        except ClusterError:
            return False
        return True

    def finish(self) -> None:
        """Leave at the end of training. Rank 0 stays for the peers that are behind."""
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the cluster now; the parameters stay usable. Calling it again does nothing."""
        self._gang.leave()

    def __getattr__(self, name: str) -> Any:
        if name in AT_RANK_0:
            raise AttributeError(f"{name} is at rank 0 of the cluster only, which is the peer of the run")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("the optimizer of a cluster is neither copied nor pickled: save state_dict() at rank 0")

    def __repr__(self) -> str:
        return f"shoal.Optimizer({self._gang.names[self._gang.rank]}, epoch={self.local_epoch})"
