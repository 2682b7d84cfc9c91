"""The state of a cluster whose ranks carry strands: each rank has that of its own strands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.options import term_of
from shoal.cluster.strands import Strands
from shoal.dht.dht import DHT
from shoal.flat import Layout
from shoal.optim.crew import Crew
from shoal.optim.group_options import structure
from shoal.optim.host_copy import HostCopy, ModelGroup, check_order
from shoal.optim.settings import Settings
from shoal.optim.state import MANIFEST_BYTES, TENSORS_OF_OPTIMIZER, AsGrad, Part, Replica, hash_of
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_rounds import name_of
from shoal.optim.strand_states import Carrier, Carriers, StrandStates
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded, DownloadFailed, Reserve

ATTEMPTS = 5  # to have the strands of one state, while the run goes on


@dataclass(frozen=True, slots=True)
class DownloadedStrands(Downloaded):
    """The first strand of a state, and beside it all those of this rank.

    Attributes:
        strands: each by its number.
    """

    strands: Mapping[int, Downloaded] = field(default_factory=dict)


class StrandReplica(Replica):
    """The pieces of parameters that this rank carries, with what the optimizer keeps of them. At rank 0, what is done
    to it is done at all ranks: it is what `Epoch` knows as the cluster's state.

    Args:
        optimizer, scheduler: of this rank's pieces.
        extra_tensors: of the model; they go with the first strand.
        settings: of the optimizer.
        strands: the pieces.
        crew: the other ranks.
        states: given to newcomers and taken from others.
        host: the anchors of the pieces, with an outer optimizer.

    Attributes:
        state_digest: at rank 0 the hash of all strands' digests.

    Raises:
        ValueError: as `Replica`, and if the optimizer does not have all pieces.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[Tensor],
        settings: Settings,
        strands: Strands,
        crew: Crew,
        states: StrandStates,
        host: HostCopy | None = None,
    ) -> None:
        self.strands, self.crew, self.states = strands, crew, states
        self.gradients: StrandGradients | StrandDrift | None = None
        self._downloaded: dict[int, Downloaded] = {}
        if host is None:
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            check_order(optimizer, own, strands.pieces)
        super().__init__(optimizer, scheduler, extra_tensors, settings, host)

    def digest(self) -> bytes:
        """The hashes of this rank's strands, one after the other; at rank 0 one hash of all."""
        self.crew.tell("digest")
        mine = b"".join(hash_of([p.detach().cpu() for p in self.part(k).parameters]) for k in self.strands.mine)
        if self.strands.rank:
            return mine
        return name_of(self.strands.carriers, [mine, *self.crew.hear()])

    def part(self, strand: int) -> Part:
        """What of the state is of that strand."""
        places = self.strands.numbers[self.strands.mine.index(strand)]
        return Part([self.parameters[place] for place in places], self.extra_tensors if strand == 0 else [])

    @property
    def in_backward(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `Replica`: with an outer optimizer the pieces get no gradients."""
        if self._host is None:
            return super().in_backward
        model = self.strands.model
        return [p for p in model if p.requires_grad], [p for p in model if not p.requires_grad]

    def take_over(self) -> None:
        """See `Replica`: until the first epoch has ended, others may set the model's parameters."""
        if not self.tip.epoch and not (self.drift is not None and self.drift.has_moved):
            self.crew.tell("take over")
            self.take_over_here()
            self.state_digest = self.digest()

    def take_over_here(self) -> None:
        """Take the pieces of this rank from the model."""
        with self._lock:
            self.strands.gather_parameters()
            if self._host is not None:
                self._host.copy(self._host.memory, self.memory)

    def publish(self) -> None:
        """See `Replica`."""
        if isinstance(self.drift, StrandDrift):
            self.crew.tell("publish")
            with self.drift.quiet():
                super().publish()

    def step(self, as_grad: AsGrad | None, tip: Tip, options: bytes, *, with_state: bool) -> None:
        """See `Replica`."""
        assert self.gradients is not None
        if not self.strands.rank:
            factor = self.gradients.measure()
            self.crew.tell("step", tip, options, factor)
            self.gradients.scale_by(factor)
        super().step(as_grad, tip, options, with_state=with_state)

    @property
    def described(self) -> list[Tensor]:
        """See `Replica`."""
        own = self.part(self.strands.mine[0]).parameters
        return [
            torch.empty(model.shape, dtype=mine.dtype, device="meta", requires_grad=mine.requires_grad)
            for model, mine in zip(self.strands.model, own, strict=True)
        ]

    @property
    def described_groups(self) -> list[dict[str, Any]]:
        """See `Replica`."""
        groups = []
        for group in self.optimizer.param_groups:
            count = len(group["params"]) // len(self.strands.mine)  # those of the first strand
            names = [name.rpartition("[")[0] for name in group.get("param_names", ())[:count]]
            groups.append({**group, "params": group["params"][:count]} | ({"param_names": names} if names else {}))
        return groups

    # -- for newcomers

    def _copy_strand(self, strand: int) -> Snapshot:
        with self._lock:
            compression = self._settings.load_state_compression
            return self.snapshot(self.tip, compression, (), self.options.at_tip, self.part(strand))

    @property
    def terms(self) -> dict[str, str]:
        """What the ranks must have alike, for they make one step."""
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
        """At other ranks: look whether this rank has what rank 0 has. Raises ValueError."""
        mine = self.terms
        for name in sorted({*mine, *of_first}):
            if mine.get(name) != of_first.get(name):
                raise ValueError(
                    f"{name} is {mine.get(name)} here, and {of_first.get(name)} at rank 0: give all ranks of a cluster "
                    "the same arguments"
                )

    def give(self) -> None:
        """Serve newcomers.

        Raises:
            ClusterError: if a rank was made otherwise than rank 0.
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
        """Have each rank download its strands of one state: that which most of `donors` hold of the first strand.

        Raises:
            DownloadFailed: if some strand could not be downloaded; then nothing has changed.
        """
        failed = ""
        for _ in range(ATTEMPTS):
            known = self.states.who_carries(donors)
            of_strand = [[said.ranks[said.numbers[k]] for said in known] for k in range(len(self.strands.carriers))]
            first = _result(self.states.begin(0, of_strand[0], timeout, wanted, reserve))
            tip = first.manifest.tip
            self.crew.tell("download", tip, timeout, of_strand)
            failed = self.download_here(tip, timeout, of_strand, {0: first})
            failed = next((other for other in self.crew.hear() if other), failed)
            if not failed:
                of_first = {each.name: getattr(first, each.name) for each in fields(Downloaded)}
                return DownloadedStrands(**of_first, strands=self._downloaded)
        raise DownloadFailed(f"the strands of one state could not be had: {failed}")

    def download_here(
        self,
        tip: Tip,
        timeout: float,
        of_strand: Sequence[Sequence[Carrier]],
        known: Mapping[int, Downloaded] | None = None,
    ) -> str:
        """Download this rank's strands of that state, but for those that are known. Returns why that failed, or ""."""
        self._downloaded = dict(known or {})
        under_way = {
            strand: self.states.begin(strand, of_strand[strand], timeout, tip.is_state_of)
            for strand in self.strands.mine
            if strand not in self._downloaded
        }
        failed = ""
        for strand, future in under_way.items():
            try:
                self._downloaded[strand] = _result(future)
            except AveragingError as error:
                failed = f"strand {strand}: {error}"
        return failed

    def load_here(self, keeps_drift: bool) -> None:
        """Take over what this rank has downloaded."""
        first = next(iter(self._downloaded.values()))
        of_first = {each.name: getattr(first, each.name) for each in fields(Downloaded)}
        self.load(DownloadedStrands(**of_first, strands=self._downloaded), keeps_drift=keeps_drift)

    def load(self, state: Downloaded, *, keeps_drift: bool = False) -> None:
        """See `Replica`."""
        self.crew.tell("load", keeps_drift)
        with self.drift.quiet() if isinstance(self.drift, StrandDrift) else contextlib.nullcontext():
            super().load(state, keeps_drift=keeps_drift)
        self.strands.is_ahead = True

    def _take(self, state: Downloaded) -> None:
        assert isinstance(state, DownloadedStrands)
        for strand in self.strands.mine:
            self.load_part(state.strands[strand], self.part(strand))
        self._downloaded = {}


def _result(future: Future[Downloaded]) -> Downloaded:
    try:
        return future.result()
    except BaseException:  # Ctrl-C, too: nobody waits for it any more
        future.cancel()
        raise


def groups_of_model(optimizer: torch.optim.Optimizer, strands: Strands) -> list[ModelGroup]:
    """The parameter groups of an optimizer of pieces as users see them: with the model's parameters."""
    groups = []
    for group in optimizer.param_groups:
        of_first = group["params"][: len(group["params"]) // len(strands.mine)]
        groups.append(ModelGroup(group, [strands.of[id(piece)] for piece in of_first]))
    return groups


def replica_of(
    strands: Strands,
    crew: Crew,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    extra_tensors: Sequence[Tensor],
    settings: Settings,
    dht: DHT,
    host: HostCopy | None = None,
) -> StrandReplica:
    """A rank's share of the state, given the optimizer of its pieces, or of their anchors on the host."""
    size = sum(max(4, piece.element_size()) * piece.numel() for piece in strands.pieces) // len(strands.mine)
    extras = sum(tensor.element_size() * tensor.numel() for tensor in extra_tensors)
    at_most = TENSORS_OF_OPTIMIZER * size + extras + MANIFEST_BYTES
    states = StrandStates(dht, settings.run_id, len(strands.carriers), at_most)
    return StrandReplica(optimizer, scheduler, extra_tensors, settings, strands, crew, states, host)
