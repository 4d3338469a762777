from dataclasses import replace

import msgspec

from distdiag.checks.hng.held_gil import HeldGil
from tests.checks.streams import Job, kernel
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import findings


def holding_job(tmp_path, observed):
    job = stuck_job(tmp_path, gil_held=True, observed=observed)
    seen = job.states[1].stacks
    threads = tuple(msgspec.structs.replace(thread, holds_gil=True) for thread in seen.threads)
    job.states[1] = replace(job.states[1], stacks=msgspec.structs.replace(seen, threads=threads))
    return job


def test_a_rank_whose_thread_holds_the_gil_is_named_with_its_line(tmp_path):
    job = holding_job(tmp_path, kernel(1, "read", "pipe:[1]"))
    assert "holds the GIL" in assert_alone_and_right(job, "HNG006").message


def test_a_process_that_was_stopped_while_it_held_the_gil_is_stopped(tmp_path):
    assert_alone_and_right(holding_job(tmp_path, kernel(1, state="T")), "HNG012")


def test_all_ranks_can_hold_their_own():
    job = Job()
    job.every()
    job.set(0, 1, idle_s=31.0, gil_held=True, last_call_state="waited")
    (finding,) = findings(HeldGil, job.view())
    assert finding.ranks == job.world


def test_a_background_thread_that_runs_shows_that_the_gil_is_free(tmp_path):
    job = stuck_job(tmp_path, gil_held=False, observed=kernel(1, "read", "pipe:[1]"))
    assert_left_to(job, "HNG013")
