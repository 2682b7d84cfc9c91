"""One strand of a run: who carries it averages it in rounds of its own, and gives newcomers its state."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Hold, StepControl
from shoal.averaging.exchange import Infos, Vector
from shoal.dht.dht import DHT
from shoal.flat import FlatBuffer, Layout
from shoal.optim.settings import PLACE_TIMES, Settings
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Swarm
from shoal.transfer.donor import StateDonor
from shoal.transfer.transfer import Downloaded, Reserve, download_state

StrandDonor = Callable[[Swarm, str], StateDonor]
"""Makes what serves a strand's state, in that run and under that name."""


class StrandAverager(DecentralizedAverager):
    """A rank's part in a strand of the run. It is in the strand's run from `run_in_background` to `shutdown`, as often
    as need be.

    Args:
        vector: what rounds average: its inputs are read, and its outputs written.
        make_donor: see `StrandDonor`.
        terms: what must be equal in the run.
        strand, of: the strand, and how many there are.
        settings: of the optimizer.
        dht: of this rank.
    """

    def __init__(
        self,
        vector: Vector,
        make_donor: StrandDonor,
        terms: dict[str, str],
        strand: int,
        of: int,
        settings: Settings,
        dht: DHT,
    ) -> None:
        self._given, self._donor_of, self._agreed = vector, make_donor, terms
        same = ("allreduce_timeout", "next_chunk_timeout", "shutdown_timeout", "client_mode")
        options: dict[str, Any] = {name: getattr(settings, name) for name in same}
        options |= {name: value for name, value in settings.averager_opts.items() if name in PLACE_TIMES}
        super().__init__(
            vector.inputs.views(),
            dht,
            start=False,
            prefix=f"{settings.run_id}/strand/{strand}.{of}",
            min_group_size=1,
            min_matchmaking_time=settings.matchmaking_time,
            compression=settings.grad_compression,
            bandwidth=settings.averager_opts.get("bandwidth"),
            **options,
        )
        self.in_step = True
        self._random = random.Random(dht.peer_id.key)
        self._donors: tuple[list[PeerID], list[PeerID]] = [], []  # all, and those that are relayed

    def _make_vector(self, layout: Layout, infos: Infos | None, error_feedback: float | None) -> Vector:
        return self._given

    def _adopt(self) -> FlatBuffer:
        return self._given.inputs

    def _make_donor(self, swarm: Swarm) -> StateDonor:
        return self._donor_of(swarm, f"state/{self.prefix}")

    def agreed_options(self) -> dict[str, str]:
        """See `DecentralizedAverager`; the run's own terms, too."""
        return super().agreed_options() | self._agreed

    async def _aggregate(self, swarm: Swarm, control: StepControl, hold: Hold, deadline: float) -> Outcome:
        outcome = await self._average(
            swarm, control, self._contribution(self._vector, control, hold, self._read), deadline
        )
        await self._hold_until(deadline, control, hold)
        self._vector.settle(outcome)
        return outcome

    @property
    def asked_at(self) -> float:
        """When the strand's state was last asked for, on the loop's clock."""
        return float("-inf") if self._donor is None else self._donor.asked_at

    def leave(self) -> None:
        """Leave the strand's run, knowing who else is in it: whom to ask for its state."""

        async def find() -> tuple[list[PeerID], list[PeerID]]:
            members = [] if self._swarm is None else self._swarm.peer.view.connected()
            others = [m for m in members if m.peer != self.peer_id and m.role is not Role.AUXILIARY]
            return [m.peer for m in others], [m.peer for m in others if m.is_relayed]

        self.run_in_background()
        self._donors = self.dht.reactor.submit(find()).result()
        self.shutdown()

    def download(
        self,
        timeout: float,
        max_nbytes: int,
        wanted: Callable[[Tip], bool],
        reserve: Reserve | None = None,
        donors: Collection[PeerID] = (),
    ) -> Future[Downloaded]:
        """Begin to download the strand's state from those that were in its run, see `download_state`; if `donors` are
        given, from those of them."""
        found, relayed = self._donors
        return self.dht.submit(
            download_state(
                self.dht.node,
                f"state/{self.prefix}",
                [peer for peer in found if not donors or peer in donors],
                timeout=timeout,
                rng=self._random,
                relayed=relayed,
                max_nbytes=max_nbytes,
                wanted=wanted,
                reserve=reserve,
            )
        )
