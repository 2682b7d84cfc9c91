"""One peer's side of the protocol of a run: it follows states, takes part in rounds, and coordinates when it is its
turn."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Action, Greet, Send
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.contribution import Buffers, BytesExchange, decode_gathered
from shoal.swarm.protocol.doubts import COMPLAINT_SECONDS, Doubts
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.gathering import Gathering, Until
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.leading import NOTICE_SECONDS, Leading, Phase
from shoal.swarm.protocol.participant import MemberState, Participant
from shoal.swarm.protocol.promptness import EPOCHS
from shoal.swarm.protocol.redo import RedoLog
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Role, View
from shoal.swarm.protocol.witnesses import ASKED_AT_A_TIME

log = logging.getLogger(__name__)

MAX_TIPS = 1024  # unread entries of `tips`
FIRST_VOID_SECONDS, LONGEST_VOID_SECONDS = 60.0, 3600.0
SETTLE_SECONDS = 1.0  # while members may be unknown, BEGIN waits until no new one was found for so long


class Peer:
    """One peer in one run: its `Participant` and, when it is its turn, the coordinator of its tip.

    Events are method calls, with the time as an argument; the driver performs the actions in `out` after each.

    Args:
        view: the members that this peer knows.
        terms: the options that must be equal in the run.
        rules: when a round begins.
        silence: watches the members that owe something in a round.
        signer: signs this peer's messages.
        keeps_state: whether a tip names a state that this peer holds. Then the peer moves to the next tip only when it
            has the result of the round between the two.
        redo_bytes: how many bytes of results the redo log keeps.

    Attributes:
        participant: the member's side.
        redo: the redo log.
        gathering: the coordinator's side until BEGIN; None unless it is this peer's turn.
        leading: the coordinator's side of the round that this peer has coordinated last at its tip; it may be over.
        doubts: the doubts about the coordinators of its tip.
        newcomers: whether the run may wait for newcomers, and until when.
        out: the actions to perform, in order.
        news: a counter that grows when the round of this tip is called, when the tip changes, and when this peer hears
            of a state that outranks its own.
        changes: a counter that grows when members come or go, or the coordinator changes.
        tips: states of members that differ from this peer's, each with the member's key. A reader in any thread takes
            them out.
    """

    def __init__(
        self,
        view: View,
        terms: msg.Terms,
        rules: Rules,
        silence: Silence,
        signer: Signer,
        *,
        keeps_state: bool,
        redo_bytes: int = 0,
    ) -> None:
        self.view, self.terms, self.rules, self.signer, self.keeps_state = view, terms, rules, signer, keeps_state
        self.news = self.changes = 0
        self.tips: deque[tuple[bytes, Tip]] = deque(maxlen=MAX_TIPS)
        self.out: list[Action] = []
        self.redo = RedoLog(redo_bytes)
        self.participant = Participant(view, Tip.genesis(view.run_id), terms, self.out, silence, signer, self.redo)
        self._me = view.me.key
        self._history = History(rules.wait_for_newcomers)
        self.newcomers = self._history.newcomers
        self.doubts = Doubts(self.participant, rules, self._history)
        self._held = (0.0, 0)  # for how long this peer's trainer has kept its reactor from running, and in which epoch
        # Members without which the last round was committed, until they are heard again, and whether they were put out
        # of it. If they were silent, they are lost soon, and have not held up the round.
        self._unheard: dict[bytes, bool] = {}
        # Signers of void COMMITs: until when their COMMITs are not believed, and for how long that was.
        self._void: dict[bytes, tuple[float, float]] = {}
        self.gathering: Gathering | None = None
        self.leading: Leading | None = None
        self._joining: dict[bytes, msg.Join] = {}  # JOINs that wait for their tip
        self._settled_at, self._all_until, self._met = 0.0, 0.0, 1

    @property
    def lead(self) -> Gathering | Leading | None:
        """The coordinator's side; None unless it is this peer's turn."""
        return self.gathering or self._runs

    @property
    def _runs(self) -> Leading | None:
        """The coordinator's side of a round that is not over."""
        return None if self.leading is None or self.leading.over else self.leading

    def _led_in(self, round_id: bytes) -> Leading | None:
        """The coordinator's side of the round of that name, if that is the last one that this peer has coordinated."""
        return self.leading if self.leading is not None and self.leading.begin.round == round_id else None

    def _leads(self, round_id: bytes) -> Leading | None:
        """The same, if the round is not over."""
        return led if (led := self._led_in(round_id)) is not None and not led.over else None

    @property
    def tip(self) -> Tip:
        """The state that this peer is at."""
        return self.participant.at.tip

    def hello(self) -> msg.Hello:
        """A HELLO about this peer and the members that it knows."""
        seconds, epoch = self._held
        held = seconds if self.tip.epoch - epoch < EPOCHS else 0.0
        return msg.Hello(self.view.me, self.terms, self.tip, self.view.snapshot(), held)

    def _send(self, to: Iterable[bytes], message: msgspec.Struct, buffers: Sequence[bytes] = ()) -> None:
        self.out.append(Send(tuple(to), message, buffers))

    # -- messages

    def receive(self, sender: bytes, message: Any, buffers: Buffers, now: float) -> Answer:
        """A message has arrived. Returns the answer if it is a request. Raises Refused if the message breaks a rule."""
        participant = self.participant
        asks_of_round = isinstance(message, msg.Done | msg.Broken | msg.Waiting | msg.Ping) and sender != self._me
        if asks_of_round and (commit := participant.at.commit_of(message.round)) is not None:
            self._send([sender], commit)  # the sender has missed this COMMIT
        match message:
            case msg.Progress():
                return self._on_progress(sender, message, now)
            case msg.Join():
                return self._on_join(sender, message, bytes(buffers[0]) if buffers else b"", now)
            case msg.Survey() if message.tip != self.tip and participant.at.commit_of(message.round) is None:
                return self.hello()
            case msg.Survey():
                return participant.on_survey(sender, message, buffers, now)
            case msg.Repair():
                return participant.on_repair(sender, message)
            case msg.Fetch() | msg.Digests():
                return self.redo.answer(message, now) or participant.on_fetch(message)
            case msg.After():
                known = (commit for commit in participant.at.commits if commit.tip == message.tip)
                if (next_one := self.redo.after(message, now) or next(known, None)) is None:
                    raise Refused("this peer does not know which round has followed that state")
                return next_one
            case msg.Ping():
                return self._pong(message)
            case msg.Part() | msg.Result():
                participant.on_chunk(sender, message, buffers)
            case msg.Begin():
                participant.on_begin(sender, message, buffers, now)
                self.newcomers.is_over(now)
            case msg.Orphaned():
                self._on_orphaned(sender, message, buffers, now)
            case msg.Done() | msg.Broken() | msg.Waiting():
                self._on_notice(sender, message, now)
            case msg.Unjoin():
                self._joining.pop(sender, None)
                if (gathers := self.lead) is not None:
                    self._go_on(gathers.unjoin(sender, now), now)
            case msg.Elsewhere():
                self._on_elsewhere(sender, message, now)
            case msg.Call():
                self._on_call(sender, message, now)
            case msg.Moves():
                self._on_moves(sender, message, now)
            case msg.Doubt():
                self._on_doubt(sender, message, now)
            case msg.TakeOver():
                self._on_take_over(sender, message)
            case msg.Commit():
                self._on_commit(sender, message, now)
            case msg.Abort():
                participant.on_abort(sender, message)
                self._hold_to_deadlines(now)
            case _:
                raise Refused(f"{type(message).__name__} is an answer, and nothing was asked")
        return None

    def undecodable(self, sender: bytes, reason: str) -> None:
        """A message of that peer cannot be decoded. If it is in this peer's round, complain, so that nobody waits for
        it.
        """
        if self.participant.is_with(sender):
            self.participant.complain(sender, reason)

    def answered(self, key: bytes, request: msg.Survey | msg.Repair, answer: object, now: float) -> None:
        """A member has answered the coordinator's request. If `answer` is an exception, there is no answer for that
        reason."""
        if (lead := self._leads(request.round)) is None:
            return  # nobody waits for the answer any more
        match answer:
            case Exception():
                self.out.extend(lead.unanswered(key, request, str(answer), now))
            case _ if isinstance(request, msg.Repair):
                if not isinstance(answer, msg.Follows):
                    self.out.extend(lead.unanswered(key, request, "it answers something else", now))
            case msg.Have(ballot=ballot) if ballot > request.ballot:
                if self._was_surveyed(lead.begin, answer):
                    self.out.extend(lead.outbid(key, ballot, self.view.reaches(ballot.coordinator), now))
                else:
                    self.out.extend(lead.put_out(key, "it follows a survey that it cannot show", now))
            case msg.Have(commit=msg.Commit() as commit) if not self._is_credible(commit, now):
                self.out.extend(lead.put_out(key, "its commit is void", now))
            case msg.Have(repair=msg.Repair() as repair) if not self._is_signed(repair):
                self.out.extend(lead.put_out(key, "it follows a repair that nobody signed", now))
            case msg.Have(follows=msg.Survey() as survey) if not self._is_signed(survey):
                self.out.extend(lead.put_out(key, "it has followed a survey that nobody signed", now))
            case msg.Have():
                self.out.extend(lead.surveyed(key, request.ballot, answer, now))
            case msg.Elsewhere():
                self._elsewhere_than_surveyed(lead, key, request, answer, now)
            case msg.Broken() if lead.took_over and not lead.was_done:
                self.out.extend(lead.elsewhere(key, now))  # no result can be decided without this peer
            case msg.Hello(tip=tip) if tip.outranks(lead.begin.tip):
                # Either the round was committed without this peer and its members have moved on, or that member lies.
                self.out.extend(lead.elsewhere(key, now))
                self.told(key, tip, now)
            case _:
                self.out.extend(lead.put_out(key, "it is not at this state", now))

    def _was_surveyed(self, begin: msg.Begin, have: msg.Have) -> bool:
        """Whether the holder of the higher ballot that a member follows has made it, and may coordinate that round."""
        survey = have.follows
        if survey is None or have.ballot.coordinator not in begin.leaders:
            return False
        return (survey.round, survey.ballot) == (begin.round, have.ballot) and self._is_signed(survey)

    def _elsewhere_than_surveyed(
        self, lead: Leading, key: bytes, request: msg.Survey | msg.Repair, answer: msg.Elsewhere, now: float
    ) -> None:
        """A member does not follow this peer's survey. It has left the round, or is in another one, or still reaches
        the round's coordinator. In the last case this peer gives way, unless most members doubt that coordinator."""
        begin = answer.begin
        is_in_it = begin is not None and begin.round == lead.begin.round
        if begin is None and lead.took_over:  # the round has ended, and this peer has not heard of that
            self.out.extend(lead.elsewhere(key, now))
        elif begin is None or not self._names(begin, key):
            self.out.extend(lead.put_out(key, "it does not say in which round it is", now))
        elif is_in_it and (holder := begin.ballot.coordinator) in self.participant.at.deposed:
            if isinstance(request, msg.Survey) and all(doubt.of != holder for doubt in request.doubts):
                if request.ballot == lead.ballot:  # the survey came before most members doubted that coordinator
                    self.out.extend(lead.show(self.doubts.evidence, now))
                return
            if now < self.participant.at.gave_way.setdefault(key, now) + NOTICE_SECONDS:
                # That member may not have noticed yet that the coordinator is lost, or it follows another member that
                # has taken the round over. Until NOTICE_SECONDS have passed, this peer gives way and asks again every
                # second.
                self._give_way(lead)
                return
            self.out.extend(lead.put_out(key, "it follows a coordinator that most members doubt", now))
        elif is_in_it and (lead.took_over or lead.may_give_way(key)):
            # Two peers coordinate one round. The first of them gives way as well, once for each member, because most
            # others may doubt it. Then either that member notices that the other coordinator is lost, or this peer
            # receives the other's COMMIT. This peer stays in the round: in another round of this tip, it could commit a
            # second result.
            self._give_way(lead)
        else:
            self.out.extend(lead.elsewhere(key, now, coordinator=begin.ballot.coordinator))

    def _give_way(self, lead: Leading) -> None:
        """Stop coordinating a round that this peer has taken over. If this peer has left the round, it will not ask
        again, so it tells all members that the next one is to take the round over."""
        lead.give_way()
        if self.participant.begin is None:
            gave_up = msg.Broken(lead.begin.round, self._me, False, "it has given the round up")
            self._send([member for member in lead.live() if member != self._me], gave_up)

    def _is_signed(self, message: msg.Survey | msg.Repair) -> bool:
        """Whether the holder of its ballot has signed it."""
        return self.participant.is_signed(message, message.ballot.coordinator)

    def _names(self, begin: msg.Begin, key: bytes) -> bool:
        """Whether that BEGIN is of this tip, is signed by its coordinator, and has that member."""
        return begin.tip == self.tip and key in begin.keys and self.participant.is_begun(begin, key)

    def _on_elsewhere(self, sender: bytes, elsewhere: msg.Elsewhere, now: float) -> None:
        """A peer says that it does not coordinate, is in another coordinator's round, or has left this peer's round.
        Raises RuleBroken if it may not say so."""
        participant = self.participant
        if elsewhere.begin is not None:
            require(self._names(elsewhere.begin, sender), "ELSEWHERE with a BEGIN that does not name its sender")
            led, begin = self.gathering or self.leading, elsewhere.begin
            if led is not None and self._led_in(begin.round) is None:  # otherwise the sender is in this peer's round
                self.out.extend(led.elsewhere(sender, now, coordinator=begin.ballot.coordinator))
        elif self._coordinator_of_round() is None and sender == self._successor():
            participant.fail(AveragingError(f"its coordinator is lost, and {PeerID(sender)!r} has left the round"))
        elif not self.doubts.was_asked(sender):
            return  # this peer has not asked the sender anything
        coordinator = elsewhere.coordinator
        is_known = self.view.is_known(coordinator.key) or self.view.has_met(coordinator.key)
        if is_known or self.view.hear(sender, [coordinator], now):  # `hear` limits how many members a sender can name
            self.out.append(Greet(coordinator, instead_of=sender))

    # -- states

    def told(self, key: bytes, tip: Tip, now: float) -> None:
        """A member has said at which state it is."""
        if key == self._me:
            return  # a message of this peer to itself may be outdated
        participant, commit = self.participant, self.participant.at.commit
        if self.keeps_state and not tip.is_state_of(self.tip):
            self.tips.append((key, tip))
        # A member at the tip before, which was in the round from there, is about to receive the commit. But if it had
        # the commit and went back, it could not follow, and nobody waits for it.
        goes_back = self.view.goes_back(key, tip)
        follows = commit is not None and commit.tip == tip and key in commit.members
        follows = follows and not goes_back and not self.view.is_behind(key)
        if goes_back and self.gathering is not None:
            self._go_on(self.gathering.went_back(key, now), now)
        if self.view.told(key, tip, self.tip.outranks(tip) and not follows):
            self.members_changed(now)
        if not tip.outranks(self.tip) or self.view.ignores(key, now):
            return
        if self.keeps_state and not self.view.keeps_state(key):
            return  # nobody can download that state from an auxiliary peer, so it does not count
        # The round of this tip was committed without this peer. So this peer begins none, and tells the members that
        # wait for it.
        if self.gathering is not None:
            self._resign(msg.Elsewhere(self.view.members.get(key, self.view.me)))
        if participant.begin is not None and self._coordinator_of_round() is None:
            participant.leave()
        if participant.begin is None and participant.given.input is not None and participant.given.input.tip is None:
            self.move(tip, now)  # the input does not depend on a state, so continue from the state of the others
        self.news += 1

    def move(self, tip: Tip, now: float, *, made: bool = False) -> None:
        """Move to another state, which this peer has downloaded, or has `made` alone. Tells all members. After a
        download, tells them the old state as well: it may be on a side of a fork of which they have not heard."""
        if self.tip.epoch and not made:
            self._send(self.view.others(), self.hello())
        if not tip.is_state_of(self.tip):
            self.redo.clear()
        self.participant.move(tip, made=made)
        self._history.skipped()
        self._new_tip(now, downloaded=self.keeps_state and not made)
        self._send(self.view.others(), self.hello())

    def _new_tip(self, now: float, downloaded: bool = False) -> None:
        # A peer that has downloaded the state does not know which members are at it. If it is this peer's turn to
        # coordinate, they must first hear of it.
        self._all_until = now + SETTLE_SECONDS if downloaded else 0.0
        self.doubts.new_tip()
        self.newcomers.new_tip(self.tip, now)
        self._history.punctuality.new_tip()
        if (led := self.gathering or self.leading) is not None and led.at.tip != self.tip:
            self.gathering = self.leading = None
        self.news += 1
        if self.participant.silence.patience.remembers:
            # Doubt a coordinator that has held up too many rounds before it begins this one.
            self._hold_to_deadlines(now)

    def _on_commit(self, sender: bytes, commit: msg.Commit, now: float) -> None:
        participant = self.participant
        if commit.tip != self.tip or participant.at.missed is not None:
            return  # another member has passed it on before, or this peer is at another state
        begin = participant.begin
        require(participant.is_with(sender) or sender in self.view.members, "COMMIT from a peer that is no member")
        require(self._may_decide(commit.coordinator), "COMMIT of a coordinator that is no member")
        is_signed = sender == commit.coordinator or self.participant.is_signed(commit, commit.coordinator)
        require(is_signed, "COMMIT without its coordinator's signature")
        ended = participant.begin_of(commit)
        brought = commit.samples if ended is None else self.rules.samples(ended)
        require(commit.samples == brought, "COMMIT of other samples than its round has")
        if self.keeps_state and not participant.holds(commit) and not self._is_credible(commit, now):
            return
        if begin is not None and begin.round != commit.round:
            # This peer is in another round of this tip. The members of that round must hear that it is void.
            self._send([key for key in begin.keys if key != self._me], commit)
        self.view.hear(sender, commit.view, now)
        # The coordinator may not reach all members that this peer reaches.
        reached = {sender, *(member.key for member in commit.view)}
        self._send([key for key in self.view.others() if key not in reached], commit)
        if participant.holds(commit) or not self.keeps_state:
            self._advance(commit, now)
            return
        participant.miss(commit)
        self._resign(commit)
        self.news += 1

    def answered_after(self, commits: Sequence[msg.Commit], now: float) -> None:
        """Members have answered AFTER with these commits. This peer has missed the round that more than half of them
        name. If that is a single one of several members, the coordinator must be one that this peer has met."""
        participant, votes = self.participant, Counter(commit.next_tip for commit in commits)
        others = sum(self.view.reaches(key) and self.view.keeps_state(key) for key in self.view.others())
        for commit in commits if participant.at.missed is None else ():
            count = votes[commit.next_tip]
            are_most = commit.tip == self.tip and 2 * count > len(commits)
            is_known = count > 1 or 2 * count > others or self._may_decide(commit.coordinator)
            if are_most and is_known and self._is_valid(commit, now):
                participant.miss(commit)
                self._resign(commit)
                self.news += 1
                return

    def _is_credible(self, commit: msg.Commit, now: float) -> bool:
        """Whether that commit is signed by a peer that may decide, and no void commit of that peer is too recent."""
        return self._may_decide(commit.coordinator) and self._is_valid(commit, now)

    def _is_valid(self, commit: msg.Commit, now: float) -> bool:
        """Whether that commit is signed by its coordinator, and no void commit of that peer is too recent."""
        until, _ = self._void.get(commit.coordinator, (now, 0.0))
        return until <= now and self.participant.is_signed(commit, commit.coordinator)

    def _may_decide(self, key: bytes) -> bool:
        """Whether that peer may coordinate a round of this tip: it is or was a member here. Otherwise an attacker could
        stop the run with void COMMITs, each signed with a new key."""
        participant, last = self.participant, self.participant.at.commit
        was_in_the_last = last is not None and key in last.members
        return self.view.has_met(key) or key in participant.at.asked or participant.is_with(key) or was_in_the_last

    def _advance(self, commit: msg.Commit, now: float) -> None:
        begin = self.participant.begin_of(commit)
        if begin is None:
            self._history.skipped()
        else:
            weights = zip(begin.members, begin.weights, strict=True)
            self._history.committed({member.key: weight for member, weight in weights}, now)
            stayed = {member.key for member in commit.view}
            out = [key for key in commit.members if key not in stayed and self.view.reaches(key)]
            led, patience = commit.coordinator == self._me, self.participant.silence.patience
            for key in [key for key, alone in self.participant.at.postponed.items() if alone and led]:
                patience.held_up(key, now)  # it said that it was in another round, so this one waited in vain
            patience.new_tip()
            self._unheard = {m.key: m.key in out for m in self.view.connected() if m.key not in stayed}
        self.doubts.committed(commit.coordinator, led=self.lead is not None)
        until, seconds = self._void.get(commit.coordinator, (0.0, 0.0))
        if until + seconds <= now:  # a liar may behave well for a while
            self._void.pop(commit.coordinator, None)
        if not {*commit.members} <= {m.key for m in commit.view} or self.view.misses(commit.tip, commit.members):
            self.redo.want(now)
        self.participant.advance(commit)
        self.redo.keep(commit, self.participant.result_of(commit.round), now)
        self.view.advanced(commit.members, commit.tip, commit.next_tip)
        self._new_tip(now)

    def has_result(self, exchange: BytesExchange, commit: msg.Commit, now: float, *, missed: bool) -> None:
        """This peer has fetched the result of a round that it missed or did not use; see `Participant.has_result`."""
        self.participant.has_result(exchange, commit, missed=missed)
        if commit is self.participant.at.missed:
            self._advance(commit, now)
            # The members of the round believe that this peer is behind. If it is, it replays the next round now.
            if self.participant.behind(now) is None:
                self._send(self.view.others(), self.hello())

    def give_up_missed(self, now: float) -> None:
        """No member can send the result of the missed round. So its COMMIT is void, and the round is repeated."""
        if (commit := self.participant.at.missed) is not None:
            _, seconds = self._void.get(commit.coordinator, (now, FIRST_VOID_SECONDS / 2))
            seconds = min(2 * seconds, LONGEST_VOID_SECONDS)
            self._void[commit.coordinator] = now + seconds, seconds
            # Do not wait for that coordinator again at this tip, and less long in the rounds that follow.
            self.doubts.doubt(commit.coordinator)
            self.participant.silence.patience.held_up(commit.coordinator, now)
        self.participant.give_up_missed()
        self.news += 1
        self._hold_to_deadlines(now)

    # -- calls and samples

    def _on_call(self, sender: bytes, call: msg.Call, now: float) -> None:
        """A peer that believes to be the coordinator calls the round of a tip."""
        participant = self.participant
        if call.seconds and sender in self.view.members and self.view.has_room(now):
            self.news += 1
        if call.tip != self.tip:
            self._send([sender], self.hello())
        elif participant.at.missed is not None:
            self._send([sender], participant.at.missed)
        elif participant.begin is not None:
            # If nobody coordinates that round any more, this peer takes it over, or waits for the member that does.
            in_it = self.view.members.get(self._coordinator_of_round() or self._me, self.view.me)
            if in_it.key != sender:
                self._send([sender], msg.Elsewhere(in_it, participant.begin))
        elif participant.coordinator().key == sender:
            if participant.state is MemberState.JOINED:
                self.newcomers.told(call.seconds, now)
            self.is_called()
        elif sender in self.view.members:
            # One of the two knows a member that the other does not know, so they exchange HELLO.
            self.out.append(Greet(self.view.members[sender]))

    def is_called(self) -> None:
        """The coordinator has called the round of this tip."""
        self.participant.is_called()
        self.news += 1

    def _on_progress(self, sender: bytes, report: msg.Progress, now: float) -> Answer:
        """A member reports its samples, or that it is downloading the state. The answer says how many samples all
        members have, or where to report instead."""
        if sender not in self.view.members:
            return self.hello()
        if not report.loading:
            self._hear_tip(sender, report.tip, now)
        elif report.tip == self.tip and self.view.loads(sender, self.tip):
            self.members_changed(now)
        elsewhere = self._elsewhere(report.tip)
        if elsewhere is not None:
            if report.loading and report.tip == self.tip:  # this peer may succeed the coordinator, or send the state
                self.newcomers.claims(sender, report, now)
            return elsewhere
        lead = self._coordinating(now)
        if report.loading and self.gathering is None:
            return self.hello()  # the round from that state has begun, and can't wait for the member
        answer, actions = lead.progress(sender, report, now)
        self._go_on(actions, now)
        return answer

    def _on_moves(self, sender: bytes, moves: msg.Moves, now: float) -> None:
        """A member says how many bytes have passed between it and newcomers."""
        require(sender in self.view.members, "MOVES from a peer that is no member")
        if moves.tip == self.tip:
            for key, nbytes in moves.newcomers:
                if key != sender:
                    self.newcomers.moved(key, nbytes, now)

    def expect_join(self, sender: bytes, join: msg.Join) -> None:
        """A JOIN has arrived. The driver passes it on when this peer is at its tip."""
        self._joining[sender] = join

    def _on_join(self, sender: bytes, join: msg.Join, gathered: bytes, now: float) -> Answer:
        """A member's input is ready. The JOIN is void if the member has withdrawn or replaced it since `expect_join`.
        Raises Refused for a JOIN that breaks a rule."""
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
            self._go_on(self._coordinating(now).join(sender, join, gathered, now), now)
        elif sender not in self.view.members:
            return self.hello()  # this peer has lost the sender meanwhile, and the sender may not know that
        return msg.Joined(self.tip, self.gathering.waits_for(now) if self.gathering is not None else 0.0)

    def _hear_tip(self, sender: bytes, tip: Tip, now: float) -> None:
        """A member has sent a report or a JOIN for that tip. If the tip's round was committed, send it the COMMIT."""
        self.told(sender, tip, now)
        for commit in self.participant.at.commits:
            if commit.tip == tip and sender != self._me:
                self._send([sender], commit)

    def _elsewhere(self, tip: Tip) -> Answer:
        """The answer to a message for the coordinator of that tip; None if this peer is the coordinator."""
        if tip != self.tip or self.participant.at.missed is not None:
            return self.hello()
        if self.lead is not None:
            return None
        coordinator = self.participant.coordinator()
        return None if coordinator.key == self._me else msg.Elsewhere(coordinator)

    # -- coordinating

    def settle(self, now: float) -> None:
        """Let BEGIN wait, because some members may not have been found yet: before the first commit of a run, or after
        this peer was away."""
        self._settled_at = now + SETTLE_SECONDS
        if self.gathering is not None:
            self.gathering.settle(self._settled_at)

    def _coordinating(self, now: float) -> Gathering | Leading:
        """The coordinator's side at this tip; a new one if there is none."""
        if (lead := self.lead) is None:
            self._end_lead()
            at, commit = self.participant.at, self.participant.at.commit
            # A COMMIT's view lacks the members that were put out of the round. BEGIN does not wait for those, nor for
            # members that have gone back to an earlier state.
            there = () if commit is None else {m.key for m in commit.view}.intersection(commit.members)
            veterans = frozenset(key for key in there if not self.view.is_behind(key))
            me, rules, history, times = self._me, self.rules, self._history, (self._settled_at, self._all_until)
            patience, haste = self.participant.silence.patience, self.doubts.haste()
            lead = Gathering(me, at, rules, self.signer, history, patience, veterans, haste, *times)
            self.gathering, self.leading = lead, None
            self._go_on(lead.expect(self.view.connected(), now), now)
        return lead

    def _go_on(self, actions: Iterable[Action], now: float) -> None:
        """The coordinator's side wants these actions. If one of them is BEGIN, it leads the round from now on."""
        self.out.extend(actions)
        if self.gathering is not None and (begin := self.gathering.begin) is not None:
            self.leading, self.gathering = Leading.of(self.gathering, begin, now), None

    def _end_lead(self) -> None:
        """Forget the coordinator's side, except its ballot: this peer never begins two rounds under one ballot."""
        if self.leading is not None:
            self.participant.at.led = self.leading.ballot
        self.gathering = self.leading = None

    def _resign(self, why: msg.Commit | msg.Elsewhere) -> None:
        """Stop coordinating this tip, and tell the members that have reported or joined here why. A JOIN of this peer
        to itself is void."""
        led = self.gathering or self.leading
        self._send([key for key in (led.heard_from if led is not None else ()) if key != self._me], why)
        self.participant.rejoin(self._me)
        self._end_lead()

    def _on_notice(self, sender: bytes, notice: msg.Done | msg.Broken | msg.Waiting, now: float) -> None:
        """A member sends DONE, BROKEN or WAITING. Raises Refused if it may not say so."""
        if isinstance(notice, msg.Waiting):
            self.participant.on_waiting(sender, notice, now)
        if isinstance(notice, msg.Broken) and notice.peer == self._me != sender and self.participant.is_with(sender):
            log.warning("%r goes on without what this peer sends: %s", PeerID(sender), notice.reason)
        if isinstance(notice, msg.Broken) and notice.peer == sender:
            self._will_not_take_over(sender, notice, now)
        if (lead := self._leads(notice.round)) is None:
            return
        match notice:
            case msg.Done():
                self.out.extend(lead.finished(sender, notice, self.view.connected(), now))
            case msg.Broken():
                self.out.extend(lead.broken(sender, notice, self.view.reaches(notice.peer), now))
            case msg.Waiting() if sender in lead.live():
                lead.wait(now)

    def _will_not_take_over(self, sender: bytes, broken: msg.Broken, now: float) -> None:
        """A member has given up the round that it coordinates, or was to take over. If this peer was done, a result may
        be decided, so another member takes the round over. Otherwise the round fails here."""
        round = self.participant.round
        is_of_it = round is not None and round.begin.round == broken.round
        if round is None or not is_of_it or sender != (self._coordinator_of_round() or self._successor()):
            return
        if round.done is None:
            why = f"its coordinator is lost, and {PeerID(sender)!r} has given the round up"
            self.participant.fail(AveragingError(why))
        else:
            self.participant.is_unable(sender)
            self.succeed(now)

    def wake_at(self) -> float | None:
        """When to call `tick` if nothing else happens; None if never."""
        return None if self.lead is None else self.lead.wake_at()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if (lead := self.lead) is not None:
            self._go_on(lead.tick(now), now)

    # -- who is there

    def members_changed(self, now: float) -> None:
        """Members came or went."""
        self.changes += 1
        if self.tip.epoch == 0 and len(self.view.members) > self._met:
            self.settle(now)
        self._met = len(self.view.members)
        lead, gathering = self._runs, self.gathering
        if lead is not None:
            for key in [key for key in lead.live() if not self.view.reaches(key)]:
                self.out.extend(lead.put_out(key, "the connection to it was lost", now))
        elif gathering is not None and (coordinator := self.participant.coordinator()).key != self._me:
            self._resign(msg.Elsewhere(coordinator))  # a member before this peer in the order has appeared
        elif gathering is not None:
            self._go_on(gathering.expect(self.view.connected(), now), now)

    def say(self, me: Member, now: float) -> None:
        """Change what this peer says of itself, and tell all members."""
        self.view.say(me)
        self.participant.rejoin()  # the JOIN has the old description of this peer
        self._send(self.view.others(), self.hello())
        self.members_changed(now)

    def lost(self, key: bytes, known: bool, now: float) -> None:
        """A peer is lost. `known` says whether it was a member until now."""
        participant = self.participant
        if known:
            self.redo.want(now)  # it may come back
        self._joining.pop(key, None)
        self._unheard.pop(key, None)
        participant.at.shown.pop(key, None)
        self.newcomers.gone(key)
        for commit in participant.at.commits if known else ():
            # The lost peer may have been a coordinator that died before all members had its COMMIT. This happens once
            # for each peer and COMMIT, so that one that comes and goes does not cause many messages.
            if (key, commit.round) not in participant.at.passed_on:
                participant.at.passed_on[key, commit.round] = None
                self._send([other for other in commit.members if other not in (key, self._me)], commit)
        # If this peer coordinates the round itself, its coordinator knows of the loss.
        if participant.is_with(key) and self._coordinator_of_round() not in (None, self._me):
            participant.complain(key, "the connection to it was lost", fault=False)
        participant.lost(key)
        self.succeed(now)

    def _coordinator_of_round(self) -> bytes | None:
        """The coordinator of the round that this peer is in, unless it is lost, deposed, or has given the round up."""
        at, round = self.participant.at, self.participant.round
        if round is None:
            return None
        coordinator = at.ballot.coordinator
        # This peer itself may have given way, and may coordinate another round of this tip by now.
        lead = self._led_in(round.begin.round)
        gave_way = coordinator == self._me and (lead is None or lead.phase is Phase.ABORTED)
        is_there = self.view.reaches(coordinator) and coordinator not in {**at.deposed, **round.unable}
        return coordinator if is_there and not gave_way else None

    def succeed(self, now: float) -> None:
        """If nobody coordinates the round that this peer is in, take it over, or tell the member whose turn it is."""
        participant, round = self.participant, self.participant.round
        if round is None or self._coordinator_of_round() is not None:
            return
        if (lead := self._leads(round.begin.round)) is not None and lead.ballot > participant.at.ballot:
            return  # this peer has taken it over, and its own survey is still on its way to its participant
        begin, ballot = round.begin, participant.at.ballot
        if not self.view.reaches(ballot.coordinator):
            self.doubts.doubt(ballot.coordinator)
            self._depose(self.doubts.doubted_by_most())
        successor = self._successor()
        if successor == self._me:
            lost = {key: "lost" for key in begin.keys if not self.view.reaches(key)}
            before = Gathering(self._me, participant.at, self.rules, self.signer, phase=Until.OVER)
            lead = Leading.after(before, round, {**participant.told_out, **lost}, self.doubts.evidence)
            self.gathering, self.leading = None, lead
            self.out.extend(lead.start_survey(now))
        elif successor is not None:
            # The successor may not even have the BEGIN.
            gathered = msgspec.msgpack.encode(round.gathered)
            self._send([successor], msg.Orphaned(begin), [gathered])
            self._tell_doubts(successor)
        else:
            participant.fail(AveragingError("its coordinator is lost, and nobody in reach can take the round over"))

    def _successor(self) -> bytes | None:
        """The member whose turn it is to take over this peer's round; None if no reachable member can."""
        participant, round = self.participant, self.participant.round
        if round is None:
            return None
        able = (m.key for m in participant.candidates() if participant.is_with(m.key) and m.role is not Role.CLIENT)
        not_able = {**participant.at.doubted, **round.unable, **participant.told_out}
        return next((key for key in able if key not in not_able), None)

    def _on_orphaned(self, sender: bytes, orphaned: msg.Orphaned, buffers: Buffers, now: float) -> None:
        """A member has lost the coordinator of its round and believes that this peer is the successor."""
        begin, participant = orphaned.begin, self.participant
        require(sender in begin.keys, "only a member of a round can ask to take it over")
        commit = participant.at.commit_of(begin.round)
        if commit is not None or self.tip != begin.tip:
            self._send([sender], commit or self.hello())
            return
        if participant.begin is None and begin.round in (participant.over, participant.left):
            if begin.round == participant.over:
                self._send([sender], msg.Elsewhere(participant.coordinator()))  # the coordinator had ended it
            else:
                self._send([sender], msg.Broken(begin.round, self._me, False, "it has left that round"))
            return
        if participant.begin is None and not self.view.reaches(begin.ballot.coordinator):
            participant.enter(sender, begin, buffers, now, relayed=True)
        if participant.begin is not None and participant.begin.round == begin.round:
            self.succeed(now)  # does nothing if this peer still reaches the coordinator

    # -- doubts

    def coordinator_answered(self, key: bytes, joined: msg.Joined | None, now: float) -> None:
        """The coordinator has answered a report, or a JOIN (`joined`)."""
        self.doubts.answered(key, joined=joined is not None, now=now)
        if joined is not None and joined.tip == self.tip and self.participant.begin is None:
            self.newcomers.told(joined.seconds, now)

    def was_held(self, seconds: float) -> bool:
        """This peer's trainer has kept its reactor from running for so long. Returns whether that is news to others: it
        is much longer than before, or longer ago than half of the time for which they remember it."""
        before, epoch = self._held
        is_news = seconds > 1.5 * before or (seconds >= before and self.tip.epoch - epoch >= EPOCHS // 2)
        if is_news:
            self._held = seconds, self.tip.epoch
        return is_news

    def stood_still(self, now: float) -> None:
        """See `Doubts.stood_still`."""
        self.doubts.stood_still(now)
        self.newcomers.stood_still(now)
        self.participant.progressed(now)

    def _hold_to_deadlines(self, now: float) -> None:
        """Doubt the coordinator of this tip if it has missed a deadline, and tell the next candidate."""
        participant = self.participant
        self.doubts.look(now)
        self._count_doubts(now)  # the loss of members without doubts can make a majority
        self._take_over()
        following = next((m.key for m in participant.candidates() if m.key not in participant.at.doubted), None)
        if following is None:
            # This peer doubts all candidates, and other members may doubt fewer. So it tells all members: if they did
            # not all know which candidates most members doubt, they could wait for different ones for ever.
            others = [member.key for member in self.view.connected() if member.key != self._me]
            for doubt in self.doubts.own:
                self._send(others, doubt)
        elif following != self._me:
            self._tell_doubts(following)

    def _tell_doubts(self, key: bytes) -> None:
        """Tell the next candidate whom this peer doubts, without coordinators that are deposed already."""
        for doubt in self.doubts.own:
            if doubt.of not in self.participant.at.deposed:
                self._send([key], doubt)

    def _on_doubt(self, sender: bytes, doubt: msg.Doubt, now: float) -> None:
        """A member doubts the coordinator of its tip."""
        require(doubt.sender == sender and sender in self.view.members, "a doubt in the name of another peer")
        if doubt.tip != self.tip:
            self._send([sender], self.hello())
            return
        require(self._may_decide(doubt.of), "a doubt of a peer that is no member")
        is_new = self.doubts.heard(doubt)
        # This peer does not wait for a peer that it can't reach. But the sender does, and needs a majority of doubts.
        if not self.view.reaches(doubt.of):
            self.doubts.doubt(doubt.of)
        if doubt.of in self.participant.at.deposed:
            self._show_evidence(sender)
        if is_new:  # counting takes time, so it is done only for new doubts, and every second
            self._count_doubts(now)

    def _count_doubts(self, now: float) -> None:
        """Depose coordinators that most members doubt, and take over if it is this peer's turn."""
        participant, new = self.participant, self.doubts.doubted_by_most()
        if not new:
            return
        self._depose(new)
        self.succeed(now)
        if participant.begin is None and participant.coordinator().key == self._me:
            self._take_over()
            self._coordinating(now)

    def _take_over(self) -> None:
        """Tell all members that this peer coordinates, because most members doubt the candidates before it. Called
        every second, for members that were away: one of these candidates may be among them."""
        if self.participant.begin is None and self.participant.coordinator().key == self._me:
            for key in filter(self.view.reaches, self.view.others()):
                self._show_evidence(key)

    def _show_evidence(self, key: bytes) -> None:
        """Send a member the doubts for which coordinators were deposed. They are long, and doubts arrive every second,
        so this happens only once for each member. It happens again if there are more of them, because the member counts
        only doubts of members that it reaches itself, or if the member was lost meanwhile."""
        evidence, shown = self.doubts.evidence, self.participant.at.shown
        if shown.get(key, 0) < len(evidence):
            shown[key] = len(evidence)
            self._send([key], msg.TakeOver(self.tip, evidence))

    def _depose(self, keys: Collection[bytes]) -> None:
        if keys:
            self.doubts.depose(keys)
            self.news += 1
            self.changes += 1  # members that have reported to a deposed coordinator report to the next one

    def _on_take_over(self, sender: bytes, message: msg.TakeOver) -> None:
        """A member coordinates this tip, because most members doubt the candidates before it."""
        participant = self.participant
        if message.tip != self.tip:
            self._send([sender], self.hello())
            return
        if sender not in self.view.members:
            return
        new = participant.deposed_by(message.doubts) - participant.at.deposed.keys()
        self.doubts.hear(doubt for doubt in message.doubts if doubt.of in new)
        self._depose(new)
        if self._me in new and self.gathering is not None:
            self._resign(msg.Elsewhere(self.view.members[sender]))

    # -- signs of life and progress

    def look(self, moved: Callable[[bytes], int], now: float) -> None:
        """Check whether the round makes progress and has a coordinator. Called every second. See `Participant.look`."""
        self.participant.look(moved, now)
        passed, coordinator = self.newcomers.look(moved, now), self.participant.coordinator().key
        if passed and coordinator != self._me:
            self._send([coordinator], msg.Moves(self.tip, tuple((key, float(nbytes)) for key, nbytes in passed)))
        self.redo.look(now)
        silence = self.participant.silence
        if (lead := self._runs) is not None:
            lead.saw(self._me, silence.signs, now)
            # A member that lacks something complains before this time is over.
            late = silence.reducer_timeout
            self.out.extend(lead.hurry(lambda key: silence.patience.of(key, late, now) + COMPLAINT_SECONDS, now))
        self._hold_to_deadlines(now)
        self.succeed(now)

    def awaited(self, now: float) -> list[bytes]:
        """The peers that this peer waits for in a round, or until one begins."""
        lead, gathering, participant = self._runs, self.gathering, self.participant
        if lead is not None:
            return [*lead.live(), *self._unheard]
        if gathering is not None and (gathering.phase is Until.BEGIN or participant.begin is None):
            return [*gathering.overdue(now), *self._unheard]
        if participant.begin is not None:
            return [participant.at.ballot.coordinator, *participant.silence.quiet(now), *self._next_in_turn(now)]
        if self.doubts.has_its_part():
            return [participant.coordinator().key, *self._unheard]
        return [*([participant.joined] if participant.state is MemberState.JOINED else ()), *self._unheard]

    def suspected(self, now: float) -> list[bytes]:
        """Members whose announced steps are overdue, at their coordinator. It asks them before it waits for them: then
        it knows sooner which of them are silent."""
        gathering = self.gathering
        return [] if gathering is None or gathering.phase is not Until.CALL else gathering.pace.late(now)

    def _next_in_turn(self, now: float) -> list[bytes]:
        """A few members of the round, to be asked whether it makes progress there, if it makes none here."""
        begin = self.participant.begin
        if begin is None or now - self.participant.stands_since < 1.0:
            return []
        keys = [key for key in begin.keys if key != self._me and self.view.reaches(key)]
        first = int(now) * ASKED_AT_A_TIME
        return [keys[(first + number) % len(keys)] for number in range(min(ASKED_AT_A_TIME, len(keys)))]

    def ping(self) -> msg.Ping:
        """The PING for a peer that this peer waits for."""
        begin = self.participant.begin
        return msg.Ping(begin.round if begin is not None else b"")

    def _pong(self, ping: msg.Ping) -> msg.Pong:
        """The answer to a member's PING: whether the round in it makes progress."""
        participant = self.participant
        if participant.at.commit_of(ping.round) is not None:
            return msg.Pong()
        is_in = participant.begin is not None and participant.begin.round == ping.round
        knows = not ping.round or is_in or self._leads(ping.round) is not None
        return msg.Pong(knows, participant.silence.signs)

    def on_pong(self, key: bytes, ping: msg.Ping, pong: msg.Pong, now: float) -> None:
        """A peer has answered a `ping`."""
        if self._unheard.pop(key, False) and (commit := self.participant.at.commit) is not None:
            led = commit.coordinator == self._me
            self.participant.silence.patience.put_out(key, commit.coordinator, now, led=led)
        self.participant.on_pong(key, ping, pong, now)
        if (lead := self._runs) is not None:
            lead.saw(key, pong.signs, now)
