"""
The faults that plant.py plants. No tool makes such faults: files written in the wrong order, a
missing fsync, a race, a wrong unit or a swapped rank. mutmut makes the others (CONTRIBUTING.md).
"""

from typing import NamedTuple


class Fault(NamedTuple):
    what: str  # what a user would meet
    file: str
    function: str  # Class.method for a method
    old: str  # text that the function contains once
    new: str
    test: str  # a file in tests/ and the test in it that must fail


# Three lines for each fault: what, file and function; old and new text; the test
TABLE = r"""
a file gets its name before its bytes are on the disk | common/files.py | replacing
    os.fsync(file.fileno()) -> pass
    integration/test_disks.py::test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards
the new name is not on the disk when the run goes on | common/files.py | replacing
    fsync_folder(path.parent) -> pass
    integration/test_disks.py::test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards
fsync comes before flush | common/files.py | replacing
    file.flush()\n            os.fsync(file.fileno()) -> os.fsync(file.fileno())\n            file.flush()
    integration/test_disks.py::test_a_save_syncs_the_file_before_renaming_it_and_the_folder_afterwards
a save that failed counts as the best on the disk | train.py | main
    if save(state, stop, saver, signals, log):\n                    progress = to_save -> progress = to_save\n                if save(state, stop, saver, signals, log):
    integration/test_disks.py::test_best_pt_holds_the_best_model_that_could_be_saved[True]
damaged checkpoints count among the newest | training/checkpoint.py | Saver.claim_here
    set_aside(path) -> pass
    integration/test_disks.py::test_a_kill_before_a_disk_call_loses_only_the_iterations_since_the_last_save[2-6-keys1-4]
old checkpoints are deleted only after the save | training/checkpoint.py | Saver.write
    self.prune(max(1, self.keep - 1)) -> pass
    integration/test_disks.py::test_a_run_fits_in_the_disk_space_that_the_docs_name[True-True]
records that a full disk refused are lost | training/checkpoint.py | Saver.write_record
    self.unwritten["metrics.jsonl"] += json.dumps -> self.unwritten["metrics.jsonl"] = json.dumps
    integration/test_disks.py::test_a_run_trains_on_while_the_disk_is_full_and_saves_again_when_there_is_room[before-0]
a cut record is completed where the file does not end | training/checkpoint.py | Saver.append
    "ab" -> "r+b"
    test_checkpoint.py::test_writes_every_record_whole_after_the_disk_was_full
two runs write to one folder on a share without locks | training/checkpoint.py | Saver.has_lock
    is_same and held.st_size == len(self.mark) -> is_same
    integration/test_disks.py::test_a_run_ends_in_one_line_if_another_one_has_taken_its_folder[False]
a disk without links has no best.pt | training/checkpoint.py | link
    except OSError: -> except FileNotFoundError:
    integration/test_disks.py::test_a_run_fits_in_the_disk_space_that_the_docs_name[True-False]
the manifest lists a shard before it is written | data/writer.py | write_shards
    in [*parts]: -> in [write_manifest(plan.folder, manifest), *parts][1:]:
    test_prepare.py::test_a_killed_preparation_continues_to_the_same_bytes
documents come in the order of the threads | data/writer.py | encode
    pending.popleft() -> pending.pop()
    test_prepare.py::test_shards_hold_every_document_once_in_the_order_of_the_shuffled_row_groups[parquet]
a child process outlives the run | common/child.py | end_with_parent.listen
    os._exit(1) -> pass
    integration/test_windows.py::test_a_child_process_sees_an_empty_stdin_and_ends_with_its_parent
Ctrl-C leaves the measured process behind | bench.py | run_train
    child.kill()\n                child.wait() -> pass
    test_bench.py::test_ctrl_c_kills_the_measured_process
a rank ends without leaving its group | training/ranks.py | end_process
    dist.destroy_process_group() -> pass
    integration/test_ranks.py::test_every_rank_destroys_its_process_group_at_exit_or_gives_up[the end]
a failed rank waits for ranks that hang | training/ranks.py | end_process
    if code: -> if False:
    integration/test_ranks.py::test_every_rank_destroys_its_process_group_at_exit_or_gives_up[an error, but the group hangs]
DDP arranges its buckets in the first iteration | training/ranks.py | arrange_buckets
    ddp_model.reducer.prepare_for_backward([]) -> return
    integration/test_ranks.py::test_gradients_are_exchanged_once_per_iteration_in_buckets_arranged_before_the_first
all ranks have one seed | train.py | main
    c.seed + ranks.rank -> c.seed
    integration/test_losses.py::test_each_rank_has_its_own_dropout_and_resumes_bit_for_bit
all ranks resume with the random state of rank 0 | train.py | restore
    resumed["rng"][rank] -> resumed["rng"][0]
    integration/test_losses.py::test_each_rank_has_its_own_dropout_and_resumes_bit_for_bit
only the random state of rank 0 is saved | train.py | state_to_save
    ranks.gather(hw.get_rng_states()) -> [hw.get_rng_states()]
    integration/test_losses.py::test_each_rank_has_its_own_dropout_and_resumes_bit_for_bit
the validation loss is of one rank | train.py | estimate_loss
    ranks.sum(*sums) -> sums
    integration/test_losses.py::test_two_ranks_train_like_one_process
a micro-batch with fewer targets counts as much as the others | train.py | train_step
    weights[micro_step] * model(x, y) -> model(x, y)
    integration/test_losses.py::test_masked_targets_count_equally_in_any_micro_batches_and_ranks
targets are counted on one rank | train.py | train_step
    torch.distributed.all_reduce(all_targets, group=model.process_group) -> pass
    integration/test_losses.py::test_masked_targets_count_equally_in_any_micro_batches_and_ranks
a measure changes the random numbers of training | train.py | measure
    hw.set_rng_states(states) -> pass
    integration/test_losses.py::test_measures_change_no_bit_of_training_and_end_no_run
a finished run's best.pt is not linked | train.py | main
    ranks.on_main(checkpoint.finish, Path(c.out_dir)) -> pass
    integration/test_disks.py::test_best_pt_that_did_not_fit_is_made_once_there_is_room
each rank follows its own clock | training/clock.py | Clock.position
    self.ranks.on_main(self.position_here, it) -> self.position_here(it)
    integration/test_time_limits.py::test_all_ranks_follow_the_clock_of_the_first
a maximum over ranks is a sum | training/ranks.py | Ranks.max
    , op=dist.ReduceOp.MAX -> (nothing)
    integration/test_ranks.py::test_what_ends_one_rank_ends_all_and_they_save_what_they_can[a signal to all]
the position in the data counts one rank | data/loader.py | Batches.take
    count * self.stride -> count * self.batch_size
    integration/test_losses.py::test_each_rank_has_its_own_dropout_and_resumes_bit_for_bit
float16 gradients are clipped before they are unscaled | train.py | train_step
    scaler.unscale_(optimizer) -> pass
    integration/test_losses.py::test_half_precision_losses_stay_close_to_float32
the logged norm is measured after clipping | train.py | train_step
    grad_clip, grad_norm) -> grad_clip, grad_norm)\n        grad_norm = torch.nn.utils.get_total_norm(gradients)
    integration/test_losses.py::test_a_run_logs_and_saves_what_a_second_trainer_computes[gpt2]
counting FLOPs changes the random state | training/speed.py | count_flops
    torch.random.fork_rng([]),  -> (nothing)
    test_hardware.py::test_counting_flops_keeps_the_random_state_of_a_model_that_seeds_itself
resumed moments hold a deleted checkpoint open | train.py | restore_optimizer
    moment.clone() -> moment
    integration/test_disks.py::test_a_resumed_run_frees_the_disk_space_of_the_checkpoint_it_started_from
a teraflop is 2**40 operations | training/hardware.py | Hardware.mfu
    1e12 -> 2**40
    integration/test_losses.py::test_each_second_is_counted_once_and_evaluations_and_saves_do_not_lower_the_speed[1]
the second signal names the end | training/ranks.py | StopSignals.receive
    self.received or number -> number
    integration/test_interrupts.py::test_a_process_that_is_killed_or_stopped_resumes_as_if_nothing_had_happened[Slurm's warning, its end]
"""  # noqa: E501


def read(table: str) -> list[Fault]:
    lines = iter([line.strip() for line in table.strip().splitlines()])
    found = []
    for head, change, test in zip(lines, lines, lines, strict=True):
        what, file, function = head.split(" | ")
        old, new = change.replace("\\n", "\n").split(" -> ")
        new = "" if new == "(nothing)" else new
        found.append(Fault(what, file, function, old, new, test))
    return found


FAULTS = read(TABLE)
