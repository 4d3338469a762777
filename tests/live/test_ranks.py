"""Real processes with the environment that launchers give: which of them are ranks."""

import json
import os
import subprocess
import sys
import uuid
from contextlib import ExitStack

import pytest

from distdiag.events.errors import UsageError
from distdiag.live.ranks import find_ranks, ranks_of_pids

# Starts children, each a list of words or the code of a Python program, says so, and waits.
PARENT = """
import json, os, subprocess, sys
for arguments, environ in json.loads(sys.argv[-1]):
    subprocess.Popen(arguments, env=os.environ | environ, stdin=sys.stdin)
os.write(1, b"ready\\n")
sys.stdin.read()
"""
WAIT = [sys.executable, "-c", r"import os, sys; os.write(1, b'ready\n'); sys.stdin.read()"]
NUMBERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def numbers(rank, world_size=4, local_rank=None, **others):
    given = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return given | ({} if local_rank is None else {"LOCAL_RANK": str(local_rank)}) | others


def parent(*children):
    """Return the command of a Python process that starts these children."""
    return [sys.executable, "-c", PARENT, json.dumps(children)]


class Node:
    """Processes of this machine that have a job of their own."""

    def __init__(self, stack):
        self._stack = stack
        self.address = f"test-{uuid.uuid4().hex[:12]}"

    @property
    def environ(self):
        clean = {k: v for k, v in os.environ.items() if k not in NUMBERS and k != "LOCAL_RANK"}
        return clean | {"MASTER_ADDR": self.address, "MASTER_PORT": "29500"}

    def start(self, command, environ, num_ready=1):
        process = subprocess.Popen(
            command,
            env=self.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(end, process)
        for _ in range(num_ready):
            assert process.stdout.readline() == "ready\n"
        return process

    def found(self):
        """Return the ranks of this node's jobs by their number."""
        ranks = [rank for rank in find_ranks().ranks if self.address in rank.job]
        assert len({(rank.job, rank.rank) for rank in ranks}) == len(ranks)
        return {rank.rank: rank for rank in ranks}


def end(process):
    """End a process and all that it started: they read its stdin, and keep its stdout open."""
    with process:
        process.stdin.close()
        process.stdout.read()


@pytest.fixture
def node():
    with ExitStack() as stack:
        yield Node(stack)


def test_ranks_are_found_by_their_environment_with_all_that_is_known_of_them(node, tmp_path):
    processes = {rank: node.start(WAIT, numbers(rank, 4, rank - 2)) for rank in (3, 2)}
    found = node.found()
    assert {rank: who.pid for rank, who in found.items()} == {
        r: p.pid for r, p in processes.items()
    }
    who = found[3]
    assert (who.local_rank, who.world_size, who.command) == (1, 4, tuple(WAIT))
    assert (who.job, who.folder) == (f"{node.address}:29500", os.getcwd())


def test_children_of_a_rank_are_no_ranks(node):
    rank = node.start(parent([WAIT, {}], [parent([WAIT, {}]), {}]), numbers(0, 4, 0), 4)
    assert {r: who.pid for r, who in node.found().items()} == {0: rank.pid}


def test_a_shell_around_the_rank_is_not_the_rank(node):
    shell = node.start(["sh", "-c", '"$@"; true', "sh", *WAIT], numbers(1, 4, 1))
    (who,) = node.found().values()
    assert who.pid != shell.pid
    assert who.command[0] == sys.executable


def test_a_launcher_that_a_pod_gave_numbers_is_no_rank(node):
    workers = [(WAIT, numbers(rank, 16, rank - 8)) for rank in (8, 9)]
    launcher = node.start(parent(*workers), numbers(1, 2), 3)
    found = node.found()
    assert sorted(found) == [8, 9]
    assert launcher.pid not in {who.pid for who in found.values()}


def test_a_known_launcher_is_no_rank_though_its_only_worker_has_its_numbers(node, tmp_path):
    program = tmp_path / "torchrun"
    program.write_text(PARENT)
    command = [sys.executable, str(program), json.dumps([(WAIT, numbers(1, 2, 0))])]
    launcher = node.start(command, numbers(1, 2), 2)
    found = node.found()
    assert list(found) == [1]
    assert found[1].pid != launcher.pid


def test_a_pod_of_one_process_is_a_rank_without_a_local_rank(node):
    process = node.start(WAIT, numbers(3, 8))
    who = node.found()[3]
    assert (who.pid, who.local_rank, who.world_size) == (process.pid, 3, 8)


def test_the_numbers_of_a_scheduler_count_where_there_are_no_others(node):
    slurm = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": node.address, "SLURM_STEP_ID": "0"}
    # What such a script starts anew has torch's own numbers, which the script set.
    child = (WAIT, numbers(2, 4, 0))
    rank = node.start(parent(child), slurm | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, 2)
    alone = slurm | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    node.start(WAIT, alone)
    ((number, who),) = node.found().items()
    assert (number, who.pid, who.job) == (2, rank.pid, f"slurm:{node.address}:0")


def test_a_scheduler_that_started_a_launcher_did_not_start_ranks(node):
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    node.start(parent([WAIT, numbers(0, 8, 0)], [WAIT, numbers(1, 8, 1)]), slurm, 3)
    assert sorted(node.found()) == [0, 1]


def test_jobs_are_reported_apart_by_where_their_ranks_meet(node):
    node.start(WAIT, numbers(0, 2, 0))
    node.start(WAIT, numbers(0, 2, 0, MASTER_PORT="29501"))
    jobs = [rank.job for rank in find_ranks().ranks if node.address in rank.job]
    assert jobs == [f"{node.address}:29500", f"{node.address}:29501"]


def test_the_newest_attempt_of_a_rank_counts(node):
    node.start(WAIT, numbers(0, 2, 0))
    newest = node.start(WAIT, numbers(0, 2, 0, TORCHELASTIC_RESTART_COUNT="1"))
    assert node.found()[0].pid == newest.pid


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        numbers("x"),
        numbers("-1"),
        numbers(4, 4),
        numbers("٣"),
        numbers(0, "9" * 5000),
        numbers(0, 2_000_000),
    ],
)
def test_numbers_that_make_no_sense_make_no_rank(node, environ):
    node.start(WAIT, environ)
    assert node.found() == {}


