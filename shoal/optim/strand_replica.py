"""The state of a cluster whose ranks carry strands. Each rank has the state of its own strands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from shoal.cluster.strands import Strands
from shoal.dht.dht import DHT
from shoal.flat import after_loading
from shoal.interrupts import result_of
from shoal.optim.alike import check_alike, check_steps_pieces, terms_of
from shoal.optim.checkpoint import StrandCheckpoint, WholeState
from shoal.optim.crew import Crew
from shoal.optim.donors import Carrier, Carriers, Donors
from shoal.optim.settings import Settings, Stepped
from shoal.optim.state import AsGrad, Replica, for_newcomer
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_rounds import name_of
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Offer
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, Reserve

ATTEMPTS = 5  # tries to download all strands of one state, while the run continues


class Answer(NamedTuple):
    """The answer of a rank that was told to download its strands, or to prepare to load them.

    Attributes:
        why: the reason why it can't; "" if it can.
        lacks_memory: whether the reason is that it has no memory.
    """

    why: str = ""
    lacks_memory: bool = False


class StrandReplica(Replica):
    """The pieces of parameters that this rank carries, with the optimizer's state of them. At rank 0, `Epoch` uses it
    as the state of the whole cluster, and each call is made at all ranks. The methods whose names end in `_here` are
    this rank's part of such a call.

    Args:
        stepped: the optimizer of this rank's pieces; with an outer optimizer, the optimizer of their anchors on the
            host.
        extra_tensors: the extra tensors, which belong to strand 0.
        settings: the settings of the optimizer.
        strands: the pieces.
        crew: tells the other ranks what to do.
        dht: the DHT of this rank.

    Attributes:
        gradients: the gradients, or the drift, with which it is stepped.
        states: sends strands to newcomers, and downloads strands.
        state_digest: at rank 0, the hash of the digests of all strands.

    Raises:
        ValueError: as `Replica`; if the optimizer does not have all pieces, or does not treat each element alike.
    """

    def __init__(
        self,
        stepped: Stepped,
        extra_tensors: Sequence[Tensor],
        settings: Settings,
        strands: Strands,
        crew: Crew,
        dht: DHT,
    ) -> None:
        self.strands, self.crew = strands, crew
        self.gradients: StrandGradients | StrandDrift | None = None
        self._downloaded: list[Downloaded] = []
        self._load: Callable[[bool], None] = _nothing  # takes over what was downloaded
        check_steps_pieces(stepped, strands)
        super().__init__(stepped.optimizer, stepped.scheduler, extra_tensors, settings, stepped.host, strands)
        self.checkpoint = StrandCheckpoint(self, strands)
        self.states = Donors(dht, settings.run_id, len(strands.carriers), self.max_nbytes)

    def digest(self) -> bytes:
        """The hashes of this rank's strands, one after the other; at rank 0, one hash of the hashes of all strands."""
        self.crew.tell("digest")
        mine = super().digest()
        if self.strands.rank:
            return mine
        return name_of(self.strands.carriers, [mine, *self.crew.hear()])

    def take_over(self) -> None:
        """See `Replica`."""
        self.crew.tell("take over")
        self.take_over_here()
        if not self.tip.epoch:
            self.state_digest = self.digest()

    def take_over_here(self) -> None:
        """Copy the pieces of this rank from the model, unless they are newer."""
        with self._lock:
            if isinstance(self.drift, StrandDrift):
                self.drift.gather_anew()
            elif not self.strands.is_ahead:
                self.strands.gather_parameters()
            self._follow_model()

    def publish(self) -> None:
        """See `Replica`."""
        if isinstance(self.drift, StrandDrift):
            if not self.drift.is_quiet:
                self.crew.tell("publish")
            with self.drift.quiet():
                super().publish()

    def step(
        self, as_grad: AsGrad | None, tip: Tip, options: bytes, *, with_state: bool, loss: Loss | None = None
    ) -> None:
        """See `Replica`."""
        assert self.gradients is not None
        if not self.strands.rank:
            factor = self.gradients.measure()
            self.crew.tell("step", tip, options, factor, loss)
            self.gradients.scale_by(factor)
        super().step(as_grad, tip, options, with_state=with_state, loss=loss)

    # -- for newcomers

    def compare(self, of_first: Mapping[str, str]) -> None:
        """At other ranks: see `check_alike`."""
        check_alike(terms_of(self, self._settings), of_first)

    def give(self) -> None:
        """Begin to serve this rank's strands to newcomers.

        Raises:
            ClusterError: at rank 0, if the terms of another rank differ.
        """
        if not self.strands.rank:
            self.crew.tell("compare", terms_of(self, self._settings))
            self.crew.hear()
        allow = self._settings.averager_opts.get("allow_state_sharing", True)
        offer = lambda: Offer(line=self.line.to_wire())  # noqa: E731
        self.states.serve(
            self.strands.mine, lambda k: for_newcomer(partial(self.copy_of_part, k)), lambda: self.tip, offer, allow
        )
        if not self.strands.rank:
            self.crew.tell("me")
            others = [msgspec.convert(said, Carrier) for said in self.crew.hear()]
            self.crew.tell("meet", self.states.me)
            self.crew.hear()
            self.states.say_who_carries(Carriers((self.states.me, *others), tuple(self.strands.carriers)))

    # -- another state

    def download(
        self, donors: Sequence[PeerID], timeout: float, wanted: Callable[[Tip], bool], reserve: Reserve | None
    ) -> list[Downloaded]:
        """Make each rank download its strands of the same state. It is the state whose strand 0 most donors hold.

        Args:
            donors: the rank 0 of other clusters.
            timeout: the time in seconds without any progress after which a download fails.
            wanted: whether a state with this tip will do.
            reserve: see `download_state`.

        Raises:
            DownloadFailed: if a strand could not be downloaded. Then nothing has changed.
            NoMemoryForState: if a rank has no memory for its strands.
        """
        failed: list[str] = []
        for _ in range(ATTEMPTS):
            of_strand = self.states.who_carries(donors)
            first = result_of(self.states.fetch(0, of_strand[0], timeout, wanted, reserve))
            tip = first.manifest.tip
            self.crew.tell("download", tip, timeout, of_strand)
            own = self.download_here(tip, timeout, of_strand, {0: first})
            answers = [Answer(*own), *(Answer(*other) for other in self.crew.hear())]
            failed = [f"{self.crew.names[rank]}: {each.why}" for rank, each in enumerate(answers) if each.why]
            if not failed:
                return self._downloaded
            self._drop()
            if any(each.lacks_memory for each in answers):  # it does at once, too
                raise NoMemoryForState(failed[0])
        raise DownloadFailed(f"could not download all strands of one state: {failed[0]}")

    def download_here(
        self,
        tip: Tip,
        timeout: float,
        of_strand: Sequence[Sequence[Carrier]],
        known: Mapping[int, Downloaded] | None = None,
    ) -> Answer:
        """Download this rank's strands of the state `tip`, except those in `known`."""
        try:
            self._downloaded = self.states.fetch_all(
                self.strands.mine, of_strand, timeout, tip.is_state_of, known or {}
            )
        except DownloadFailed as error:
            return Answer(str(error), isinstance(error, NoMemoryForState))
        return Answer()

    def make_ready(self, state: Sequence[Downloaded], *, keeps_drift: bool = False) -> Callable[[bool], None]:
        """See `Replica`. If a rank can't load its strands, none does, and all drop them."""
        self._downloaded = list(state)
        self.crew.tell("make ready", keeps_drift)
        answers = [Answer(*self.make_ready_here(keeps_drift)), *(Answer(*other) for other in self.crew.hear())]
        for rank, answer in enumerate(answers):
            if answer.why:
                self._drop()
                kind = NoMemoryForState if answer.lacks_memory else ValueError
                raise kind(f"{self.crew.names[rank]}: {answer.why}")

        def load(keeps_drift: bool) -> None:
            self.crew.tell("load", keeps_drift)
            self.load_here(keeps_drift)

        return load

    def make_ready_here(self, keeps_drift: bool) -> Answer:
        """Prepare to take over what this rank has downloaded."""
        with self._quiet():
            if isinstance(self.drift, StrandDrift):
                self.drift.gather()  # all ranks together, and before this rank may lack memory
            try:
                self._load = super().make_ready(self._downloaded, keeps_drift=keeps_drift)
            except (ValueError, NoMemoryForState) as error:
                return Answer(str(error), isinstance(error, NoMemoryForState))
        return Answer()

    def load_here(self, keeps_drift: bool) -> None:
        """Take over what this rank has downloaded, after `make_ready_here`."""
        with self._quiet():
            self._load(keeps_drift)
        self.strands.is_ahead = True
        self.drop_here()

    def _quiet(self) -> AbstractContextManager[None]:
        return self.drift.quiet() if isinstance(self.drift, StrandDrift) else contextlib.nullcontext()

    def _drop(self) -> None:
        self.crew.tell("drop")
        self.drop_here()

    def drop_here(self) -> None:
        """Drop what this rank has downloaded, and the memory that it has taken to load it."""
        self._downloaded, self._load = [], _nothing

    # -- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """See `Replica`. Rank 0 gets the state of the whole cluster."""
        self.checkpoint.before_saving()
        self.crew.tell("state dict")
        return self.checkpoint.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Replica`."""
        whole = self.checkpoint.before_loading(state_dict)
        self.crew.tell("load state dict")
        self.load_state_here(whole)
        for optimizer in whole.loaded:
            after_loading(optimizer)

    def load_state_here(self, whole: WholeState) -> None:
        """This rank's part of `load_state_dict`. Only rank 0 has the state that is loaded."""
        with self._quiet():
            self.checkpoint.load_state_dict(whole)
        if not (self.strands.rank or self.crew.has_finished):
            self.state_digest = self.digest()

    def give_strands(self) -> dict[str, Any]:
        """Make all ranks prepare the strands that they save, and return those of rank 0.

        Raises:
            ValueError: as `StrandCheckpoint.save`.
        """
        common = self.checkpoint.common()
        self.crew.tell("give strands", common)
        return self.checkpoint.save(common)

    def check_strands(self, state: dict[str, Any]) -> None:
        """Check that all ranks can continue from the strands that they have loaded.

        Raises:
            ValueError: if a rank can't.
        """
        self.crew.tell("check strands")
        for reason in filter(None, [self.checkpoint.misfit(state), *self.crew.hear()]):
            raise ValueError(reason)

    def take_strands(self, state: dict[str, Any]) -> None:
        """After `check_strands`: make all ranks continue from the strands that they have loaded."""
        self.crew.tell("take strands")
        self.take_strands_here(state)
        self.state_digest = self.digest()

    def take_strands_here(self, state: dict[str, Any]) -> None:
        """This rank's part of `take_strands`."""
        with self._quiet():
            self.checkpoint.load(state)


def _nothing(keeps_drift: bool) -> None:
    """There is no state to take over."""
