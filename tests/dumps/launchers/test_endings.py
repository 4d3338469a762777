"""What launchers, schedulers, containers and the kernel say of processes that ended."""

import pytest

from distdiag.dumps.launchers.endings import Endings
from tests.dumps.reading import read, text

TORCHRUN = "E0101 10:00:01.0 47 torch/distributed/elastic/multiprocessing/api.py:1002] failed"


def ends(*lines):
    """Return who ended and how: rank, local rank or name, then status and cause."""
    return [
        (
            next(each for each in (d.rank, d.local_rank, d.label) if each is not None),
            d.events[0].status,
            d.events[0].cause,
        )
        for d in read(Endings(), text(*lines))
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: node1: task 5: Out Of Memory", (5, -9, "out-of-memory")),
        ("srun: error: node1: task 5: Aborted (core dumped)", (5, -6, "")),
        ("srun: error: node1: task 5: Bus error", (5, -7, "")),
        ("12: srun: error: node1: task 5: Exited with exit code 2", (5, 2, "")),
        ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 7.",
         (3, 7, "")),
        ("Process 3 terminated with exit code 7", (3, 7, "")),
        ("trainer-2 exited with code 139", ("trainer-2", -11, "")),
        ("[  9.1] Out of memory: Killed process 4711 (python) total-vm:9kB",
         ("pid=4711", -9, "out-of-memory")),
        ("ERROR [executor.py:1] Worker proc VllmWorker-2 died unexpectedly, shutting down",
         (2, None, "")),
        ("Rank 3 scheduler is dead. Please check if there are relevant logs.", (3, None, "")),
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.", (2, -7, "")),
        ("Global rank 2 (PID 3473) exited with code -15", (2, -15, "")),
        ("Process 1 exit with status code 143.", (1, -15, "")),
        ("=   PID 9665 RUNNING AT node0\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n"
         "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
         ("pid=9665", -9, "")),
        ("=   PID 9665 RUNNING AT node0\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES",
         ("pid=9665", 9, "")),
    ],
)  # fmt: skip
def test_one_message(line, expected):
    assert ends(line) == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "worker-2 exited with code 0",
        "Process 3 terminated with exit code 0",
        "srun: error: node1: task 5: unknown words",
        "2 tasks: all done; OOMKilled-free, Killed process nothing",
    ],
)
def test_what_is_no_failure(line):
    assert not [end for end in ends(line) if end[1] != -9]


def test_tasks_are_listed_by_ranges():
    assert ends("srun: error: node1: tasks 0,2-3: Terminated") == [
        (0, -15, ""),
        (2, -15, ""),
        (3, -15, ""),
    ]


def test_a_task_of_slurm_that_launches_ranks_is_no_rank():
    assert ends(TORCHRUN, "srun: error: node1: task 1: Exited with exit code 1") == [
        ("task 1 on node1", 1, "")
    ]


def test_vague_words_give_the_cause_to_what_sigkill_ended():
    assert ends(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=47.0. Some of the step tasks",
        "srun: error: node1: task 5: Killed",
        "srun: error: node1: task 6: Terminated",
    ) == [(5, -9, "out-of-memory"), (6, -15, "")]


def test_what_is_said_twice_counts_once_and_adds_the_cause():
    assert ends("srun: error: n1: task 5: Killed", "srun: error: n1: task 5: Out Of Memory") == [
        (5, -9, "out-of-memory")
    ]


def test_the_scheduler_speaks_of_the_whole_job():
    (dump,) = read(
        Endings(),
        text("slurmstepd: error: *** STEP 47.0 ON n0 CANCELLED AT 2025-01-01T10:00:03 ***"),
    )
    assert (dump.is_whole_job, dump.is_vague, dump.label) == (True, True, "job 47")
    assert dump.events[0].cause == "cancelled"
