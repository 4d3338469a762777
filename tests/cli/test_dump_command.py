"""The command ``distdiag dump`` on a real job of two ranks that hangs without the agent."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.py_spy_json import PySpyJson
from distdiag.live.job_dump import read_node_dump

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import os, sys, time, torch, torch.distributed as dist

def evaluate():
    time.sleep(1000)

def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with open(f"{folder}/new-{rank}", "w") as file:
        file.write(f"{os.getpid()} {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    os.replace(f"{folder}/new-{rank}", f"{folder}/rank-{rank}")
    loader = torch.utils.data.DataLoader([0, 1, 2, 3], num_workers=1)
    for batch in loader:
        if rank == 1:
            evaluate()
        dist.all_reduce(batch)

main(sys.argv[1])
"""
EVALUATES = "train.py:4 in evaluate"
REDUCES = "train.py:16 in main"


def environ():
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def distdiag(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "distdiag.cli", "dump", *arguments],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=100,
    )


class Job(NamedTuple):
    """A job whose rank 1 evaluates while rank 0 waits for it; each has a data-loader worker."""

    name: str
    pids: dict[int, int]


def started(folder, process):
    """Wait until both ranks are where they hang."""
    files = [folder / f"rank-{rank}" for rank in (0, 1)]
    while not all(file.exists() for file in files):  # pytest-timeout ends a wait for ever
        assert process.poll() is None
        time.sleep(0.1)
    reported = [file.read_text().split() for file in files]
    job = Job(reported[0][1], {rank: int(pid) for rank, (pid, _) in enumerate(reported)})
    while not all(line in distdiag("--job", job.name).stdout for line in (EVALUATES, REDUCES)):
        assert process.poll() is None
    return job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(script), str(folder)]
    with subprocess.Popen(command, env=environ(), stderr=subprocess.DEVNULL) as process:
        try:
            yield started(folder, process)
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            for member in (process, *children):
                member.kill()
            psutil.wait_procs(children, timeout=30)


def test_the_ranks_and_only_they_are_shown_with_their_lines(job):
    done = distdiag("--job", job.name)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"job {job.name} on ")
    assert lines[0].endswith(": 2 of 2 ranks, 2 distinct stacks")
    assert any(line.startswith("  rank 1: ") and line.endswith(EVALUATES) for line in lines)
    assert any(line.startswith("  rank 0: ") and line.endswith(REDUCES) for line in lines)
    assert "      dist.all_reduce(batch)" in lines
    assert any(line.startswith("      now in ") for line in lines)
    assert any(line.startswith("  paths part below ") for line in lines)
    assert done.stderr == f"distdiag: job {job.name}: taking the stacks of ranks 0-1 of 2\n"


def test_the_dump_is_kept_in_files_that_are_named_by_rank(job, tmp_path):
    folder = tmp_path / "dumps"
    done = distdiag("--job", job.name, "--out", str(folder))
    assert done.returncode == 0
    assert f"the stacks of 2 ranks are in {folder}" in done.stderr
    path = folder / "rank-1.py-spy.json"
    (read,) = PySpyJson().read(Dump(path=str(path), data=path.read_bytes()))
    assert read.pid == job.pids[1]
    assert read.events[0].threads[0].frames[0].function == "evaluate"
    again = distdiag("--job", job.name, "--out", str(folder))
    assert (again.returncode, again.stdout) == (2, "")
    assert "is not empty" in again.stderr


def test_the_dump_as_json_can_be_read_again(job):
    done = distdiag("--job", job.name, "--json")
    assert done.returncode == 0
    dump = read_node_dump(done.stdout.encode())
    assert {r.who.rank: r.who.pid for r in dump.ranks} == job.pids


def test_processes_can_be_named(job):
    done = distdiag("--pid", str(job.pids[1]))
    assert done.returncode == 0
    assert f"job {job.name} on " in done.stdout
    assert "  rank 0: no process was found where this command looked\n" in done.stdout
    assert EVALUATES in done.stdout


def test_other_hosts_are_reached_and_one_that_fails_costs_only_its_ranks(job, tmp_path):
    via = tmp_path / "via.sh"
    # Each host sees one rank; the command ends after its own options.
    via.write_text(
        f"""#!/bin/sh
        host=$1
        shift
        case $host in
        node0) exec "$@" --pid {job.pids[0]};;
        node1) echo Welcome; exec "$@" --pid {job.pids[1]};;
        esac
        echo "$host is down" >&2
        exit 255
        """
    )
    via.chmod(0o755)
    reached = ["--via", shlex.quote(str(via)), "--remote", f"{sys.executable} -m distdiag.cli"]
    done = distdiag("--hosts", "node0,node1", *reached)
    assert done.returncode == 0
    assert ": 2 of 2 ranks, 2 distinct stacks" in done.stdout
    assert "(2 of 2 hosts): 1 rank\n" in done.stderr
    done = distdiag("--hosts", "node1,node2", *reached)
    assert done.returncode == 1
    assert ": 1 of 2 ranks, 1 distinct stack\n" in done.stdout
    assert "hosts): node2 is down\n" in done.stderr
    done = distdiag("--hosts", "node2,node3", *reached)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("distdiag: none of the 2 hosts gave a dump\n")


def test_a_process_that_cannot_be_read_is_reported_and_the_status_says_so():
    with subprocess.Popen(["sleep", "1000"]) as process:
        done = distdiag("--pid", str(process.pid))
        process.kill()
    assert done.returncode == 1
    assert "  rank 0: no stacks: py-spy ended with status 1: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--job", "nowhere:1"), "no rank of job nowhere:1 was found on "),
        (("--hosts", "a", "--pid", "1"), "it does not go with --hosts"),
        (("--hosts", ","), "--hosts names no host"),
        (("--hosts", "a", "--via", "'"), '--via "\'" is no command'),
        (("--hosts", "a", "--job", "a b"), "'a b' cannot be passed on to other hosts"),
        (("--timeout", "0"), "Invalid value for '--timeout'"),
        (("--pid", "999999999"), "there is no process 999999999"),
        (("--out", "/dev/null/x"), "cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, problem):
    done = distdiag(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("distdiag: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
