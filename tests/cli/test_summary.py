"""What a run amounts to: numbers from what the peers told, and every reason for an exit code that is not 0."""

from __future__ import annotations

import pytest

from shoal.cli.demo.messages import Downloaded, Evaluated
from shoal.cli.demo.settings import ENOUGH_EPOCHS
from shoal.cli.demo.summary import summarise
from tests.cli.runs import EPOCHS, committed, good_run, settings


def test_a_good_run_has_no_problem() -> None:
    summary = summarise(good_run(), settings())
    assert summary.problems == []
    assert summary.digests_equal
    assert (summary.epochs, summary.epochs_compared) == (EPOCHS, EPOCHS)
    assert (summary.loss_before, summary.loss_after, summary.bigram_loss) == (4.6, 1.6, 2.4)


def test_times() -> None:
    summary = summarise(good_run(), settings())
    assert summary.median_epoch_seconds == pytest.approx(1.0)
    assert summary.median_round_seconds == pytest.approx(0.2)
    assert summary.median_round_bytes == pytest.approx(16e6)
    assert summary.recovery_seconds == pytest.approx(109.6 - 108.1)
    assert summary.catch_up_seconds == pytest.approx(117.04 - 115)
    assert summary.catch_up_after_start_seconds == pytest.approx(117.04 - 112)
    assert summary.total_seconds == pytest.approx(30)


def test_recovery_ignores_late_reports_of_the_epoch_before_the_kill() -> None:
    record = good_run()
    for index in (0, 1, 2):
        record.peers[index].committed[8] = committed(8, at=108.3)
    assert record.peers[3].committed[8].at < 108.1
    assert summarise(record, settings()).recovery_seconds == pytest.approx(109.6 - 108.1)


def test_different_digests_are_a_problem() -> None:
    record = good_run()
    record.peers[3].committed[5] = committed(5, 105.03, "another")
    summary = summarise(record, settings())
    assert not summary.digests_equal
    assert summary.problems == ["in epoch 5 4 peers had 2 different states"]


def test_a_failure_is_a_problem() -> None:
    record = good_run()
    record.failures.append("peer 1 ended with exit code 1: boom")
    assert summarise(record, settings()).problems == ["peer 1 ended with exit code 1: boom"]


@pytest.mark.parametrize(("epochs", "enough"), [(ENOUGH_EPOCHS - 1, False), (ENOUGH_EPOCHS, True)])
def test_a_loss_that_is_not_below_the_bigram_models_is_a_problem_where_there_was_time(
    epochs: int, enough: bool
) -> None:
    record = good_run()
    record.evaluations[-1] = Evaluated(epoch=epochs, held_out_loss=2.4)
    summary = summarise(record, settings(epochs=epochs))
    (said,) = summary.problems + summary.unreached
    assert "2.400 is not below the bigram model's 2.400" in said
    assert bool(summary.problems) == enough
    assert said.endswith("it takes some 60 epochs") == (not enough)


def test_a_loss_of_an_earlier_epoch_does_not_count_as_the_last() -> None:
    record = good_run()
    record.evaluations[-1] = Evaluated(epoch=EPOCHS - 1, held_out_loss=1.6)
    summary = summarise(record, settings())
    assert summary.loss_after is None
    assert summary.problems == ["the held-out loss at the end was not measured"]


def test_a_kill_that_never_happened_is_a_problem_only_when_it_was_asked_for() -> None:
    record = good_run()
    record.peers[3].killed_at = None
    assert "no peer was killed" in summarise(record, settings()).problems[0]
    assert summarise(record, settings(kill=False)).problems == []


def test_no_epoch_after_the_kill_is_a_problem() -> None:
    record = good_run()
    record.peers[3].killed_at = 200.0
    assert "no epoch was committed after the kill" in summarise(record, settings()).problems


def test_a_newcomer_that_never_takes_part_is_a_problem_where_there_was_time() -> None:
    record = good_run()
    record.peers[4].committed.clear()
    summary = summarise(record, settings())
    assert summary.problems == []
    assert summary.unreached == ["the newcomer, peer 4, committed no epoch; it takes some 60 epochs"]
    record.evaluations[-1] = Evaluated(epoch=ENOUGH_EPOCHS, held_out_loss=1.6)
    summary = summarise(record, settings(epochs=ENOUGH_EPOCHS))
    assert summary.problems == ["the newcomer, peer 4, committed no epoch"]
    assert summary.unreached == []
    record.newcomer = None
    assert "no newcomer was started" in summarise(record, settings()).problems[0]


def test_peers_that_each_train_alone_are_a_problem() -> None:
    record = good_run()
    for index in (1, 2, 3):
        record.peers[index].committed.clear()
    record.peers[0].committed = {epoch: committed(epoch, 100.0 + epoch) for epoch in range(10)}
    assert "no epoch was committed by more than one peer" in summarise(record, settings()).problems


def test_a_run_in_which_nothing_happened_has_no_numbers_but_problems() -> None:
    record = good_run()
    record.peers.clear()
    record.evaluations.clear()
    record.newcomer = None
    summary = summarise(record, settings())
    assert summary.median_round_seconds is None
    assert summary.recovery_seconds is None
    assert len(summary.problems) == 4
    assert summary.unreached == []


def test_a_downloaded_state_counts_as_one_of_its_epoch() -> None:
    record = good_run()
    record.hear(4, Downloaded(epoch=16, seconds=0.1, bytes=4, donors=2, state_digest="digest 16"))
    assert summarise(record, settings()).problems == []
    record.hear(4, Downloaded(epoch=15, seconds=0.1, bytes=4, donors=2, state_digest="spoilt"))
    assert summarise(record, settings()).problems == ["in epoch 15 4 peers had 2 different states"]
