"""What a `Pilot` decides, without torch and without a swarm."""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.health.record import FaultKind
from shoal.optim import pilot as module
from shoal.optim.hidden_state import FIRST_REST
from shoal.optim.pilot import Ended, Next, Whereabouts
from shoal.optim.reports import DownloadReport, EpochReport, ForkReport
from shoal.optim.result import Cost
from shoal.p2p.identity import PeerID
from shoal.swarm.loading import DoesNotFit
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected, Unusable
from shoal.swarm.protocol.line import Line
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.tip import Tip
from tests.optim.piloted import GENESIS, KEYS, ME, Piloted, brought, outcome_of

FIRST = GENESIS.after(bytes(32), 64.0)
SECOND = FIRST.after(bytes(32), 64.0)
OTHER = GENESIS.after(bytes(range(32)), 100.0)  # another side, which outranks FIRST


def standing(tip: Tip = FIRST, **given: Any) -> Whereabouts:
    line = Line()
    for each in (GENESIS, FIRST, SECOND):
        line.went_to(each)
        if each == tip:
            break
    return Whereabouts(tip, line, **given)


@pytest.fixture
def at() -> Piloted:
    """A peer that is at the same state as the swarm."""
    made = Piloted()
    made.swarm.tip = FIRST
    return made


def test_it_is_torch_free_itself() -> None:
    source = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in ("torch", "numpy")]


# -- what a peer does next


def test_it_goes_on(at: Piloted) -> None:
    assert at.pilot.next(standing()) is Next.GO_ON
    at.swarm.behind = GENESIS
    assert at.pilot.next(standing()) is Next.GO_ON, "this peer's state outranks that one"


def test_it_loads_a_state_that_outranks_its_own(at: Piloted) -> None:
    at.swarm.behind = SECOND
    assert at.pilot.next(standing()) is Next.BEHIND
    assert at.pilot.next(standing(is_busy=True)) is Next.GO_ON, "the background may bring it"


def test_it_waits_where_a_download_did_not_help(at: Piloted, monkeypatch: pytest.MonkeyPatch) -> None:
    at.swarm.behind, at.swarm.rests_for = SECOND, 5.0
    assert at.pilot.next(standing()) is Next.WAIT
    assert at.pilot.next(standing(is_busy=True)) is Next.GO_ON
    at.swarm.rests_for = 0.0
    at.pilot.hidden.has_loaded(whole=True)
    now = time.monotonic()
    assert at.pilot.hidden.differs(now) == FIRST_REST
    assert at.pilot.next(standing()) is Next.BEHIND, "nobody else is here"
    at.run.others = [PeerID(KEYS[1])]
    assert at.pilot.next(standing()) is Next.WAIT
    monkeypatch.setattr("shoal.optim.pilot.time.monotonic", lambda: now + FIRST_REST)
    assert at.pilot.next(standing()) is Next.BEHIND


# -- pins


def test_a_pinned_ancestor_is_followed_by_name(at: Piloted) -> None:
    assert at.pilot.pin_due(standing()) is None
    pin = at.pin(3, GENESIS)
    assert at.pilot.pin_due(standing()) == pin
    tip = at.pilot.name_after(pin, standing())
    assert tip == Tip(FIRST.epoch, FIRST.lineage, FIRST.samples, 3)
    assert at.pilot.pin_due(standing(tip)) is None


def test_a_pin_that_rewinds_is_followed_only_at_its_own_state(at: Piloted) -> None:
    assert at.pilot.name_after(at.pin(3, GENESIS, rewind=True), standing()) is None
    assert at.pilot.name_after(at.pin(4, FIRST, rewind=True), standing()) is not None


