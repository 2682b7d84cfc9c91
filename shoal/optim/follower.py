"""The optimizer at every rank of a cluster but rank 0. It does what rank 0 says, with its own share of the state."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from shoal.cluster.cluster import Cluster
from shoal.cluster.gang import ClusterError, Gang, told_to_all
from shoal.cluster.messages import Do, Done, Go, Report, Verdict
from shoal.cluster.strands import Strands
from shoal.flat import (
    OwnGroups,
    Shown,
    ShowsGroups,
    after_loading,
    after_saving,
    before_loading,
    before_saving,
    neutral,
)
from shoal.interrupts import holding
from shoal.optim.checkpoint import NO_STRANDS, StrandState
from shoal.optim.closures import Closure, loss_of
from shoal.optim.crew import Crew
from shoal.optim.epoch_scheduler import wraps
from shoal.optim.settings import Settings, Stepped, check_cluster, make_outer, make_trained, samples_of
from shoal.optim.share import Share
from shoal.optim.shown_copies import shown_of_pieces
from shoal.optim.speaker import parameters_of
from shoal.optim.strand_replica import StrandReplica
from shoal.optim.strands_of import strands_of
from shoal.swarm.gates import admit_to

log = logging.getLogger(__name__)

AT_RANK_0 = ("tip", "tracker", "local_progress", "on_event", "dht", "outer_optimizer", "metrics_port", "scheduler")


class Follower(ShowsGroups):
    """What `shoal.Optimizer` makes at every rank of a `Cluster` but rank 0. All ranks make each call at once. An error
    of rank 0 is raised here as a `ClusterError`.

    Args:
        cluster: the ranks of the cluster.
        given: the other arguments of `shoal.Optimizer`. With `strands=1`, the arguments that concern the run count only
            at rank 0.

    Attributes:
        batch_size_per_step: as given; you may set it before a step.
        local_epoch: the number of epochs that the model's parameters have behind them.

    Raises:
        ClusterError: if a rank is lost, or if another rank has raised an error.
        ValueError: if an argument makes no sense, alone or together with another.
        TypeError: if `dht` is missing where ranks carry strands.
    """

    @holding
    @neutral
    def __init__(self, cluster: Cluster, given: Mapping[str, Any]) -> None:
        with told_to_all(cluster.group):
            dht, client_mode = given["dht"], given["client_mode"]
            if client_mode is None:
                client_mode = dht is not None and dht.client_mode
            settings = Settings.of({**given, "client_mode": client_mode})
            check_cluster(cluster, settings, given["optimizer"], given["params"])
            if cluster.strands > 1:
                if dht is None:
                    raise TypeError(
                        f"shoal.Cluster(strands={cluster.strands}) needs dht= in every rank: a shoal.DHT, started"
                    )
                admit_to(lambda: dht.node, settings.run_id, given["membership"])
        self.batch_size_per_step, self.local_epoch = settings.batch_size_per_step, 0
        self._in_background = settings.in_background
        self._extras = list(given["extra_tensors"])
        self._compared = self._ready = False
        self._trainer = threading.Lock()
        self._gang = Gang(cluster.group)
        self._share: Share | None = None
        self._failed = ""  # the first error since the last report
        try:
            self._whole = whole = parameters_of(cluster, given["params"])
            shown, defaults = self._make(settings, given)
            super().__init__([dict(group) for group in shown.groups], defaults)
            if not isinstance(whole, Strands):
                for group in self.param_groups:
                    group["params"] = [whole.of[id(each)] for each in group["params"]]
                shown = OwnGroups(self.param_groups, shown.optimizer, elsewhere="rank 0 of the cluster has it")
            self._shown = shown  # what users write there changes the options of this rank's step
            self._ready = True
            self._call(Report("shoal.Optimizer"))
        except BaseException as error:  # Ctrl-C, too: the others must not wait for a rank that has no optimizer
            if isinstance(error, Exception) and not isinstance(error, ClusterError):
                with contextlib.suppress(ClusterError):  # rank 0 says why it ends
                    self._gang.say(Report("shoal.Optimizer", error=f"{type(error).__name__}: {error}"[:4096]))
            self.shutdown()
            raise

    def _make(self, settings: Settings, given: Mapping[str, Any]) -> tuple[Shown, dict[str, Any]]:
        """Make this rank's optimizer and its share of the state.

        Returns:
            What users see of the optimizer, and its defaults.
        """
        whole, optimizer, dht = self._whole, given["optimizer"], given["dht"]
        if not isinstance(whole, Strands):
            template = make_trained(optimizer, whole.params, None, on_host=False, in_cluster=True).optimizer
            wraps(self, template)
            return Shown(template), template.defaults
        if settings.outer is None:
            made = stepped = make_trained(
                optimizer, whole.params, given["scheduler"], on_host=False, in_cluster=True, steps_average=True
            )
        else:
            made, anchor, outer = make_outer(
                settings.outer,
                optimizer,
                whole.given,
                given["scheduler"],
                on_host=False,
                in_cluster=True,
                pieces=whole.groups,
            )
            stepped = Stepped(outer, None, anchor)
        inner, has_pieces = made.optimizer, settings.outer is None
        wraps(self, inner)
        crew = Crew(self._gang)
        replica = StrandReplica(stepped, self._extras, settings, whole, crew, dht)
        self._share = share = Share(crew, replica, strands_of(settings, replica, made, dht))
        self._gang.when_lost(share.stop)
        replica.give()
        return shown_of_pieces(inner, whole) if has_pieces else Shown(inner), inner.defaults

    @holding
    @neutral
    def _call(self, report: Report, collect: Callable[[], object] = lambda: None) -> bool:
        """Make a call with all ranks. `collect` makes the collectives that precede what rank 0 does."""
        if not self._trainer.acquire(blocking=False):
            raise RuntimeError(f"{report.call}() while another thread is in this optimizer: one thread trains")
        try:
            if self._whole.gathers_alone:
                collect()
            self._gang.say(replace(report, error=report.error or self._failed))
            self._failed = ""
            while not isinstance(verdict := self._gang.hear_verdict(), Verdict):
                with self._gang.collectives():
                    if isinstance(verdict, Go):
                        collect()
                    elif verdict.is_quiet:
                        self._failed = self._failed or self._done(verdict).error
                    else:
                        self._gang.say(self._done(verdict))
            self.local_epoch = verdict.epoch
            for group, options in zip(self.param_groups, verdict.options, strict=False):
                group.update(options)
            if verdict.changed:
                with self._gang.collectives():
                    self._whole.spread(self._extras)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: the next call would hear messages of this one
                self._gang.leave()
            raise
        finally:
            self._trainer.release()
        if verdict.error:
            raise ClusterError(f"{self._gang.names[0]} has raised {verdict.error}")
        return verdict.value

    def _done(self, do: Do) -> Done:
        assert self._share is not None
        try:
            return Done(msgspec.msgpack.encode(self._share.do(do.what, msgspec.msgpack.decode(do.given))))
        except Exception as error:
            log.debug("%s", error, exc_info=error)
            return Done(msgspec.msgpack.encode(None), f"{type(error).__name__}: {error}"[:4096])

    @contextlib.contextmanager
    def _telling_errors(self, call: str) -> Iterator[None]:
        """Before a call of all ranks: if this rank raises an error within, the others hear of it, for they wait."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(ClusterError):  # which is this very error
                self._call(Report(call, error=f"{type(error).__name__}: {error}"[:4096]))
            raise

    @holding
    @neutral
    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: object = None,
    ) -> Tensor | None:
        """See `shoal.Optimizer.step`. `batch_size` is the number of samples of this rank.

        Raises:
            ClusterError: if a rank is lost, or if another rank has raised an error.
            ValueError: for arguments that make no sense. The other ranks hear of it.
        """
        with self._telling_errors("step"):
            if self._shown is not None:
                self._shown.check()
            batch_size = samples_of(self.batch_size_per_step if batch_size is None else batch_size, grad_scaler)
            given = None if closure is None else Closure(closure)
            if given is not None:
                given.evaluate()
            loss = None if given is None else loss_of(given.returned)
        digest = self._whole.digest() if batch_size and not self._compared else b""
        gradients = self._whole.gradients
        told = None if loss is None else (loss.value, int(loss.kind))
        self._call(Report("step", batch_size, gradients, digest, loss=told), self._whole.gather_for_step)
        self._compared |= batch_size > 0
        return None if given is None else given.returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `.grad`, as torch does."""
        self._whole.clear(set_to_none)
        super().zero_grad(set_to_none)

    def load_state_from_peers(self, *, timeout: float | None = None) -> bool:
        """See `shoal.Optimizer.load_state_from_peers`."""
        return self._call(Report("load_state_from_peers"))

    def load_kept_state(self, path: str | os.PathLike[str] | None = None) -> None:
        """See `shoal.Optimizer.load_kept_state`. Only rank 0 reads the file."""
        self._call(Report("load_kept_state"))

    @neutral
    def state_dict(self) -> dict[str, Any]:
        """A dict with only the epoch: rank 0 has the state of the whole cluster, saves it for all, and calls its hooks.
        If ranks carry strands, or in a mode in which rounds or steps run in the background, all ranks make this call at
        once."""
        if self._share is not None and self._gang.has_finished:
            self._share.do("state dict", ())
        elif self._share is not None or (self._in_background and not self._gang.left_in_order):
            self._call(Report("state_dict"))
        return {"state": {"local_epoch": self.local_epoch}, "param_groups": []}

    def settle(self) -> None:
        """See `shoal.Optimizer.settle`."""
        if not self._gang.left_in_order and (self._share is not None or self._in_background):
            self._call(Report("settle"))

    @neutral
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `shoal.Optimizer.load_state_dict`. Rank 0 loads the state and sends the parameters. With `strands=1`,
        after all ranks have left the cluster, this rank takes the epoch from its own `state_dict`."""
        if self._share is None and self._gang.left_in_order:
            self.local_epoch = state_dict["state"].get("local_epoch", self.local_epoch)
        elif self._share is not None and self._gang.has_finished:
            self._share.do("load state dict", ())
            self.local_epoch = self._share.epoch
        else:
            self._call(Report("load_state_dict"), self._whole.gather_parameters)

    def strand_state(self) -> StrandState:
        """See `shoal.Optimizer.strand_state`."""
        if self._share is None:
            raise ValueError(NO_STRANDS)
        share = self._share

        def give() -> dict[str, Any]:
            with self._telling_errors("strand_state().state_dict"):
                before_saving(self)
            self._call(Report("strand_state().state_dict"))
            given, share.own = share.own, {}
            return after_saving(self, given)

        def take(state: dict[str, Any]) -> None:
            with self._telling_errors("strand_state().load_state_dict"):
                share.own = before_loading(self, state)
            try:
                self._call(Report("strand_state().load_state_dict"))
            finally:
                share.own = {}
            after_loading(self)

        return StrandState(give, take)

    def report(self, *, loss: float | Tensor) -> None:
        """Do nothing: only rank 0 reports losses."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: all peers must have the same parameters from the beginning.

        Raises:
            ValueError: always.
        """
        if self._ready:
            raise ValueError("the parameters of a run are fixed: give all groups when making the optimizer")
        super().add_param_group(param_group)

    def is_synchronized_with_peers(self) -> bool:
        """Whether this rank is in the cluster. Only rank 0 knows about the other peers."""
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether no rank of the cluster is lost, and no rank has shut its optimizer down."""
        try:
            self._gang.check()
        except ClusterError:
            return False
        return True

    def finish(self) -> None:
        """Leave the run at the end of training, with the parameters of the last step. Rank 0 stays for the peers that
        are behind."""
        try:
            if self.is_alive():
                self._call(Report("finish"))
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leave the cluster now. The parameters stay usable. A second call does nothing."""
        self._gang.leave()
        if self._share is not None:
            self._share.stop()

    def __getattr__(self, name: str) -> Any:
        if name in AT_RANK_0:
            raise AttributeError(f"{name} is at rank 0 of the cluster only, which is the peer of the run")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("the optimizer of a cluster is neither copied nor pickled: save state_dict() at rank 0")

    def __repr__(self) -> str:
        return f"shoal.Optimizer({self._gang.names[self._gang.rank]}, epoch={self.local_epoch})"
