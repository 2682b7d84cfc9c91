"""One peer's side of the protocol of a run: it follows states, takes part in rounds, and coordinates when it is its
turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from shoal.p2p.errors import Refused
from shoal.p2p.node import Answer
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Action, Meet, Send
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.contribution import Buffers, BytesExchange, decode_gathered
from shoal.swarm.protocol.coordinator import Coordinator, Phase
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.participant import Participant, State
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role, View

SETTLE_SECONDS = 1.0  # BEGIN waits until nobody new was found for so long, while not everybody may have been found


class Peer:
    """One peer in one run: its `Participant` and, when it is its turn, the `Coordinator` of its tip.

    Events are method calls, with the time as an argument; the driver performs the actions in `out` after each.

    Args:
        view: the members that this peer knows.
        terms: what must be equal in the run.
        rules: when a round begins.
        silence: watches the members that owe something in a round.
        keeps_state: whether a tip names a state that this peer keeps. Then it goes on to the next tip only when it
            holds the result of the round between them.

    Attributes:
        participant: the member's side.
        lead: the coordinator's side; over unless it is this peer's turn.
        out: the actions to perform, in order.
        news: a counter that grows when the round of this tip is called, when the tip changes, and when this peer hears
            of a state that outranks its own.
        changes: a counter that grows when members come or go.
    """

    def __init__(self, view: View, terms: msg.Terms, rules: Rules, silence: Silence, *, keeps_state: bool) -> None:
        self.view, self.terms, self.rules, self.keeps_state = view, terms, rules, keeps_state
        self.news = self.changes = 0
        self.out: list[Action] = []
        self.participant = Participant(view, Tip.genesis(view.run_id), terms, self.out, silence)
        self._me = view.me.key
        self._lead_nothing()
        self._joining: dict[bytes, msg.Join] = {}  # JOINs that wait for their tip
        self._settled_at = self._all_until = 0.0
        self._met = 1

    def _lead_nothing(self) -> None:
        self.lead = Coordinator(self._me, self.tip, self.rules, phase=Phase.ABORTED)

    @property
    def tip(self) -> Tip:
        """The state that this peer is at."""
        return self.participant.tip

    def hello(self) -> msg.Hello:
        """What this peer says of itself, and of the members that it knows."""
        return msg.Hello(self.view.me, self.terms, self.tip, self.view.snapshot())

    def _send(self, to: Iterable[bytes], message: msgspec.Struct, buffers: Sequence[bytes] = ()) -> None:
        self.out.append(Send(tuple(to), message, buffers))

    # -- messages

    def receive(self, sender: bytes, message: Any, buffers: Buffers, now: float) -> Answer:
        """A message has arrived; returns the answer to a request. Raises Refused if it must not be followed."""
        participant = self.participant
        asks_of_round = isinstance(message, msg.Done | msg.Broken | msg.Waiting | msg.Ping) and sender != self._me
        if asks_of_round and (commit := participant.commit_of(message.round)) is not None:
            self._send([sender], commit)  # it has missed that
        match message:
            case msg.Progress():
                return self._on_progress(sender, message, now)
            case msg.Join():
                return self._on_join(sender, message, bytes(buffers[0]) if buffers else b"", now)
            case msg.Survey() if message.tip != self.tip and participant.commit_of(message.round) is None:
                return self.hello()
            case msg.Survey():
                return participant.on_survey(sender, message, buffers, now)
            case msg.Repair():
                return participant.on_repair(sender, message)
            case msg.Fetch() | msg.Digests():
                return participant.on_fetch(message)
            case msg.Ping():
                return self._pong(message)
            case msg.Part() | msg.Result():
                participant.on_chunk(sender, message, buffers)
            case msg.Begin():
                participant.on_begin(sender, message, buffers, now)
                if sender == self._me:
                    participant.join_to_begin = self.lead.join_to_begin
            case msg.Orphaned():
                self._on_orphaned(sender, message, buffers, now)
            case msg.Done() | msg.Broken() | msg.Waiting():
                self._on_notice(sender, message, now)
            case msg.Unjoin():
                self._joining.pop(sender, None)
                self.out.extend(self.lead.unjoin(sender, now))
            case msg.Elsewhere():
                self.out.append(Meet(message.coordinator, instead_of=sender))
                self.out.extend(self.lead.elsewhere(sender, now))
            case msg.Call():
                self._on_call(sender, message)
            case msg.Commit():
                self._on_commit(sender, message, now)
            case msg.Abort():
                participant.on_abort(sender, message)
            case _:
                raise Refused(f"{type(message).__name__} is an answer, and nothing was asked")
        return None

    def undecodable(self, sender: bytes, reason: str) -> None:
        """A message of that peer cannot be read: if it is in this peer's round, nobody is to wait for it."""
        if self.participant.is_with(sender):
            self.participant.complain(sender, reason)

    def answered(self, key: bytes, request: msg.Survey | msg.Repair, answer: object, now: float) -> None:
        """A member has answered the coordinator's request; an `answer` that is an exception says why it has not."""
        lead = self.lead
        if lead.over or not lead.is_of(request.round):
            return  # nobody waits for the answer any more
        match answer:
            case Exception():
                self.out.extend(lead.unanswered(key, request, str(answer), now))
            case _ if isinstance(request, msg.Repair):
                if not isinstance(answer, msg.Follows):
                    self.out.extend(lead.unanswered(key, request, "it answers something else", now))
            case msg.Have(ballot=ballot) if ballot > request.ballot:
                self.out.extend(lead.outbid(ballot, self.view.reaches(ballot.coordinator), now))
            case msg.Have():
                self.out.extend(lead.surveyed(key, request.ballot, answer, now))
            case msg.Elsewhere():
                self.out.extend(lead.abort("a member is in the round of another coordinator"))
            case msg.Hello(tip=tip) if tip.outranks(lead.tip):
                # The round was committed without this peer, and its members have gone on since.
                self.out.extend(lead.abort("others are past this round"))
                self.told(key, tip, now)
            case _:
                self.out.extend(lead.put_out(key, "it is not at this state", now))

    # -- states

    def told(self, key: bytes, tip: Tip, now: float) -> None:
        """A member has said at which state it is."""
        if key == self._me:
            return  # it knows that better than a message to itself, which may be late
        participant, commit = self.participant, self.participant.commit
        # If it was in the round that ended its tip, the commit is on its way to it.
        follows = commit is not None and commit.tip == tip and key in commit.members
        if self.view.told(key, tip, self.tip.outranks(tip) and not follows):
            self.members_changed(now)
        if not tip.outranks(self.tip):
            return
        # The round of this tip was committed without this peer: it begins none, and those that wait here hear where.
        if self.lead.is_before_begin:
            self._resign(msg.Elsewhere(self.view.members.get(key, self.view.me)))
        if participant.begin is not None and self._coordinator_of_round() is None:
            participant.leave()
        if participant.begin is None and participant.input is not None and participant.input.tip is None:
            self.move(tip, now)  # the input does not depend on a state: go on from where the others are
        self.news += 1

    def move(self, tip: Tip, now: float, *, made: bool = False) -> None:
        """Be at another state, which was downloaded, or which this peer has `made` alone. All members are told."""
        self.participant.move(tip)
        self.participant.made |= made
        self._new_tip(now, downloaded=self.keeps_state and not made)
        self._send(self.view.others(), self.hello())

    def _new_tip(self, now: float, downloaded: bool = False) -> None:
        # A peer that has downloaded the state does not know who else is there, and if it is its turn to coordinate,
        # they have to hear of it first.
        self._all_until = now + SETTLE_SECONDS if downloaded else 0.0
        if self.lead.tip != self.tip:
            self._lead_nothing()
        self.news += 1

    def _on_commit(self, sender: bytes, commit: msg.Commit, now: float) -> None:
        participant = self.participant
        if commit.tip != self.tip or participant.missed is not None:
            return  # passed on by another member before, or of a state that this peer does not have
        begin = participant.begin
        require(participant.is_with(sender) or sender in self.view.members, "COMMIT from a peer that is no member")
        if begin is not None and begin.round != commit.round:
            # Another round of this tip than the one that this peer is in, whose members must hear that it is void.
            self._send([m.key for m in begin.members if m.key != self._me], commit)
        self.view.learn(commit.view)
        # The coordinator may not reach all whom this peer reaches.
        reached = {sender, *(member.key for member in commit.view)}
        self._send([key for key in self.view.others() if key not in reached], commit)
        if participant.holds(commit) or not self.keeps_state:
            self._advance(commit, now)
            return
        participant.miss(commit)
        self._resign(commit)
        self.news += 1

    def _advance(self, commit: msg.Commit, now: float) -> None:
        self.participant.advance(commit)
        self.view.advanced(commit.members, commit.tip, commit.next_tip)
        self._new_tip(now)

    def has_result(self, exchange: BytesExchange, commit: msg.Commit, now: float, *, missed: bool) -> None:
        """The result of a round that this peer has missed, or did not use, is here; see `Participant.has_result`."""
        self.participant.has_result(exchange, commit, missed=missed)
        if commit is self.participant.missed:
            self._advance(commit, now)
            # Those that were in the round believe that this peer is behind.
            self._send(self.view.others(), self.hello())

    def give_up_missed(self) -> None:
        """No member can send the result of the missed round: the round is made again."""
        self.participant.give_up_missed()
        self.news += 1

    # -- calls and samples

    def _on_call(self, sender: bytes, call: msg.Call) -> None:
        """A peer that takes itself for the coordinator calls the round of a tip."""
        participant = self.participant
        if call.tip != self.tip:
            self._send([sender], self.hello())
        elif participant.missed is not None:
            self._send([sender], participant.missed)
        elif participant.begin is not None:
            coordinator = self.view.members.get(participant.ballot.coordinator)
            if coordinator is not None and coordinator.key != sender:
                self._send([sender], msg.Elsewhere(coordinator))
        else:
            self.is_called()
            if self.participant.coordinator().key != sender and sender in self.view.members:
                # One of the two does not know a member whom the other knows: they tell each other.
                self.out.append(Meet(self.view.members[sender]))

    def is_called(self) -> None:
        """The coordinator has called the round of this tip."""
        self.participant.called = True
        self.news += 1

    def _on_progress(self, sender: bytes, report: msg.Progress, now: float) -> Answer:
        """A member reports its samples, or that it is loading the state. The answer is what all members have, or where
        to report instead."""
        if sender not in self.view.members:
            return self.hello()
        if not report.loading:
            self._hear_tip(sender, report.tip, now)
        elsewhere = self._elsewhere(report.tip)
        if elsewhere is not None:
            return elsewhere
        lead = self._leading(now)
        if report.loading and not lead.is_before_begin:
            return self.hello()  # the round that follows its state can't wait for it any more
        answer, actions = lead.progress(sender, report, now)
        self.out.extend(actions)
        return answer

    def expect_join(self, sender: bytes, join: msg.Join) -> None:
        """A JOIN has arrived, and waits for its tip."""
        self._joining[sender] = join

    def _on_join(self, sender: bytes, join: msg.Join, gathered: bytes, now: float) -> Answer:
        """A member's input is ready. The JOIN is void if the member has said otherwise since it was expected. Raises
        Refused for a JOIN that breaks a rule."""
        is_void = self._joining.get(sender) is not join
        if not is_void:
            del self._joining[sender]
        self._hear_tip(sender, join.tip, now)
        elsewhere = self._elsewhere(join.tip)
        if elsewhere is not None:
            return elsewhere
        if join.view and join.view != self.view.fingerprint():
            return self.hello()
        if not is_void:
            try:
                if gathered:
                    decode_gathered(gathered)
            except ValueError as error:
                raise Refused(str(error)) from error
            lead = self._leading(now)
            lead.expected.setdefault(sender, join.sender)
            self.out.extend(lead.join(sender, join, gathered, now))
        elif sender not in self.view.members:
            return self.hello()  # it was lost here meanwhile, and may not know that
        return msg.Joined(self.tip)

    def _hear_tip(self, sender: bytes, tip: Tip, now: float) -> None:
        """A member reports to, or joins, the coordinator of that tip."""
        self.told(sender, tip, now)
        for commit in self.participant.commits:
            if commit.tip == tip and sender != self._me:
                self._send([sender], commit)  # it has missed that

    def _elsewhere(self, tip: Tip) -> Answer:
        """What to answer to a message to the coordinator of that tip; None if that is this peer."""
        if tip != self.tip or self.participant.missed is not None:
            return self.hello()
        if not self.lead.over:
            return None
        coordinator = self.participant.coordinator()
        return None if coordinator.key == self._me else msg.Elsewhere(coordinator)

    # -- coordinating

    def settle(self, now: float) -> None:
        """Not everybody may have been found yet (before the first commit of a run, or when this peer was away): BEGIN
        waits."""
        self._settled_at = self.lead.settled_at = now + SETTLE_SECONDS

    def _leading(self, now: float) -> Coordinator:
        """The coordinator of this tip, which this peer is."""
        if self.lead.over:
            commit = self.participant.commit
            # A member that was put out of the last round is in no view, and is not waited for.
            veterans = frozenset(commit.members) & {m.key for m in commit.view} if commit is not None else frozenset()
            self.lead = Coordinator(self._me, self.tip, self.rules, self._settled_at, self._all_until, veterans)
            self.out.extend(self.lead.expect(self.view.connected(), now))
        return self.lead

    def _resign(self, why: msg.Commit | msg.Elsewhere) -> None:
        """Coordinate this tip no more: those that have reported or joined here hear why. A JOIN of this peer is void,
        too."""
        self._send([key for key in {**self.lead.counts, **self.lead.joins} if key != self._me], why)
        self.participant.rejoin(self._me)
        self._lead_nothing()

    def _on_notice(self, sender: bytes, notice: msg.Done | msg.Broken | msg.Waiting, now: float) -> None:
        """A member says how it gets on in a round. Raises Refused if it has no right to say so."""
        lead = self.lead
        if isinstance(notice, msg.Waiting):
            self.participant.on_waiting(sender, notice, now)
        if not lead.is_of(notice.round):
            return
        match notice:
            case msg.Done():
                self.out.extend(lead.finished(sender, notice, self.view.connected(), now))
            case msg.Broken():
                self.out.extend(lead.broken(sender, notice, self.view.reaches(notice.peer), now))
            case msg.Waiting() if sender in lead.live():
                lead.wait(now)

    def wake_at(self) -> float | None:
        """When `tick` has something to do if nothing happens before; None if never."""
        return self.lead.wake_at()

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.out.extend(self.lead.tick(now))

    # -- who is there

    def members_changed(self, now: float) -> None:
        """Members came or went."""
        self.changes += 1
        if self.tip.epoch == 0 and len(self.view.members) > self._met:
            self.settle(now)
        self._met = len(self.view.members)
        lead = self.lead
        if lead.over:
            return
        coordinator = self.participant.coordinator()
        if lead.begin is not None:
            for key in lead.live():
                if not self.view.reaches(key):
                    self.out.extend(lead.put_out(key, "the connection to it was lost", now))
        elif coordinator.key != self._me and lead.is_before_begin:
            self._resign(msg.Elsewhere(coordinator))  # a member before this peer in the order has appeared
        else:
            self.out.extend(lead.expect(self.view.connected(), now))

    def lost(self, key: bytes, known: bool, now: float) -> None:
        """A peer is gone; `known` as a member until now."""
        participant = self.participant
        self._joining.pop(key, None)
        for commit in participant.commits if known else ():
            # It may have been the coordinator, and may have died before all had its COMMIT.
            self._send([other for other in commit.members if other not in (key, self._me)], commit)
        # If this peer coordinates, its coordinator has heard of the loss.
        if participant.is_with(key) and self._coordinator_of_round() not in (None, self._me):
            participant.complain(key, "the connection to it was lost", fault=False)
        participant.lost(key)
        self.succeed(now)

    def _coordinator_of_round(self) -> bytes | None:
        """The coordinator of the round that this peer is in; None if it is lost, or gave way to another."""
        coordinator = self.participant.ballot.coordinator
        gave_way = coordinator == self._me and self.lead.phase is Phase.ABORTED
        return coordinator if self.view.reaches(coordinator) and not gave_way else None

    def succeed(self, now: float) -> None:
        """If nobody coordinates the round that this peer is in: take over, or tell the member whose turn it is."""
        participant = self.participant
        begin, ballot = participant.begin, participant.ballot
        if begin is None or self._coordinator_of_round() is not None:
            return
        keys = {member.key for member in begin.members}
        able = (m.key for m in self.view.candidates(begin.tip.epoch) if m.key in keys and m.role is not Role.CLIENT)
        successor = next((key for key in able if self.view.reaches(key)), None)
        if successor == self._me:
            lost = [key for key in keys if not self.view.reaches(key)]
            self.lead = Coordinator.successor(self._me, begin, ballot.number, lost, self.rules)
            self.lead.gathered = dict(participant.gathered)
            self.out.extend(self.lead.start_survey(now))
        elif successor is not None:
            # It may not even have the BEGIN.
            gathered = msgspec.msgpack.encode(participant.gathered)
            self._send([successor], msg.Orphaned(begin, ballot), [gathered])
        else:
            participant.fail(AveragingError("its coordinator is lost, and nobody in reach can take the round over"))

    def _on_orphaned(self, sender: bytes, orphaned: msg.Orphaned, buffers: Buffers, now: float) -> None:
        """A member of a round has lost its coordinator and takes this peer for the successor."""
        begin, participant = orphaned.begin, self.participant
        require(any(m.key == sender for m in begin.members), "only a member of a round can ask to take it over")
        commit = participant.commit_of(begin.round)
        if commit is not None or self.tip != begin.tip:
            self._send([sender], commit or self.hello())
            return
        if participant.begin is None:
            participant.enter(sender, begin, buffers, now, relayed=True)
        if participant.begin is not None and participant.begin.round == begin.round:
            participant.heard_of(orphaned.ballot)
            self.succeed(now)  # unless the coordinator is still there for this peer

    # -- signs of life and progress

    def look(self, moved: Callable[[bytes], int], now: float) -> None:
        """See whether the round makes progress and has a coordinator; to be called every second. See
        `Participant.look`."""
        self.participant.look(moved, now)
        self.lead.saw(self._me, self.participant.silence.signs, now)
        self.succeed(now)

    def awaited(self, now: float) -> list[bytes]:
        """The peers that this one waits for in a round, or on the way to one."""
        lead, participant = self.lead, self.participant
        if not lead.over and lead.phase is not Phase.COUNTING:
            return lead.live() if lead.begin is not None else list(lead.expected)
        if participant.begin is not None:
            return [participant.ballot.coordinator, *participant.silence.quiet(now)]
        return [participant.joined] if participant.state is State.JOINED else []

    def ping(self) -> msg.Ping:
        """What to ask a peer that this one waits for."""
        begin = self.participant.begin
        return msg.Ping(begin.round if begin is not None else b"")

    def _pong(self, ping: msg.Ping) -> msg.Pong:
        """How the round goes in which a member is."""
        participant, lead = self.participant, self.lead
        leads = not lead.over and lead.is_of(ping.round)
        is_in = participant.begin is not None and participant.begin.round == ping.round
        if participant.commit_of(ping.round) is not None:
            return msg.Pong()
        knows = not ping.round or leads or is_in
        return msg.Pong(knows, participant.silence.signs, lead.signs_of.total() if leads else 0)

    def on_pong(self, key: bytes, ping: msg.Ping, pong: msg.Pong, now: float) -> None:
        """A peer has answered a `ping`."""
        self.participant.on_pong(key, ping, pong, now)
        self.lead.saw(key, pong.signs, now)