def test_without_a_kept_state_that_leads_on_from_a_pin(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    pin = at.pin(3, OTHER)
    assert at.pilot.pin_due(standing()) == pin
    assert at.pilot.name_after(pin, standing()) is None
    for _ in range(2):
        assert at.pilot.without(pin, standing()) is Next.GO_ON
    assert caplog.text.count("this peer goes on from its own until somebody does") == 1
    assert at.run.done == [], "only a newcomer waits"
    at.swarm.behind = SECOND
    at.swarm.behind_pin = 3
    assert at.pilot.without(pin, standing()) is Next.BEHIND
    at.swarm.behind_pin, at.swarm.behind = 0, None
    newer = at.pin(4, OTHER)
    assert at.pilot.without(newer, standing()) is Next.GO_ON
    assert caplog.text.count("until somebody does") == 2, "once for each pin"


def test_a_newcomer_begins_only_from_a_pinned_state(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    pin = at.pin(3, OTHER)
    assert at.pilot.without(pin, standing(GENESIS)) is Next.WAIT
    assert at.run.done == [("wait for pin", 3)]
    assert "this peer waits until somebody does" in caplog.text
    at.swarm.behind, at.swarm.behind_pin = OTHER, 3
    assert at.pilot.without(pin, standing(GENESIS)) is Next.BEHIND
    of_start = at.pin(5, GENESIS)
    at.swarm.behind_pin, at.swarm.behind = 0, None
    assert at.pilot.without(of_start, standing(GENESIS)) is Next.GO_ON


def test_no_memory_for_a_kept_state_is_told_once(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    pin = at.pin(3, OTHER)
    at.pilot.could_not_recall(pin, MemoryError("no 3 GB"), 60.0)
    at.pilot.without(pin, standing())
    assert caplog.text.count("the owner has pinned") == 1
    assert "no 3 GB; it tries again in 60 s" in caplog.text


def test_which_states_would_do(at: Piloted) -> None:
    wants = at.pilot.wanted(standing())
    assert (wants(FIRST), wants(SECOND), wants(GENESIS)) == (True, True, False)
    at.swarm.behind = SECOND
    wants = at.pilot.wanted(standing())
    assert (wants(FIRST), wants(SECOND)) == (False, True), "it is behind, and needs a newer one"
    at.swarm.unbelieved.add(SECOND.lineage)
    assert not wants(SECOND)
    at.pin(3, OTHER)
    at.swarm.behind_pin = 3
    pinned = Tip(OTHER.epoch, OTHER.lineage, OTHER.samples, 3)
    wants = at.pilot.wanted(standing())
    assert (wants(OTHER), wants(pinned)) == (False, True), "somebody holds the pinned one"
    at.swarm.behind = None
    assert at.pilot.wanted(standing())(OTHER), "who is not behind takes any state"


def test_a_pin_of_another_run_is_dropped(at: Piloted) -> None:
    tip = Tip(FIRST.epoch, FIRST.lineage, FIRST.samples, 9)
    assert at.pilot.believed(tip) == tip
    at.swarm.unbelieved.add(FIRST.lineage)
    assert at.pilot.believed(tip) == FIRST


# -- forks


def test_a_fork_that_others_are_on_is_told_once(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    side = GENESIS.after(bytes(range(32)), 10.0)
    at.swarm.peer.tips.append((KEYS[1], side))
    for _ in range(2):
        at.pilot.pin_due(standing())
    (report,) = at.events
    assert isinstance(report, ForkReport)
    assert (report.stays, report.other_tip, report.other_members) == (True, str(side), (str(PeerID(KEYS[1])),))
    assert caplog.text.count("the run has forked: ") == 1


def test_what_it_leaves_is_kept_and_told(at: Piloted) -> None:
    kept: list[str] = []

    def keep() -> str:
        kept.append("kept")
        return "in a drawer"

    assert at.pilot.leave(FIRST, SECOND, [GENESIS.lineage, FIRST.lineage, SECOND.lineage], [KEYS[1]], keep) is None
    assert not kept, "nothing is lost"
    fork = at.pilot.leave(FIRST, OTHER, [GENESIS.lineage, OTHER.lineage], [KEYS[1]], keep)
    assert fork is not None
    assert (kept, fork.kept, fork.stays) == (["kept"], "in a drawer", False)
    download = DownloadReport(1, 1.0, 10, 1, "")
    at.pilot.tell_arrival(FIRST, download, OTHER, fork, [KEYS[1]], apart=True)
    assert at.events == [fork, download]


def test_who_has_caught_up_is_told_only_if_it_was_apart(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    giver = PeerID(KEYS[1])
    download = DownloadReport(2, 1.0, 10, 1, "")
    apart = at.pilot.arrived(SECOND, [giver], whole=True, lossy=False)
    assert apart
    assert at.run.done == [("follow", SECOND), ("ask", [giver])]
    at.pilot.tell_arrival(FIRST, download, SECOND, None, [giver.key], apart=apart)
    assert caplog.text.count("leads on from it: nothing is lost") == 1
    apart = at.pilot.arrived(SECOND, [giver], whole=True, lossy=False)
    assert not apart, "this peer has its state from that one"
    at.pilot.tell_arrival(FIRST, download, SECOND, None, [giver.key], apart=apart)
    at.pilot.tell_arrival(GENESIS, download, SECOND, None, [giver.key], apart=True)
    assert caplog.text.count("leads on from it: nothing is lost") == 1, "nor was a newcomer apart"
    at.pilot.recalled(FIRST)
    assert at.run.done[-1] == ("follow", FIRST)
    assert at.pilot.arrived(SECOND, [giver], whole=True, lossy=False)


def test_a_lossy_download_has_another_machine(at: Piloted) -> None:
    at.pilot.arrived(SECOND, [], whole=True, lossy=False)
    assert at.machine.name == "cpu"
    assert at.pilot.hidden.has_just_loaded
    at.pilot.arrived(SECOND, [], whole=True, lossy=True)
    assert "lossy" in at.machine.name
    assert not at.pilot.hidden.has_just_loaded
    at.pilot.arrived(SECOND, [], whole=False, lossy=False)
    assert not at.pilot.hidden.has_just_loaded


# -- counting


def test_it_counts_and_ends_the_epoch_when_its_round_is_called(at: Piloted) -> None:
    assert at.pilot.count(FIRST, 3.0, 24.0) is Next.GO_ON
    assert at.tracker.reports == [(3.0, 24.0)]
    at.tracker.ready_to_update_epoch = True
    assert at.pilot.count(FIRST, 0.0, 0.0) is Next.END
    assert at.pilot.is_due
    at.tracker.error = Behind("others are at epoch 5")
    assert at.pilot.count(FIRST, 0.0, 0.0) is Next.LATE
    at.tracker.error = Rejected("other terms")
    with pytest.raises(Rejected):
        at.pilot.count(FIRST, 0.0, 0.0)


def test_it_waits_once_an_epoch_for_the_inner_steps_of_others(at: Piloted) -> None:
    at.pilot.count(FIRST, 0.0, 0.0)
    assert at.run.done == []
    for _ in range(3):
        at.pilot.count(FIRST, 0.0, 0.0, has_its_part=True)
    assert at.run.done == [("wait for round", FIRST)]
    assert at.tracker.waits == 1, "that is no time of training, and the report of the epoch has it"
    assert at.tracker.rests == [False, True, False, False], "nobody relies on a step that it does not make"
    at.pilot.count(SECOND, 0.0, 0.0, has_its_part=True)
    assert at.run.done[-1] == ("wait for round", SECOND)
    at.tracker.ready_to_update_epoch = True
    at.pilot.count(GENESIS, 0.0, 0.0, has_its_part=True)
    assert len(at.run.done) == 2


def test_on_loan_it_closes_only_what_nothing_keeps_it_from(at: Piloted) -> None:
    at.swarm.called = True
    assert at.pilot.can_end(standing(), FIRST)
    changes: list[Callable[[], object]] = [
        lambda: setattr(at.swarm, "called", False),
        lambda: setattr(at.swarm, "tip", SECOND),
        lambda: setattr(at.swarm, "behind", SECOND),
        lambda: setattr(at.swarm, "rests_for", 5.0),
        lambda: at.pin(3, FIRST),
    ]
    for change in changes:
        before = dict(vars(at.swarm))
        change()
        assert not at.pilot.can_end(standing(), FIRST)
        vars(at.swarm).update(before)
    assert not at.pilot.can_end(standing(), GENESIS), "it counts for another epoch"
    assert at.pilot.can_end(standing(), FIRST)


def test_where_the_swarm_is(at: Piloted) -> None:
    assert (at.pilot.is_past(FIRST), at.pilot.is_past(GENESIS)) == (False, True)
    assert (at.pilot.is_called(FIRST), at.pilot.is_called(GENESIS)) == (False, True)
    at.swarm.called = True
    assert at.pilot.is_called(FIRST)


def test_to_begin_reports_even_where_the_run_has_begun(at: Piloted) -> None:
    at.tracker.error = Behind("others are at epoch 5")
    at.pilot.begin()
    at.tracker.error = Rejected("other terms")
    with pytest.raises(Rejected):
        at.pilot.begin()
    assert at.tracker.reports == [(0.0, 0.0)] * 2


def test_an_epoch_that_begins_from_another_state_restarts_the_clock(at: Piloted) -> None:
    at.pilot.count_from(SECOND)
    assert (at.tracker.began, at.tracker.restarts) == ([SECOND], 0)
    at.pilot.begin_again(FIRST)
    assert (at.tracker.began, at.tracker.restarts) == ([SECOND, FIRST], 1)


# -- how many are here


def test_it_waits_for_the_least_number_of_peers(caplog: pytest.LogCaptureFixture) -> None:
    assert not Piloted().pilot.few_are_here()
    at = Piloted(min_peers=3)
    at.run.here = 2
    assert at.pilot.few_are_here()
    assert not at.pilot.are_enough_here()
    assert at.run.done == [("wait for contributors", 3, 3.0), ("wait for contributors", 3, 0.0)]
    assert "2 peers are here, and min_peers=3" in caplog.text
    assert at.run.faults.so_far()[0] == {FaultKind.TOO_FEW: 1}
    at.run.here = 3
    assert not at.pilot.few_are_here()
    assert at.pilot.are_enough_here()
    of_share = Piloted(min_peers=0.6)
    of_share.swarm.peer.participant.at.contributed, of_share.run.here = 4, 2
    assert of_share.pilot.few_are_here()
    assert "min_peers=0.6 of 4 in the last epoch, which is 3" in caplog.text


# -- the round


def joined(at: Piloted, **given: Any) -> Ended | None:
    return at.pilot.round(brought(FIRST, **given), lambda begin, send, fault: None)  # type: ignore[arg-type,return-value]


def test_a_round(at: Piloted) -> None:
    loss = Loss(2.0, LossKind.NUMBER)
    outcome = outcome_of(FIRST, loss=loss)
    at.run.outcomes = [outcome]
    ended = joined(at, loss=loss, digest=KEYS[4])
    next_tip = outcome.commit.next_tip
    assert ended == Ended(next_tip, b"lr of most", loss, False, used=True, is_unlike=False, is_alone=False)
    assert (at.pilot.averaged.tip, at.pilot.averaged.outcome) == (next_tip, outcome)
    (given,) = at.run.contributions
    assert (given.weight, given.tip, given.machine, given.state) == (8.0, FIRST, "cpu", KEYS[4])
    assert (given.options, given.loss, given.patience) == (b"lr", loss, 3.0)
    assert at.pilot.last_options == b"lr of most"


def test_a_round_that_this_peer_has_missed_or_brought_nothing_to(at: Piloted) -> None:
    at.run.outcomes = [outcome_of(FIRST, first=1), outcome_of(FIRST, (0.0, 8.0))]
    for _ in range(2):
        ended = joined(at)
        assert ended is not None
        assert not ended.used


def test_a_round_that_fails_is_tried_again_until_it_is_too_late(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.run.outcomes = [AveragingError("a member was lost"), AveragingError("another"), outcome_of(FIRST)]
    assert joined(at) is not None
    assert caplog.text.count("trying again") == 2
    assert at.run.faults.so_far()[0] == {FaultKind.ROUND: 2}
    for error in (Behind("others are at epoch 5"), Rejected("other terms")):
        at.run.outcomes = [error]
        with pytest.raises(type(error)):
            joined(at)
    at.run.outcomes, at.run.is_over = [AveragingError("the run was left")], True
    assert joined(at) is None


def test_alone_it_goes_on_with_its_own(at: Piloted, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 61.0, 61.0])
    monkeypatch.setattr("shoal.optim.pilot.time.monotonic", lambda: next(clock))
    at.run.outcomes = [AveragingError("nobody answers")]
    ended = joined(at)
    assert ended is not None
    assert (ended.options, ended.used, ended.is_alone, ended.with_state) == (b"lr", True, True, False)
    assert ended.tip == at.swarm.tip != FIRST
    assert (ended.tip.epoch, ended.tip.samples) == (2, FIRST.samples + 8.0)
    assert at.pilot.averaged.outcome is None
    assert at.run.faults.so_far()[0] == {FaultKind.ALONE: 1}


def test_two_that_go_on_alone_have_unlike_tips(at: Piloted) -> None:
    tips = []
    for _ in range(2):
        at.swarm.tip, at.run.outcomes = FIRST, [Unusable("the vector is too large")]
        ended = joined(at)
        assert ended is not None
        tips.append(ended.tip)
    assert tips[0] != tips[1]


def test_progress_of_a_round_gives_it_more_time(at: Piloted, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 61.0, 70.0, 140.0, 140.0])
    monkeypatch.setattr("shoal.optim.pilot.time.monotonic", lambda: next(now))
    at.swarm.got_on_at = 50.0
    at.run.outcomes = [AveragingError("a member was lost"), AveragingError("another")]
    ended = joined(at)
    assert ended is not None
    assert ended.is_alone
    assert len(at.run.contributions) == 2


def test_a_round_that_it_can_not_use_is_not_tried_again(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        at.swarm.tip, at.run.outcomes = FIRST, [Unusable("options that it can't have")]
        ended = joined(at)
        assert ended is not None
        assert (ended.is_alone, ended.options) == (True, b""), "and with its own options"
    levels = [record.levelname for record in caplog.records if "going on with this peer's own" in record.message]
    assert levels == ["ERROR"], "the second time at INFO"


def test_it_does_not_go_on_alone_without_samples_or_with_too_few(caplog: pytest.LogCaptureFixture) -> None:
    for min_peers, samples, why in ((1, 0.0, "this peer has no gradients of its own"), (2, 8.0, "min_peers=2")):
        at = Piloted(min_peers=min_peers)
        at.swarm.tip, at.run.outcomes = FIRST, [Unusable("nobody answers")]
        assert joined(at, samples=samples) is None
        assert f"and {why}: the next step tries again" in caplog.text
        assert at.swarm.tip == FIRST


def test_it_does_not_go_on_alone_where_the_swarm_has_gone_on(at: Piloted) -> None:
    at.run.outcomes, at.swarm.missed = [Unusable("nobody answers")], True
    assert joined(at) is None


def test_an_outcome_that_a_signal_handler_has_kept_from_the_round(at: Piloted) -> None:
    assert at.pilot.unused(brought(FIRST)) is None
    at.run.unused = outcome_of(FIRST)
    ended = at.pilot.unused(brought(FIRST))
    assert ended is not None
    assert ended.tip == at.run.unused.commit.next_tip


def test_whether_another_state_may_have_its_contribution(at: Piloted) -> None:
    assert not at.pilot.may_be_in(FIRST)
    assert at.pilot.last_options == b""
    outcome = outcome_of(FIRST)
    at.run.begins, at.run.outcomes = outcome.begin, [Behind("others are at epoch 5")]
    with pytest.raises(Behind):
        joined(at)
    assert (at.pilot.may_be_in(FIRST), at.pilot.may_be_in(SECOND)) == (True, False)
    at.swarm.peer.participant.over = outcome.begin.round
    assert not at.pilot.may_be_in(FIRST), "it has heard of its end"


# -- peers that are unlike


def test_another_average_than_most_have(at: Piloted) -> None:
    mine, theirs = b"m" * 32, b"t" * 32
    names = [mine, theirs, theirs]
    at.run.outcomes = [outcome_of(FIRST, (8.0, 8.0, 8.0), averages=names)]
    ended = joined(at, average=mine)
    assert ended is not None
    assert ended.is_unlike
    assert at.pilot.averaged.donors == (PeerID(KEYS[1]), PeerID(KEYS[2]))
    assert at.run.contributions[0].average == mine
    at.run.outcomes = [outcome_of(FIRST, (8.0, 9.0), averages=names), outcome_of(FIRST, (9.0, 8.0), averages=names)]
    found = [joined(at, average=mine) for _ in range(2)]
    assert [each is not None and each.is_unlike for each in found] == [True, False], "of equally many: more samples"
    assert at.run.faults.so_far()[0] == {FaultKind.UNLIKE: 2}


STATES = (b"a" * 32, b"b" * 32, b"b" * 32)


def test_another_state_than_peers_that_compute_alike(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.run.outcomes = [outcome_of(FIRST, (8.0, 8.0, 8.0), states=STATES)]
    ended = joined(at, digest=STATES[0])
    assert ended is not None
    assert ended.is_unlike
    assert at.pilot.averaged.donors == (PeerID(KEYS[1]), PeerID(KEYS[2]))
    assert "differ from those of peers that compute alike: downloading the state" in caplog.text
    unlike = ("cpu", "gpu", "gpu")
    for given in ({"machines": unlike}, {"with_state": True}):
        at.run.outcomes = [outcome_of(FIRST, (8.0, 8.0, 8.0), states=STATES, **given)]  # type: ignore[arg-type]
        ended = joined(at, digest=STATES[0])
        assert ended is not None
        assert not ended.is_unlike


def test_at_the_start_all_are_compared_and_nobody_is_told(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.swarm.tip = GENESIS
    unlike = ("cpu", "gpu", "gpu")
    at.run.outcomes = [outcome_of(GENESIS, (8.0, 8.0, 8.0), states=STATES, machines=unlike)]
    ended = at.pilot.round(brought(GENESIS, digest=STATES[0]), lambda *given: None)  # type: ignore[arg-type,return-value]
    assert ended is not None
    assert ended.is_unlike
    assert not caplog.messages


@pytest.mark.parametrize(("tip", "digest", "is_unlike"), [
    (GENESIS, STATES[0], True), (GENESIS, STATES[1], False), (GENESIS, b"", False), (FIRST, STATES[0], False),
])  # fmt: skip
def test_who_has_missed_the_first_round_is_compared_too(at: Piloted, tip: Tip, digest: bytes, is_unlike: bool) -> None:
    """Without that, it would make the step from the parameters with which it alone has begun."""
    at.swarm.tip = tip
    at.run.outcomes = [outcome_of(tip, (8.0, 8.0), first=1, states=STATES[1:])]
    ended = at.pilot.round(brought(tip, digest=digest), lambda *given: None)  # type: ignore[arg-type,return-value]
    assert ended is not None
    assert ended.is_unlike is is_unlike
    assert at.pilot.averaged.donors == ((PeerID(KEYS[1]), PeerID(KEYS[2])) if is_unlike else ())


def test_a_difference_soon_after_a_download_makes_it_rest(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.pilot.arrived(FIRST, [], whole=True, lossy=False)
    at.run.outcomes = [outcome_of(FIRST, (8.0, 8.0, 8.0), states=STATES)]
    joined(at, digest=STATES[0])
    assert "SGD keeps something outside of its state_dict" in caplog.text
    assert at.pilot.hidden.rests(time.monotonic())


def test_options_of_which_it_knows_the_hash_only(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.run.outcomes = [outcome_of(FIRST, (8.0, 8.0, 0.0))]
    ended = joined(at, unknown_of=lambda options: "betas")
    assert ended is not None
    assert ended.is_unlike
    assert at.pilot.averaged.donors == (PeerID(KEYS[1]), PeerID(KEYS[2]))
    assert "betas of the parameter groups differs" in caplog.text


def test_a_round_that_took_long_is_told_of_once(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.run.outcomes = [outcome_of(FIRST, seconds=seconds) for seconds in (59.0, 61.0, 62.0)]
    for _ in range(3):
        joined(at)
    assert caplog.text.count("a round of 2 peers took 61 s") == 1
    assert "took 62 s" not in caplog.text


# -- after the round


def test_the_report_of_an_epoch(at: Piloted) -> None:
    outcome = outcome_of(FIRST)
    at.run.outcomes = [outcome]
    joined(at)
    at.pilot.ended(b"d" * 32, step_seconds=0.25, norm=3.0, cost=Cost(1000, 2000, 4.0))
    (report,) = at.events
    assert report == EpochReport(
        epoch=2,
        samples=16.0,
        num_peers=2,
        coordinator=str(PeerID(ME)),
        round_seconds=6.5,
        matchmaking_seconds=0.5,
        allreduce_seconds=6.0,
        bytes_sent=1100,
        bytes_received=2200,
        state_digest=(b"d" * 32).hex(),
        tip=str(outcome.commit.next_tip),
        waiting_seconds=1.5,
        step_seconds=0.25,
        grad_norm=3.0,
        own_samples=8.0,
    )
    assert not at.pilot.arrived(SECOND, [PeerID(KEYS[1])], whole=True, lossy=False), "they have made it together"


def test_alone_there_is_no_report(at: Piloted) -> None:
    at.run.outcomes = [Unusable("nobody answers")]
    joined(at)
    at.pilot.ended(b"d" * 32, step_seconds=0.25, norm=None, cost=Cost())
    assert at.events == []


def test_what_is_not_finite_is_a_fault_whether_it_is_told_or_not(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.pilot.tell_not_finite("gradients", "it joins without them", loudly=True)
    at.pilot.tell_not_finite("gradients", "it joins without them", loudly=False)
    assert caplog.text.count("this peer's gradients are not finite (NaN or infinity): it joins without them") == 1
    assert at.run.faults.so_far()[0] == {FaultKind.NOT_FINITE: 2}


# -- another state


def test_when_it_replays(at: Piloted) -> None:
    at.swarm.behind, at.swarm.can_replay = SECOND, True
    assert at.pilot.may_replay(standing())
    assert not at.pilot.may_replay(standing(GENESIS)), "each peer may have begun with parameters of its own"
    assert at.pilot.replays(standing())
    assert not at.pilot.replays(standing(GENESIS)), "the swarm is elsewhere"
    at.swarm.can_replay = False
    assert not at.pilot.may_replay(standing())
    assert not at.pilot.replays(standing()), "nobody brings the next round"
    at.swarm.can_replay, at.swarm.behind = True, None
    assert not at.pilot.may_replay(standing())
    assert not at.pilot.replays(standing())
    at.swarm.missed = True
    assert at.pilot.replays(standing()), "it has heard of the last round that it misses"
    with at.pilot.replaying():
        assert at.run.done == ["loading", "replay"]
    assert at.run.done[-1] == "loaded"


def test_a_suspected_optimizer_does_not_replay(at: Piloted) -> None:
    at.swarm.behind, at.swarm.can_replay = SECOND, True
    at.pilot.hidden.has_loaded(whole=True)
    at.pilot.hidden.differs(0.0)
    assert not at.pilot.may_replay(standing())


def test_after_a_download_that_brought_nothing_it_pauses(at: Piloted, caplog: pytest.LogCaptureFixture) -> None:
    at.run.others, at.swarm.behind = [PeerID(KEYS[1])], SECOND
    assert not at.pilot.pause(FIRST, time.monotonic(), None)
    assert at.run.done == [("ask", [PeerID(KEYS[1])])]
    assert (len(at.swarm.forgot), caplog.messages) == (1, [])
    assert not at.pilot.pause(FIRST, time.monotonic() - 10.0, AveragingError("the donor has left"))
    assert at.swarm.forgot[1] >= 10.0
    assert "the donor has left. This peer keeps its own; it goes on training" in caplog.text
    assert "tries again in 7 s" in caplog.text
    assert at.run.faults.so_far()[0] == {FaultKind.DOWNLOAD: 1}


def test_it_stays_at_its_own_state_where_the_swarm_has_another(at: Piloted) -> None:
    at.swarm.tip = SECOND
    assert not at.pilot.pause(FIRST, time.monotonic(), None)
    assert at.swarm.tip == SECOND
    assert at.pilot.pause(FIRST, time.monotonic(), AveragingError("the donor has left"))
    assert at.swarm.tip == FIRST


@pytest.mark.parametrize(("again", "told"), [(20.0, "in 20 s"), (1e9, "in 600 s")])
def test_a_newcomer_that_does_not_fit_asks_again(
    at: Piloted, again: float, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    at.pilot.pause(FIRST, time.monotonic(), DoesNotFit("an epoch is shorter", again))
    assert f"it brings no samples, and tries again {told}" in caplog.text
    assert not at.swarm.forgot


def test_a_newcomer_for_which_there_is_no_time_waits_for_an_offer(
    at: Piloted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at.swarm, "forget_behind", lambda cost: math.inf)
    at.pilot.pause(FIRST, time.monotonic(), AveragingError("nobody may send it"))
    assert "tries again when others offer one" in caplog.text


# -- an auxiliary peer


def test_an_auxiliary_peer_assists(at: Piloted) -> None:
    at.swarm.called = True
    assert at.pilot.catch_up() == FIRST
    assert (at.tracker.began, at.tracker.reports) == ([FIRST], [(0.0, 0.0)])
    at.run.outcomes = [outcome_of(FIRST), AveragingError("no round"), Rejected("other terms")]
    assert at.pilot.assist(lambda *given: None) == at.pilot.averaged.tip  # type: ignore[arg-type,return-value]
    assert (at.run.contributions[0].weight, at.run.contributions[0].tip) == (0.0, None)
    assert at.pilot.assist(lambda *given: None) is None  # type: ignore[arg-type,return-value]
    with pytest.raises(Rejected):
        at.pilot.assist(lambda *given: None)  # type: ignore[arg-type,return-value]
    at.swarm.called = False
    assert at.pilot.catch_up() is None
    at.tracker.error = AveragingError("nobody is here")
    assert at.pilot.catch_up() is None
    at.tracker.error = Rejected("other terms")
    with pytest.raises(Rejected):
        at.pilot.catch_up()
