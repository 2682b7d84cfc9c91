"""How many of its cases `make test` runs of a test that takes seconds and has many. `make test-more` runs the others,
and so does `make soak`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

FEW = {  # test: how many cases, evenly spaced, the last one among them
    "tests/averaging/test_error_feedback.py::test_what_was_lost_comes_back": 3,
    "tests/averaging/test_error_feedback.py::test_without_feedback_it_grows_with_every_round": 1,
    "tests/averaging/test_error_feedback_kill.py::test_a_reducer_that_is_killed_costs_no_more_than_a_round": 0,
    "tests/cluster/test_cases.py::test_a_rank_that_can_not_make_its_optimizer_tells_the_others": 1,
    "tests/cluster/test_cases.py::test_a_rank_whose_training_an_error_ends_says_which": 1,
    "tests/cluster/test_cases.py::test_an_optimizer_that_was_shut_down_has_its_state": 1,
    "tests/cluster/test_cases.py::test_rank_0_calls_its_hooks_and_each_rank_those_of_its_strands": 1,
    "tests/cluster/test_cases.py::test_what_rank_0_refuses_in_another_call_is_heard": 1,
    "tests/cluster/test_clusters.py::test_a_killed_rank_ends_its_cluster_by_name_and_the_others_go_on": 1,
    "tests/cluster/test_clusters.py::test_ranks_have_the_bits_of_rank_0_in_every_mode": 1,
    "tests/cluster/test_clusters.py::test_tensor_parallel_ranks_count_their_samples_once": 1,
    "tests/cluster/test_clusters.py::test_two_clusters_of_four_ranks": 0,
    "tests/cluster/test_strand_checkpoints.py::test_a_lone_process_goes_on_from_epoch_0": 0,
    "tests/cluster/test_strand_checkpoints.py::test_ddp_goes_on_as_fsdp": 1,
    "tests/cluster/test_strand_checkpoints.py::test_it_goes_on_as_if_there_had_been_no_end": 1,
    "tests/cluster/test_strands.py::test_ranks_hold_and_carry_the_same_numbers": 1,
    "tests/cluster/test_strands_in_runs.py::test_a_checkpoint_goes_on_in_a_cluster_of_another_kind": 1,
    "tests/cluster/test_strands_in_runs.py::test_a_cluster_of_other_ranks_goes_on_with_the_state_of_the_others": 0,
    "tests/cluster/test_strands_in_runs.py::test_a_peer_with_other_kernels_is_refused_by_name": 0,
    "tests/flat/test_contiguous_copies.py::test_a_compiled_step": 1,
    "tests/flat/test_contiguous_guide.py::test_it_is_found_or_not_as_the_table_says": 3,
    "tests/flat/test_contiguous_missing_gradients.py::test_unused_layers_are_skipped_and_have_step_counts_of_their_own": 2,  # noqa: E501
    "tests/flat/test_contiguous_recurrent.py::test_assigned_values_are_trained": 1,
    "tests/flat/test_kernels.py::test_fused_steps_are_the_same_bits_with_any_number_of_threads": 3,
    "tests/flat/test_modes.py::test_flat_memory_is_made_of_plain_tensors": 1,
    "tests/functional/test_parity.py::test_the_same_kernel_gives_the_same_bits": 10,
    "tests/integrations/test_equivalence.py::test_two_peers_train_what_one_process_does": 1,
    "tests/integrations/test_examples.py::test_two_processes_train_together": 1,
    "tests/integrations/test_imports.py::test_a_missing_framework_is_named_with_its_extra": 1,
    "tests/integrations/test_last_round.py::test_a_peer_that_misses_the_last_round_takes_over_the_last_state": 0,
    "tests/integrations/test_last_round.py::test_what_a_callback_puts_into_the_model_at_the_end_is_taken_over_by_nobody": 0,  # noqa: E501
    "tests/integrations/test_newcomer.py::test_a_newcomer_goes_on_where_the_run_is": 0,
    "tests/integrations/test_ranks.py::test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_two": 0,
    "tests/integrations/test_ranks.py::test_an_error_of_one_rank_is_heard_by_name": 1,
    "tests/integrations/test_ranks.py::test_several_processes_without_a_cluster_are_refused": 1,
    "tests/integrations/test_transformers.py::test_an_optimizer_and_a_scheduler_of_the_user_are_kept": 1,
    "tests/integrations/test_transformers.py::test_peers_see_the_data_in_unlike_orders": 1,
    "tests/integrations/test_transformers.py::test_who_watches_is_told_the_loss": 1,
    "tests/monitor/test_watcher.py::test_a_killed_client_is_lost_within_ten_seconds_too": 0,
    "tests/optim/test_alike.py::test_ranks_have_the_same_kind_of_scheduler": 1,
    "tests/optim/test_as_saved.py::test_an_option_that_state_dicts_leave_out_stays": 1,
    "tests/optim/test_assigned_groups.py::test_as_in_torch": 24,
    "tests/optim/test_assigned_groups.py::test_parameters_that_change_in_place_are_refused_by_the_next_epoch": 10,
    "tests/optim/test_averagers_killed.py::test_survivors_of_a_step_agree": 1,
    "tests/optim/test_closed_runs.py::test_a_hundred_strangers_at_once_cost_little": 0,
    "tests/optim/test_complex.py::test_it_is_refused_by_name_in_every_mode": 4,
    "tests/optim/test_download_pause.py::test_donors_that_do_not_share": 1,
    "tests/optim/test_draws_of_delays.py::test_after_an_error_at_any_place_ranks_train_on_or_are_told_to_load": 5,
    "tests/optim/test_draws_of_delays.py::test_all_end_as_without_delays": 28,
    "tests/optim/test_draws_of_delays.py::test_an_error_of_one_rank_at_each_exchange_is_an_error_of_all": 1,
    "tests/optim/test_equivalence.py::test_one_peer_alone_is_bit_equal_to_torch_with_its_fused_kernel": 1,
    "tests/optim/test_eval_mode.py::test_a_checkpoint_of_either_mode": 2,
    "tests/optim/test_eval_mode.py::test_eval_changes_the_model_and_nothing_else": 3,
    "tests/optim/test_frozen.py::test_a_newcomer_downloads_what_is_trained": 2,
    "tests/optim/test_kept_without_disk.py::test_it_stays_in_memory_and_a_file_from_before_on_the_disk": 4,
    "tests/optim/test_kernels.py::test_steps_are_fused_unless_another_kernel_was_chosen": 3,
    "tests/optim/test_kinds_of_options.py::test_a_newcomer_gets_the_state_and_both_step_alike": 3,
    "tests/optim/test_learning_rates.py::test_a_peer_that_differs_steps_with_the_others_and_says_so_once": 2,
    "tests/optim/test_memberships.py::test_a_function_that_never_returns_does_not_hold_up_the_end_of_the_process": 0,
    "tests/optim/test_modes.py::test_a_newcomer_that_evaluates_downloads_and_trains": 6,
    "tests/optim/test_modes.py::test_an_optimizer_trains_in_each_mode_as_in_none": 30,
    "tests/optim/test_no_memory.py::test_all_memory_is_there_before_anything_changes": 4,
    "tests/optim/test_old_checkpoints.py::test_it_goes_on_as_torch_does": 26,
    "tests/optim/test_outer.py::test_clipped_steps_of_the_anchor_have_the_same_bits_with_other_instructions": 0,
    "tests/optim/test_pins.py::test_a_pin_that_rewinds_leads_back_to_a_checkpoint": 0,
    "tests/optim/test_refusals.py::test_a_peer_with_other_options_is_refused_by_name": 1,
    "tests/optim/test_replay.py::test_a_newcomer_that_is_epochs_late_replays_them": 5,
    "tests/optim/test_reused_delayed.py::test_the_average_of_equal_gradients_is_that_gradient": 1,
    "tests/optim/test_runs_in_turn.py::test_no_peer_waits_for_one_that_waits_in_the_other_run": 4,
    "tests/optim/test_state_averager.py::test_steps_and_rounds_of_every_kind": 2,
    "tests/optim/test_state_dict_hooks.py::test_no_download_and_no_kept_state_calls_any": 1,
    "tests/optim/test_state_dict_hooks.py::test_nor_with_an_outer_optimizer": 2,
    "tests/optim/test_strand_state.py::test_a_drift_comes_back": 1,
    "tests/optim/test_strand_state.py::test_what_is_loaded_stays_the_callers": 1,
    "tests/optim/test_strand_state.py::test_without_an_anchor_the_outer_optimizer_begins_anew": 0,
    "tests/optim/test_together.py::test_it_is_the_two_side_by_side": 4,
    "tests/optim/test_wishes.py::test_the_averaged_gradient_is_clipped": 1,
    "tests/optim/test_written_in_any_order.py::test_training_goes_as_with_plain_torch": 2,
    "tests/p2p/test_lanes.py::test_lanes_that_end_in_the_middle_leave_nothing": 1,
    "tests/p2p/test_succession_cut.py::test_a_cut_loses_the_peer_or_nothing": 6,
    "tests/repository/test_defaults.py::test_torchs_defaults_change_nothing": 2,
    "tests/repository/test_guard.py::test_run_fails_when_something_is_left": 3,
    "tests/simulation/test_deadlines.py::test_a_coordinator_that_misses_a_deadline_is_replaced": 6,
    "tests/simulation/test_error_feedback.py::test_a_kill_at_any_moment_leaves_the_right_residuals": 8,
    "tests/simulation/test_faults.py::test_trainers_come_together_again": 2,
    "tests/simulation/test_joining.py::test_a_download_that_takes_a_hundred_epochs_is_awaited_once": 1,
    "tests/simulation/test_newcomer.py::test_a_newcomer_is_in_the_round_after_its_download": 2,
    "tests/simulation/test_newcomer.py::test_a_newcomer_whose_download_takes_longer_than_an_epoch_is_awaited": 1,
    "tests/simulation/test_sweep.py::test_a_newcomer_who_is_alone_with_a_liar_does_not_end": 1,
    "tests/simulation/test_sweep.py::test_who_is_cut_off_with_a_liar_is_not_refused_by_the_run": 2,
    "tests/soak/test_chaos.py::test_trainers_that_are_killed_stopped_and_started": 0,
}


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Mark the other cases of these tests as `long`, and as `more`."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, few in FEW.items():
        count = len(cases[test])
        kept = {count * (number + 1) // few - 1 for number in range(few)} if few else set()
        for number, item in enumerate(cases[test]):
            if number not in kept:
                item.add_marker(pytest.mark.long)
                item.add_marker(pytest.mark.more)
