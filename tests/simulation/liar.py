"""A member that takes part honestly, and at times says what is not so: the attacks of the design page that take no
state, and, where it is `wide`, what reviews have thought of since.

All messages of the liar are built in this file: `Lies` says what, `Liar` when.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.statements import S
from shoal.swarm.protocol.tip import NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.view import Member, Role
from shoal.swarm.swarm import Swarm
from tests.simulation.trainers import Trainer

GHOSTS = 60  # of 1,023 that a HELLO may name: what each costs is the same
WEIGHTS = (1e30, -1.0, float("nan"))
LONGEST_TURN = 30.0  # seconds of one lie that lasts
MOST_REPLAYED = 50  # messages of others that it keeps, to say them again
REPLAYED = (msg.Commit, msg.Begin, msg.Survey, msg.Abort, msg.Call)


class Lies:
    """The messages, as this peer would send them now."""

    def __init__(self, swarm: Swarm, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng

    @property
    def tip(self) -> Tip:
        return self.swarm.tip

    def _signed(self, message: S) -> S:
        """In its own name, since it can sign in no other."""
        return self.swarm._signer.sign(message)

    def _ghost(self) -> Member:
        return Member(self.rng.randbytes(32), (), Role.CLIENT)

    def other_terms(self) -> msg.Hello:
        """Attack 1: other terms, and a state with more samples than any."""
        hello = self.swarm.peer.hello()
        terms = msg.Terms({"target_batch_size": "1"}, hello.terms.schema)
        return msgspec.structs.replace(hello, terms=terms, tip=Tip(5, self.rng.randbytes(32), 1e300))

    def ghosts(self) -> msg.Hello:
        """Attack 8: members that nobody can dial."""
        hello = self.swarm.peer.hello()
        return msgspec.structs.replace(hello, members=(hello.sender, *(self._ghost() for _ in range(GHOSTS))))

    def commit(self) -> msg.Commit:
        """Attacks 2 and 4: a result that nobody has, of a round that there was not."""
        commit = msg.Commit(
            tip=self.tip,
            round=self.rng.randbytes(16),
            root=self.rng.randbytes(32),
            samples=100.0,
            members=(self.swarm.me.key, *self.swarm.peer.view.others()[:3]),
            view=(),
            coordinator=self.swarm.me.key,
        )
        return self._signed(commit)

    def empty_begin(self) -> msg.Begin:
        """Attack 2: what the plan of that round is said to have been."""
        return self._signed(self._begin(()))

    def with_loss(self, message: S) -> S:
        """A JOIN or a BEGIN with a loss, where nobody has given one."""
        worst = msgspec.structs.replace(message, loss=Loss(self.rng.choice([1e300, -1e300, 0.0]), LossKind.NUMBER))
        return self._signed(worst) if isinstance(worst, msg.Begin) else worst

    def _begin(self, members: Sequence[Member]) -> msg.Begin:
        count = len(members)
        return msg.Begin(
            tip=self.tip,
            ballot=Ballot(self.rng.randint(1, 9), self.swarm.me.key),
            members=tuple(sorted(members, key=lambda member: member.key)),
            weights=(1.0,) * count,
            machines=("",) * count,
            states=(b"",) * count,
            averages=(b"",) * count,
            chunk_elements=1,
            starts=(0,) * count + (1,) if count else (),
            with_state=False,
            timeout=60.0,
        )

    def better_state(self) -> msg.Hello:
        """A state that outranks all others, and that nobody has."""
        hello = self.swarm.peer.hello()
        tip = Tip(self.tip.epoch + 3, self.rng.randbytes(32), 3 * self.tip.samples + 1000)
        return msgspec.structs.replace(hello, tip=tip)

    def is_elsewhere(self) -> msg.Elsewhere:
        """It is in a round of its own."""
        return msg.Elsewhere(self.swarm.me, self._signed(self._begin([self.swarm.me])))

    def elsewhere(self) -> msg.Elsewhere:
        """Attack 10: another coordinates; it may be anybody, and there may be a BEGIN for it."""
        others = [self.swarm.peer.view.members[key] for key in self.swarm.peer.view.others()]
        begin = self._signed(self._begin([self.swarm.me, *others[:1]])) if self.rng.random() < 0.5 else None
        return msg.Elsewhere(self.rng.choice([*others, self._ghost(), self.swarm.me]), begin)

    def call(self) -> msg.Call:
        """Attack 10: the round is called, by who is not to call it, before its time."""
        return msg.Call(self.tip)

    def join(self) -> msg.Join:
        """Attack 17: an attempt after which there is none."""
        me, terms = self.swarm.me, self.swarm.peer.terms
        return msg.Join(self.tip, me, terms, 1.0, "", b"", (1 << 52) - 1, 5.0, b"")

    def early_join(self) -> msg.Join:
        """A JOIN before the round is called, that waits for nobody."""
        return msgspec.structs.replace(self.join(), attempt=0, patience=0.0)

    def orphaned(self) -> msg.Orphaned:
        """Attack 17: a round has lost its coordinator."""
        return msg.Orphaned(self.swarm.peer.participant.begin or self.empty_begin())

    def doubt(self) -> msg.Doubt:
        """The coordinator does not do what it has to."""
        me, coordinator = self.swarm.me.key, self.swarm.peer.participant.coordinator().key
        return self._signed(msg.Doubt(self.tip, coordinator, me))

    def take_over(self) -> msg.TakeOver:
        """It is deposed, by one and the same."""
        return msg.TakeOver(self.tip, (self.doubt(),) * 9)

    def poisoned(self) -> msg.TakeOver:
        """What others have doubted, with signatures that are not theirs."""
        mine, theirs = self.doubt(), self.swarm.peer.doubts.evidence
        forged = (msgspec.structs.replace(doubt, seal=mine.seal) for doubt in theirs)
        return msg.TakeOver(self.tip, (*theirs, mine, *forged)[: msg.MAX_DOUBTS])

    def complaint(self, begin: msg.Begin) -> msg.Broken:
        """Any member of the round has broken a rule."""
        return msg.Broken(begin.round, self.rng.choice(begin.members).key, True, "I do not like it")

    def survey(self, begin: msg.Begin) -> msg.Survey:
        """Attack 18: this peer takes the round over."""
        higher = max(begin.ballot, self.swarm.peer.participant.at.ballot, NO_BALLOT).number + self.rng.randint(1, 5)
        survey = msg.Survey(begin.tip, begin.round, Ballot(higher, self.swarm.me.key), (), None, (self.doubt(),) * 9)
        return self._signed(survey)

    def all_samples(self) -> msg.Progress:
        """Attack 19: the epoch is done, by this peer alone."""
        return msg.Progress(self.tip, self.swarm.rules.target_samples or 1e6, 1.0)

    def huge_step(self) -> msg.Progress:
        """Attack 19: all others may wait."""
        return msg.Progress(self.tip, 1.0, 1.0, step=1e15, seconds=1e9)


class Liar:
    """Makes a trainer lie.

    Args:
        trainer: that runs already.
        rng: draws the lies.
        log: is told of each.
        wide: whether it knows all lies, or those of the design page alone.

    Attributes:
        kinds: what it may do, by the attack's number on the design page, or by name.
    """

    def __init__(self, trainer: Trainer, rng: random.Random, log: Callable[[str], None], *, wide: bool) -> None:
        self._trainer, self._rng, self._log = trainer, rng, log
        self._swarm, self._node = trainer.peer.swarm, trainer.peer.node
        self._lies = Lies(self._swarm, rng)
        self._now: dict[int | str, str] = {}  # the lies that last
        self._weight = 1.0
        self._replayed: list[msgspec.Struct] = []
        self.kinds: dict[int | str, Callable[[], None]] = {
            1: lambda: self._tell(self._lies.other_terms()),
            2: lambda: self._tell(self._lies.commit()),
            3: lambda: None,
            4: lambda: self._tell(self._lies.commit()),
            7: lambda: None,
            8: lambda: self._tell(self._lies.ghosts()),
            9: lambda: None,
            10: self._interrupt,
            17: self._fence,
            18: lambda: self._tell(rng.choice([self._lies.doubt(), self._lies.take_over()])),
            19: lambda: self._ask(rng.choice([self._lies.all_samples(), self._lies.huge_step()])),
        }
        if wide:
            self.kinds |= {
                "comes and goes": self._come_and_go,
                "survey": lambda: None,
                "early join": lambda: self._ask(self._lies.early_join()),
                "joins at times": lambda: None,
                "replay": self._replay,
                "leaves rounds": self._leave_round,
                "unjoin": lambda: self._tell(msg.Unjoin()),
                "poisoned": lambda: self._tell(self._lies.poisoned()),
                "done": lambda: None,
                "loss": lambda: None,
            }
        self._notify, self._call = self._node.notify, self._node.call_for_buffers
        self._node.call_for_buffers = self._asked  # type: ignore[method-assign]
        self._node.notify = self._changed  # type: ignore[method-assign]
        self._node.stop_serving(self._swarm.service)
        self._node.serve(self._swarm.service, self._handle)

    async def lie(self, count: int, seconds: float) -> None:
        """So many lies, within so many seconds; when this returns it has stopped to lie."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for at in sorted(self._rng.uniform(0.0, seconds) for _ in range(count)):
            await asyncio.sleep(max(0.0, begun + at - loop.time()))
            kind, turn = self._rng.choice(list(self.kinds)), self._rng.uniform(1.0, LONGEST_TURN)
            self._now[kind] = self._rng.choice(["one way", "another"])
            self._weight = self._rng.choice(WEIGHTS)
            self._log(f"lie {kind} ({self._now[kind]}) for {turn:.1f} s")
            while turn > 0.0:  # what is said once is said again in its turn
                with contextlib.suppress(P2PError):
                    self.kinds[kind]()
                pause = min(turn, self._rng.uniform(1.0, 5.0))
                await asyncio.sleep(pause)
                turn -= pause
            del self._now[kind]

    # -- what it says

    def _tell(self, message: msgspec.Struct) -> None:
        self._notify([PeerID(key) for key in self._swarm.peer.view.others()], self._swarm.service, message)

    def _ask(self, message: msgspec.Struct, to: Sequence[bytes] | None = None) -> None:
        others = self._swarm.peer.view.others() if to is None else to
        for key in others:
            self._node.spawn(self._hear(PeerID(key), message))

    async def _hear(self, peer: PeerID, message: msgspec.Struct) -> None:
        with contextlib.suppress(P2PError, TimeoutError):
            await self._node.call_for_buffers(peer, self._swarm.service, message, timeout=10.0)

    def _interrupt(self) -> None:
        self._tell(self._lies.elsewhere() if self._now[10] == "one way" else self._lies.call())

    def _fence(self) -> None:
        if self._now[17] == "one way":
            self._ask(self._lies.join())
        else:
            self._tell(self._lies.orphaned())

    def _come_and_go(self) -> None:
        self._tell(msg.Leave())
        self._ask(self._lies.better_state())

    def _replay(self) -> None:
        for message in self._rng.sample(self._replayed, min(3, len(self._replayed))):
            self._tell(message)

    def _leave_round(self) -> None:
        others = [self._swarm.peer.view.members[key] for key in self._swarm.peer.view.others()]
        self._tell(msg.Elsewhere(self._rng.choice([*others, self._swarm.me])))
        if (begin := self._swarm.peer.participant.begin) is not None:
            self._tell(msg.Broken(begin.round, self._swarm.me.key, False, "I have left"))
            self._tell(msg.Abort(begin.round, "I have ended it"))

    def _changed(self, peers: Any, service: Any, message: Any, buffers: Any = (), name: bytes = b"") -> None:
        """As `Node.notify`, which it stands in for."""
        if 9 in self._now and isinstance(message, msg.Part):
            message = msgspec.structs.replace(message, weight=self._weight)
        if "done" in self._now and isinstance(message, msg.Done):
            if self._rng.random() < 0.5:
                message = msgspec.structs.replace(message, root=self._rng.randbytes(32))
            if self._rng.random() < 0.3 and (begin := self._swarm.peer.participant.begin) is not None:
                self._notify(peers, service, self._lies.complaint(begin))
        if "loss" in self._now and isinstance(message, msg.Begin):
            message = self._lies.with_loss(message)
        self._notify(peers, service, message, buffers, name)

    async def _asked(self, peer: PeerID, service: Any, message: Any, *arguments: Any, **named: Any) -> Any:
        """As `Node.call_for_buffers`, which it stands in for."""
        if "loss" in self._now and isinstance(message, msg.Join):
            message = self._lies.with_loss(message)
        is_join = isinstance(message, msg.Join) and "joins at times" in self._now
        if is_join and message.tip.epoch % 2 and peer != self._node.peer_id:
            await asyncio.sleep(LONGEST_TURN)
            raise TimeoutError("not in this epoch")
        return await self._call(peer, service, message, *arguments, **named)

    # -- what it answers

    def _handle(self, peer: PeerID, message: Any, buffers: Any) -> Any:
        """As `Swarm._handle`, which it stands in for."""
        if isinstance(message, REPLAYED) and len(self._replayed) < MOST_REPLAYED:
            self._replayed.append(message)
        if peer != self._node.peer_id:
            match message:
                case msg.Digests() if 2 in self._now:
                    return msg.Committed(self._lies.empty_begin(), ())
                case msg.Digests() if 4 in self._now:
                    raise Unavailable("this peer does not have that round's result any more")
                case msg.Join() if 3 in self._now:
                    raise Refused("I do not like it")
                case msg.Progress() if 7 in self._now:
                    return self._count(message) if self._now[7] == "one way" else self._never()
                case msg.Join() if 7 in self._now:
                    return msg.Joined(message.tip) if self._now[7] == "one way" else self._never()
                case msg.Survey() if "survey" in self._now:
                    return self._surveyed(peer, message, buffers)
                case msg.Begin() if 18 in self._now:
                    others = [member.key for member in message.members if member.key != self._node.peer_id.key]
                    self._ask(self._lies.survey(message), others)
        return self._swarm._handle(peer, message, buffers)

    def _surveyed(self, peer: PeerID, survey: msg.Survey, buffers: Any) -> Any:
        match self._rng.randrange(5):
            case 0:
                return self._lies.better_state()
            case 1:
                return msg.Elsewhere(self._swarm.me)
            case 2:
                return msg.Broken(survey.round, self._swarm.me.key, False, "I have left")
            case 3:
                return self._lies.is_elsewhere()
        have = self._swarm._handle(peer, survey, buffers)
        if isinstance(have, msg.Have) and have.digests:
            digests = list(have.digests)
            digests[self._rng.randrange(len(digests))] = b""
            return msgspec.structs.replace(have, digests=tuple(digests))
        return have

    def _count(self, report: msg.Progress) -> msg.Count:
        return msg.Count(report.tip, report.samples, report.rate, 2, called=False)

    async def _never(self) -> msg.Count:
        await asyncio.sleep(3600.0)
        raise Unavailable("it was not serious")