def test_a_name_that_could_steer_a_terminal_or_a_shell_is_made_harmless(node):
    node.start(WAIT, numbers(0, 2, 0, MASTER_PORT="1;\x1b[2J $(rm)"))
    assert node.found()[0].job == f"{node.address}:1___2J___rm_"


def test_given_processes_take_their_numbers_from_their_environment(node):
    processes = [node.start(WAIT, numbers(rank, 4, rank)) for rank in (3, 1)]
    ranks = ranks_of_pids([process.pid for process in processes])
    assert [(who.rank, who.pid) for who in ranks] == [(3, processes[0].pid), (1, processes[1].pid)]


def test_given_processes_without_numbers_are_numbered_in_their_order(node):
    processes = [node.start(WAIT, environ) for environ in (numbers(3), {}, {})]
    ranks = ranks_of_pids([process.pid for process in processes])
    assert [(who.job, who.rank, who.world_size) for who in ranks] == [
        ("pids", place, 3) for place in range(3)
    ]


def test_given_processes_that_are_wrong_are_a_mistake_of_usage(node):
    process = node.start(WAIT, numbers(0))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with pytest.raises(UsageError, match=f"there is no process {gone.pid}"):
        ranks_of_pids([process.pid, gone.pid])
    with pytest.raises(UsageError, match="two of the processes are the same rank"):
        ranks_of_pids([process.pid, process.pid])


AS_NOBODY = """
import os, sys
from distdiag.events.errors import UsageError
from distdiag.live.ranks import find_ranks, ranks_of_pids
pid = int(sys.argv[1])
os.setuid(65534)
search = find_ranks()
print(search.num_hidden > 0, pid in {rank.pid for rank in search.ranks})
try:
    ranks_of_pids([pid])
except UsageError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_processes_of_another_user_are_counted_and_said_to_be_so(node):
    process = node.start(WAIT, numbers(0))
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(process.pid)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [
        "True False",
        f"process {process.pid} belongs to another user",
    ], done.stderr
