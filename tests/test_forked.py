"""A forked rank finds what torchrun gives it, and ends as a process of its own does."""

import json
import os
import subprocess
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.integration.launch import Launch, Launcher

pytestmark = pytest.mark.timeout(200)

SHOW = """
import json, os, random, sys
import numpy

shown = {
    "environ": {name: value for name, value in os.environ.items() if name in NAMES},
    "argv": sys.argv,
    "first": sys.path[0],
    "name": __name__,
    "file": __file__,
    "main": sorted(vars(sys.modules["__main__"])) == sorted(globals()),
    "folder": os.getcwd(),
    "parent": os.getppid() != os.getpid(),
    "stdin": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")),
    "stack": sys._getframe().f_back is None or sys._getframe().f_back.f_code.co_filename,
}
os.write(1, json.dumps(shown).encode() + b"\\n")  # print would write the end of the line apart
"""
NAMES = (
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    *("OMP_NUM_THREADS", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "OWN"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    "WORLD_SIZE",
)


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return script


def shown_by(launcher: Launcher, script: Path, folder: Path) -> list[dict[str, object]]:
    launch = Launch(launcher=launcher, folder=folder, environ={"OWN": "1"}, stdin="words")
    outcome = launch.plain(script, ["--own", "2"], nproc=2)
    assert outcome.exit_status == 0, outcome.describe()
    shown = [json.loads(line) for line in outcome.stdout.splitlines()]
    return sorted(shown, key=lambda each: each["environ"]["RANK"])


def test_a_forked_rank_sees_what_torchrun_gives_it(tmp_path):
    script = write(tmp_path, f"NAMES = {NAMES!r}\n{SHOW}")
    anew = shown_by("torchrun", script, tmp_path)
    assert [each.pop("stack") for each in anew] == [True, True]
    found = shown_by("forked", script, tmp_path)
    # The ranks share it: the one that reads first gets all.
    assert [sorted(each.pop("stdin") for each in ranks) for ranks in (anew, found)] == [
        ["", "words"],
        ["", "words"],
    ]
    # The one frame that Python itself does not have below a script.
    assert [each.pop("stack") for each in found] == ["<string>", "<string>"]
    assert found == anew


TRAINING = """
import torch.distributed as dist
from torch import nn, ones, optim
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(ones(3, 2)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
"""


def test_the_agent_looks_for_the_same_in_a_forked_rank(tmp_path):
    outcomes = [
        Launch(launcher=launcher).checked(write(tmp_path, TRAINING))
        for launcher in ("forked", "torchrun")
    ]
    reports = [outcome.report for outcome in outcomes]
    assert all(reports), "\n".join(outcome.describe() for outcome in outcomes)
    for key in ("findings", "checked", "not_checked"):
        assert reports[0][key] == reports[1][key]
    # The phase is that of the last heartbeat, which may be too soon for a monitor that starts.
    lasts = [
        [rank["last"].rpartition(", phase ")[0] for rank in report["run"]["ranks"]]
        for report in reports
    ]
    assert all(lasts[0])
    assert lasts[0] == lasts[1]


def test_each_rank_draws_its_own_numbers(tmp_path):
    script = write(tmp_path, "import numpy, random\nprint(random.random(), numpy.random.rand())\n")
    numbers = Launch().plain(script).stdout.split() + Launch().plain(script).stdout.split()
    assert len(set(numbers)) == 8


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_library_is_there_for_a_script_that_imports_it_and_for_no_other(tmp_path, name):
    pytest.importorskip(name)
    text = f"import sys\nprint({name!r} in sys.modules, end=' ')\n"
    told = []
    for line in (f"import {name}", "", f"from {name} import utils"):
        outcome = Launch(folder=tmp_path).plain(write(tmp_path, text + line), nproc=1)
        told.append((outcome.exit_status, outcome.stdout))
    assert told == [(0, "True "), (0, "False "), (0, "True ")]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 1, "exitcode  : 3"),
        ("sys.exit('no data')", 1, "no data\n"),
        (
            "raise ValueError('odd')",
            1,
            "    raise ValueError('odd')\nValueError: odd",
        ),
        ("os.kill(os.getpid(), 9)", 1, "exitcode  : -9"),
        ("atexit.register(lambda: sys.stderr.write('handlers ran'))", 0, "handlers ran"),
    ],
)
def test_a_rank_that_ends_is_reported_to_the_launcher_which_ends_its_peer(
    tmp_path, body, status, said
):
    text = f"import atexit, os, sys, time\nif os.environ['RANK'] == '1':\n    {body}\n"
    rest = "elif len(sys.argv) > 1: time.sleep(600)\n"
    args = ["wait"] if status else []
    outcome = Launch().plain(write(tmp_path, text + rest), args)
    assert outcome.exit_status == status, outcome.describe()
    assert said in outcome.stderr
    assert "forked.py" not in outcome.stderr
    assert outcome.leftovers == ()


def test_a_job_ends_with_the_connection_to_it(tmp_path):
    script = write(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with (tmp_path / "out").open("w") as out, open(os.devnull) as nothing:
        environ = {**os.environ, forked.MARK: "1" * 32}
        job = forked.start([str(script)], 2, environ, tmp_path, (nothing, out, out))
        assert job.wait(0) is None
        ranks = psutil.Process(job.pid).children()
        while (tmp_path / "out").read_text().count("begun") < 2:
            time.sleep(0.01)
        assert [rank.environ()[forked.MARK] for rank in ranks] == ["1" * 32] * 2
        job.close()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


def test_the_stand_in_is_python_but_for_torchrun(tmp_path):
    done = subprocess.run([forked.stand_in(), "-c", "print(6 * 7)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "42\n")
    script = write(
        tmp_path, "import os, sys\nprint(os.environ['RANK'], sys.argv[1])\nsys.exit(5)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    environ = {**os.environ, forked.MARK: "2" * 32}
    done = subprocess.run(
        [forked.stand_in(), *torchrun, str(script), "word"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "0 word\n"), done.stderr
