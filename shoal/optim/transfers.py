"""Sends newcomers the parts of the state that a rank has, and fetches those of another state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType

import msgspec
import torch

from shoal.cluster.question import Question
from shoal.cluster.team import Team
from shoal.flat.allocation import memory_for
from shoal.optim.alike import terms_of, unlike
from shoal.optim.donors import Carrier, Carriers, Donors
from shoal.optim.pilot import Pilot, Whereabouts
from shoal.optim.run import until
from shoal.optim.settings import Settings
from shoal.optim.state import Rewritten, State, for_newcomer
from shoal.optim.work import Work
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, Offer
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, NothingWanted

log = logging.getLogger(__name__)

ATTEMPTS = 5  # tries to download all parts of one state, while the run continues
APPLY_SECONDS = 5.0  # a newcomer waits so long for a commit that this peer has not applied yet


class Fetched(msgspec.Struct, array_like=True, frozen=True):
    """Whether a rank has its parts of another state, or can load them.

    Attributes:
        why: the reason why not; "" if it is so.
        lacks_memory: whether the reason is that it has no memory.
    """

    why: str = ""
    lacks_memory: bool = False


class FoundState(msgspec.Struct, array_like=True, frozen=True):
    """A state of other peers, which this one loads; or why there is none.

    Attributes:
        tip: the name of the state; None if there is none.
        donors: which of their ranks carry the parts of it.
        why: why there is none.
        is_wanted: whether one would do.
    """

    tip: Tip | None = None
    donors: list[Carriers] = []
    why: str = ""
    is_wanted: bool = True


UNLIKE = Question("unlike", str, list[str])
TERMS = Question("terms", NoneType, dict[str, str])
CARRIERS = Question("carriers", Carrier, list[Carrier])
FIND = Question("find a state", NoneType, FoundState)
FETCHED = Question("fetched", Fetched, list[Fetched])
READY = Question("ready", Fetched, list[Fetched])


class Transfers:
    """Between a state and its `Donors`: what a newcomer gets and when, and which state this peer fetches.

    All ranks that have a part of the state call `serve`, `fetch` and `make_ready` at once.

    Args:
        settings: the settings of the optimizer.
        team: the ranks.
        state: this rank's part of the state.
        work: what this rank accumulates.
        pilot: asks the run, at rank 0.
        donors: serves and downloads parts.
    """

    def __init__(self, settings: Settings, team: Team, state: State, work: Work, pilot: Pilot, donors: Donors) -> None:
        self._settings, self._team, self._state, self._work = settings, team, state, work
        self._pilot, self._donors = pilot, donors

    # -- for newcomers

    def serve(self, is_behind: Callable[[], bool]) -> None:
        """Serve this rank's parts of the state to newcomers. In a cluster, the ranks meet each other in the DHT.

        Args:
            is_behind: whether another state outranks this peer's. Then it comes last among those offered to newcomers.

        Raises:
            ValueError: if this rank has other arguments than rank 0.
        """
        state, allow = self._state, self._settings.averager_opts.get("allow_state_sharing", True)
        if not state.is_divided:
            offer = lambda: Offer(-1.0 if is_behind() else 0.0, state.line.to_wire())  # noqa: E731
            tip, asked = (lambda: state.tip), self._pilot.run.swarm.keep_redo_log
            self._donors.serve(state.division.mine, self._copy_of_state, tip, offer, allow, asked)
            return
        terms = terms_of(state)
        of_first = self._team.decided(TERMS, lambda _: terms)
        self._team.refuse(UNLIKE, unlike(terms, of_first))
        offer = lambda: Offer(line=state.line.to_wire())  # noqa: E731
        self._donors.serve(state.division.mine, self._copy_of_part, lambda: state.tip, offer, allow)
        carriers = Carriers(tuple(self._team.all(CARRIERS, self._donors.me)), tuple(state.division.carriers))
        self._donors.meet(carriers)

    async def _copy_of_part(self, part: int) -> EncodedState:
        return await for_newcomer(lambda: self._state.copy_of_part(part))

    async def _copy_of_state(self, part: int) -> EncodedState:
        """A copy of this peer's state for newcomers.

        Raises:
            Refused: if the state can't be sent.
        """
        run, state = self._pilot.run, self._state
        # A newcomer waits until this peer has applied the last commit, but not forever: the trainer may have stopped.
        await until(lambda: state.tip == run.swarm.tip, run.state_changed, APPLY_SECONDS)
        try:
            return await for_newcomer(state.copy_for_newcomer)
        except Rewritten as why:
            log.info("a newcomer waits for this peer's state: %s", why)
            tip = state.tip
            await until(lambda: state.tip != tip, run.state_changed, APPLY_SECONDS)
        # Perhaps no step follows, because the trainer evaluates, or ends here. The newcomer may be at its last epoch.
        return await for_newcomer(lambda: state.copy_for_newcomer(rewritten=True))

    # -- for this peer

    def fetch(self, at: Whereabouts, donors: Sequence[PeerID], timeout: float, *, to_join: bool) -> list[Downloaded]:
        """Download this rank's parts of one state. It is the state whose first part most donors hold.

        Raises:
            NothingWanted: if no donor's state would do.
            DownloadFailed: if a part could not be downloaded.
            DoesNotFit: with `to_join`, if the state comes too late.
            NoMemoryForState: if a rank has no memory for its parts.
        """
        failed: list[str] = []
        for _ in range(ATTEMPTS):
            tip, says, known = self._find(at, donors, timeout, to_join=to_join)
            parts, fetched = list[Downloaded](), Fetched()
            try:
                parts = self._donors.fetch_all(self._state.division.mine, says, timeout, tip.is_state_of, known)
            except DownloadFailed as error:
                fetched = Fetched(str(error), error.lacks_memory)
            answers = self._team.all(FETCHED, fetched)
            failed = [self._team.said(rank, each.why) for rank, each in enumerate(answers) if each.why]
            if not failed:
                return parts
            if any(each.lacks_memory for each in answers):  # it does at once, too
                raise NoMemoryForState(failed[0])
        raise DownloadFailed(f"could not download all strands of one state: {failed[0]}")

    def _find(
        self, at: Whereabouts, donors: Sequence[PeerID], timeout: float, *, to_join: bool
    ) -> tuple[Tip, list[Carriers], dict[int, Downloaded]]:
        """Download the first part of the state that most donors hold, at rank 0.

        Returns:
            The name of the state, which ranks of the donors carry its parts, and the first part, by its number.
        """
        known: dict[int, Downloaded] = {}
        failed: AveragingError | None = None

        def find() -> FoundState:
            nonlocal failed
            run = self._pilot.run
            try:
                says = self._donors.who_carries(donors)
                reserve = None if run.swarm.loading is None else run.swarm.reserve
                wanted = self._pilot.wanted(at)
                begin = partial(self._donors.download, 0, says, timeout, wanted, reserve)
                known[0] = run.download(donors, begin, to_join=to_join)
            except NothingWanted as error:
                failed = error
                return FoundState(why=str(error), is_wanted=False)
            except AveragingError as error:
                failed = error
                return FoundState(why=str(error))
            return FoundState(known[0].manifest.tip, says)

        found = self._team.decided(FIND, lambda _: find())
        try:
            if found.tip is None:
                raise failed or (DownloadFailed if found.is_wanted else NothingWanted)(found.why)
        finally:
            failed = None  # it would keep this call's objects
        return found.tip, found.donors, known

    def make_ready(
        self, state: Sequence[Downloaded], *, copies: bool
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Prepare to take over a state at all ranks. If one can't, none does.

        Args:
            state: this rank's parts of the state.
            copies: whether to copy what is needed to keep this rank's contribution.

        Returns:
            A function that takes it over, and the copy.

        Raises:
            Rejected: if it does not fit.
            NoMemoryForState: if a rank has no memory for it.
        """
        load: Callable[[], None] = lambda: None  # noqa: E731
        kept: Sequence[torch.Tensor] = []
        ready = Fetched()
        try:
            load = self._state.make_ready(state)
            if copies:
                with memory_for("the drift that this peer would keep", NoMemoryForState):
                    kept = self._work.copy_to_keep()
        except NoMemoryForState as error:
            ready = Fetched(str(error), lacks_memory=True)
        except ValueError as error:
            ready = Fetched(str(error))
        for rank, each in enumerate(self._team.all(READY, ready)):
            if each.lacks_memory:
                raise NoMemoryForState(self._team.said(rank, each.why))
            if each.why:
                raise Rejected(f"the run's state does not fit this peer: {self._team.said(rank, each.why)}")
        return load, kept
