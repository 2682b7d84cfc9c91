"""The state of a cluster whose ranks carry strands. Each rank has the state of its own strands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.averaging.options import term_of
from shoal.cluster.strands import Strands
from shoal.cluster.whole import shared_by_all
from shoal.dht.dht import DHT
from shoal.flat import (
    Layout,
    Places,
    Together,
    after_loading,
    after_saving,
    before_loading,
    before_saving,
    names_of_members,
)
from shoal.interrupts import result_of
from shoal.optim.crew import Crew
from shoal.optim.drift import Drift
from shoal.optim.group_options import structure
from shoal.optim.host_copy import check_order
from shoal.optim.kept import Kept
from shoal.optim.settings import Settings, Stepped
from shoal.optim.state import MANIFEST_BYTES, TENSORS_OF_OPTIMIZER, AsGrad, Part, PartState, Replica, hash_of
from shoal.optim.strand_checkpoint import (
    check_fits,
    gather_state,
    gather_state_of_model,
    scatter_state,
    scatter_state_of_model,
)
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_rounds import name_of
from shoal.optim.strand_states import Carrier, Carriers, StrandStates
from shoal.p2p.identity import PeerID
from shoal.sharding.element_wise import is_element_wise
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, Reserve

ATTEMPTS = 5  # tries to download all strands of one state, while the run continues


@dataclass(frozen=True, slots=True)
class DownloadedStrands(Downloaded):
    """The downloaded strands of a state. The fields of `Downloaded` are those of one of them.

    Attributes:
        strands: the strands of this rank, by number.
    """

    strands: Mapping[int, Downloaded] = field(default_factory=dict)


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

    always_sends_frozen = True

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
        self._downloaded: dict[int, Downloaded] = {}
        self._load: Callable[[bool], None] = _nothing  # takes over what was downloaded
        size = sum(max(4, piece.element_size()) * piece.numel() for piece in strands.pieces) // len(strands.mine)
        extras = sum(tensor.element_size() * tensor.numel() for tensor in extra_tensors)
        at_most = settings.max_state_bytes or TENSORS_OF_OPTIMIZER * size + extras + MANIFEST_BYTES
        self.states = StrandStates(dht, settings.run_id, len(strands.carriers), at_most)
        if isinstance(stepped.optimizer, Together):
            raise ValueError(
                f"strands step pieces of parameters, and the optimizer is a {names_of_members(stepped.optimizer)}, "
                "which steps whole ones: give shoal.Cluster(strands=1)"
            )
        if not is_element_wise(made := type(stepped.optimizer)):
            raise ValueError(
                f"strands step pieces of parameters, and it is not known of {made.__name__} that it treats each "
                f"element alike: give shoal.Cluster(strands=1); or set {made.__name__}.element_wise = True, if it does"
            )
        if stepped.host is None:
            own = [parameter for group in stepped.optimizer.param_groups for parameter in group["params"]]
            check_order(stepped.optimizer, own, strands.pieces)
        super().__init__(stepped.optimizer, stepped.scheduler, extra_tensors, settings, stepped.host)
        self._places_of_model = Places(strands.model)
        self._places_of_model.keep()

    def digest(self) -> bytes:
        """The hashes of this rank's strands, one after the other; at rank 0, one hash of the hashes of all strands."""
        self.crew.tell("digest")
        mine = b"".join(hash_of(self.part(k).parameters) for k in self.strands.mine)
        if self.strands.rank:
            return mine
        return name_of(self.strands.carriers, [mine, *self.crew.hear()])

    def part(self, strand: int) -> Part:
        """The part of the state that belongs to a strand of this rank."""
        places = self.strands.numbers[self.strands.mine.index(strand)]
        return Part([self.parameters[place] for place in places], self.extra_tensors if strand == 0 else [])

    @property
    def in_backward(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `Replica`. With an outer optimizer, the model's parameters get gradients, and not the pieces."""
        if self._host is None:
            return super().in_backward
        model = self.strands.model
        return [p for p in model if p.requires_grad], [p for p in model if not p.requires_grad]

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

    @property
    def described(self) -> list[Tensor]:
        """See `Replica`."""
        own = self.part(self.strands.mine[0]).parameters
        return [
            torch.empty(model.shape, dtype=mine.dtype, device="meta", requires_grad=mine.requires_grad)
            for model, mine in zip(self.strands.model, own, strict=True)
        ]

    @property
    def described_names(self) -> list[str]:
        """See `Replica`."""
        return [name for group in self.described_groups for name in group.get("param_names", ())]

    @property
    def described_groups(self) -> list[dict[str, Any]]:
        """See `Replica`."""
        groups = []
        for group in self.optimizer.param_groups:
            count = len(group["params"]) // len(self.strands.mine)  # those of the first strand
            names = [name.rpartition("[")[0] for name in group.get("param_names", ())[:count]]
            groups.append({**group, "params": group["params"][:count]} | ({"param_names": names} if names else {}))
        return groups

    def exact_copy(self) -> Kept:
        """Not possible, because each rank has only a part of the state.

        Raises:
            ValueError: always.
        """
        raise ValueError("a cluster whose ranks carry strands keeps no state that it leaves")

    # -- for newcomers

    def _copy_strand(self, strand: int) -> Snapshot:
        with self._lock:
            compression = self._settings.load_state_compression
            return self.snapshot(self.tip, compression, (), self.options.at_tip, self.part(strand))

    @property
    def terms(self) -> dict[str, str]:
        """The options and shapes that must be equal at all ranks."""
        kinds: dict[str, object] = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.drift is not None:
            kinds |= {"outer optimizer": self.optimizer, "optimizer": self.drift.inner, "scheduler": None}
        return self._settings.agreed() | {
            "strands": str(len(self.strands.carriers)),
            "param_groups": term_of(structure(self.described_groups)),
            "tensors": Layout.of([*self.described, *self.extra_tensors]).schema_hash.hex()[:16],
            **{name: type(each).__name__ for name, each in kinds.items()},
        }

    def compare(self, of_first: Mapping[str, str]) -> None:
        """At other ranks: compare the terms of rank 0 with this rank's.

        Raises:
            ValueError: with the name of the first one that differs.
        """
        mine = self.terms
        for name in sorted({*mine, *of_first}):
            if mine.get(name) != of_first.get(name):
                raise ValueError(
                    f"{name} is {mine.get(name)} here, and {of_first.get(name)} at rank 0: give all ranks of a cluster "
                    "the same arguments"
                )

    def give(self) -> None:
        """Begin to serve this rank's strands to newcomers.

        Raises:
            ClusterError: at rank 0, if the terms of another rank differ.
        """
        if not self.strands.rank:
            self.crew.tell("compare", self.terms)
            self.crew.hear()
        allow = self._settings.averager_opts.get("allow_state_sharing", True)
        self.states.give(self.strands.mine, self._copy_strand, lambda: self.tip, self.line.to_wire, allow)
        if not self.strands.rank:
            self.crew.tell("me")
            others = [msgspec.convert(said, Carrier) for said in self.crew.hear()]
            self.crew.tell("meet", self.states.me)
            self.crew.hear()
            self.states.say_who_carries(Carriers((self.states.me, *others), tuple(self.strands.carriers)))

    # -- another state

    def download(
        self, donors: Sequence[PeerID], timeout: float, wanted: Callable[[Tip], bool], reserve: Reserve | None
    ) -> DownloadedStrands:
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
            known = self.states.who_carries(donors)
            of_strand = [[said.ranks[said.numbers[k]] for said in known] for k in range(len(self.strands.carriers))]
            first = result_of(self.states.begin(0, of_strand[0], timeout, wanted, reserve))
            tip = first.manifest.tip
            self.crew.tell("download", tip, timeout, of_strand)
            own = self.download_here(tip, timeout, of_strand, {0: first})
            answers = [Answer(*own), *(Answer(*other) for other in self.crew.hear())]
            failed = [f"{self.crew.names[rank]}: {each.why}" for rank, each in enumerate(answers) if each.why]
            if not failed:
                of_first = {each.name: getattr(first, each.name) for each in fields(Downloaded)}
                return DownloadedStrands(**of_first, strands=self._downloaded)
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
        self._downloaded = dict(known or {})
        under_way = {
            strand: self.states.begin(strand, of_strand[strand], timeout, tip.is_state_of)
            for strand in self.strands.mine
            if strand not in self._downloaded
        }
        failed = Answer()
        for strand, future in under_way.items():
            try:
                self._downloaded[strand] = result_of(future)
            except AveragingError as error:
                if not failed.lacks_memory:
                    failed = Answer(f"strand {strand}: {error}", isinstance(error, NoMemoryForState))
        return failed

    def make_ready(self, state: Downloaded, *, keeps_drift: bool = False) -> Callable[[bool], None]:
        """See `Replica`. If a rank can't load its strands, none does, and all drop them."""
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
            first = next(iter(self._downloaded.values()))
            of_first = {each.name: getattr(first, each.name) for each in fields(Downloaded)}
            state = DownloadedStrands(**of_first, strands=self._downloaded)
            try:
                self._load = super().make_ready(state, keeps_drift=keeps_drift)
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
        self._downloaded, self._load = {}, _nothing

    def _parts_of(self, state: Downloaded) -> list[PartState]:
        assert isinstance(state, DownloadedStrands)
        return [PartState.of(state.strands[strand], self.part(strand)) for strand in self.strands.mine]

    # -- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """See `Replica`. Rank 0 gets the state of the whole cluster."""
        for optimizer in self._saved_optimizers:
            before_saving(optimizer)
        self.crew.tell("state dict")
        return self.state_dict_here()

    def state_dict_here(self) -> dict[str, Any]:
        """This rank's part of `state_dict`. Returns {} at other ranks than 0."""
        optimizer, drift = self.optimizer, self.drift
        stepped = gather_state(self.strands, optimizer, self.parameters)
        inner = {} if drift is None else gather_state_of_model(self.strands, drift.inner)
        anchors = [] if drift is None else self.strands.gather([anchor.detach() for anchor in self.parameters])
        if self.strands.rank:
            return {}
        stepped = after_saving(optimizer, stepped)
        state = stepped if drift is None else after_saving(drift.inner, inner)
        state["state"] = {**state["state"], "local_epoch": self.tip.epoch}
        state["shoal"] = self.names()
        if self.scheduler is not None:
            state["shoal"]["scheduler"] = self.scheduler.state_dict()
        if drift is not None:
            model = self.strands.model
            trained = [anchor for anchor, p in zip(anchors, model, strict=True) if p.requires_grad]
            state["shoal"]["outer"] = stepped
            state["shoal"]["drift"] = {**drift.state_dict(), "anchor": trained, "residuals": []}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Replica`."""
        state = {name: value for name, value in state_dict["state"].items() if name != "local_epoch"}
        ours = dict(state_dict.get("shoal", {}))
        given = {name: value for name, value in state_dict.items() if name != "shoal"} | {"state": state}
        epoch = state_dict["state"].get("local_epoch")
        if epoch is not None:
            epoch = self.tip_of(epoch, ours).epoch
        users, *outer = self._saved_optimizers
        given = before_loading(users, given)
        check_fits(given, self.described_groups, self.strands.model)
        loaded = [users]
        if outer and "drift" in ours:
            ours["outer"] = before_loading(self.optimizer, ours["outer"])
            check_fits(ours["outer"], self.described_groups, self.strands.model)
            loaded += outer
        self.crew.tell("load state dict")
        self.load_state_here(given, {**ours, "epoch": epoch})
        for optimizer in loaded:
            after_loading(optimizer)

    @property
    def _saved_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state dicts are in that of rank 0: the user's own is the first."""
        return [self.optimizer] if self.drift is None else [self.drift.inner, self.optimizer]

    def load_state_here(self, given: dict[str, Any] | None, ours: dict[str, Any] | None) -> None:
        """This rank's part of `load_state_dict`. Only rank 0 has the state that is loaded.

        Args:
            given: the optimizer's state dict; None at other ranks.
            ours: the rest of the dict and the epoch; None at other ranks.
        """
        tensors = ours if ours is not None and "drift" in ours else None
        plain = {name: value for name, value in (ours or {}).items() if name not in ("outer", "drift")}
        plain = shared_by_all(self.strands.group, plain | {"has drift": tensors is not None})
        with self._lock, self._quiet():
            self.strands.gather_parameters()
            if self.drift is None:
                scatter_state(self.strands, self.optimizer, self.parameters, given)
            else:
                self._load_drift(self.drift, given, tensors, has_drift=plain["has drift"])
            if self.scheduler is not None and "scheduler" in plain:
                self.scheduler.load_state_dict(plain["scheduler"])
            self.options.refresh()
            self.adopt_statistics()
            if plain["epoch"] is not None:
                self.take_names(self.tip_of(plain["epoch"], plain), plain)
            self.settle_load()
        self.strands.is_ahead = True
        if not (self.strands.rank or self.crew.has_finished):
            self.state_digest = self.digest()

    def _load_drift(
        self, drift: Drift, inner: dict[str, Any] | None, ours: dict[str, Any] | None, *, has_drift: bool
    ) -> None:
        assert self._host is not None
        scatter_state_of_model(self.strands, drift.inner, inner)
        if drift.schedule is not None:
            drift.schedule.rewind()
        drift.reset()
        self._host.copy(self._host.memory, self.memory)
        if not has_drift:
            return
        scatter_state(self.strands, self.optimizer, self.parameters, None if ours is None else ours["outer"])
        saved = {k: v for k, v in (ours or {"drift": {}})["drift"].items() if k not in ("anchor", "residuals")}
        told = shared_by_all(self.strands.group, saved)
        trained = iter([] if ours is None else ours["drift"]["anchor"])
        dtypes = [mine.dtype for mine in self.part(self.strands.mine[0]).parameters]
        wholes = [
            torch.zeros(parameter.shape, dtype=dtype, device="meta" if ours is None else "cpu")
            if ours is None or not parameter.requires_grad
            else next(trained).to("cpu", dtype)
            for parameter, dtype in zip(self.strands.model, dtypes, strict=True)
        ]
        anchors = self.strands.scatter(wholes)
        chosen = [anchor for anchor, mine in zip(anchors, self.parameters, strict=True) if mine.requires_grad]
        drift.load_state_dict({**told, "anchor": chosen})


def _nothing(keeps_drift: bool) -> None:
    """There is no state to take over."""
