"""``distdiag.attach()`` never raises: whatever is wrong, it says so and the script goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def run(folder, text, *, stderr=subprocess.PIPE, **environ):
    """Run this text as a script of its own."""
    script = folder / "train.py"
    script.write_text(text)
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=clean | {"PYTHONPATH": paths} | environ,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=100,
    )


FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
"""
NO_FOLDER = """
import os
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
"""
FAILING_PROBE = """
from distdiag.agent.agent import RankAgent
def fail(agent): raise ZeroDivisionError("inside the agent")
RankAgent._start_monitor = fail
"""


@pytest.mark.parametrize(
    ("before", "options", "words"),
    [
        ("", "speed=3", "no option 'speed'"),
        ("", "profile='huge'", "profile='huge'): expected one of light, standard"),
        ("", "hang_timeout='soon'", "hang_timeout='soon'"),
        ("", "hang_timeout=-1", "hang_timeout=-1"),
        ("", "overwrite='no'", "overwrite='no'"),
        ("", "run_dir=42", "run_dir=42"),
        ("", "select=['XYZ999']", "XYZ999"),
        ("", "select='COL'", "select='COL'"),
        ("", "report=['hologram']", "hologram"),
        ("", "config='absent.toml'", "absent.toml"),
        ("", "run_dir='/proc/nowhere'", "cannot be written"),
        ("", "run_dir='train.py'", "cannot be written"),
        ("", "run_dir='used'", "already holds a run"),
        (FULL_DISK, "run_dir='full'", "File too large"),
        (NO_FOLDER, "", "FileNotFoundError"),
        (FAILING_PROBE, "", "inside the agent"),
    ],
)
def test_what_stands_in_the_way_is_one_line_and_the_script_goes_on(
    tmp_path, before, options, words
):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "run.json").write_text("another")
    text = f"import distdiag\n{before}\ndistdiag.attach({options})\nprint('trained')\n"
    done = run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("distdiag: ")
    assert "runs unobserved" in line
    assert words in line
    assert not list(tmp_path.rglob("rank-0.status")) or before is FAILING_PROBE


@pytest.mark.parametrize(
    "environ",
    [
        {"LOCAL_RANK": "1"},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "2"},
        {"RANK": "7", "WORLD_SIZE": "2"},
        {"RANK": "0", "LOCAL_RANK": "5", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "900000000"},
    ],
)
def test_an_environment_that_makes_no_sense_leaves_the_script_alone(tmp_path, environ):
    text = "import distdiag\ndistdiag.attach()\nprint('trained')\n"
    done = run(tmp_path, text, **environ)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "runs unobserved" in line
    assert not (tmp_path / "distdiag-runs").exists()


def test_a_closed_stderr_does_not_matter(tmp_path):
    text = "import distdiag, os, sys\nsys.stderr.close()\ndistdiag.attach(speed=3)\nprint('on')\n"
    assert run(tmp_path, text).stdout == "on\n"
    text = "import distdiag, os\nos.close(2)\ndistdiag.attach(speed=3)\nprint('on')\n"
    assert run(tmp_path, text).stdout == "on\n"


CHILD_WITH_LOCAL_RANK = """
import os, subprocess, sys
import distdiag
distdiag.attach(report=("json",))
if "LOCAL_RANK" not in os.environ:
    # As Lightning starts its other ranks.
    env = os.environ | {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    subprocess.run([sys.executable, *sys.argv], env=env, check=True)
print("trained", os.environ.get("LOCAL_RANK", 0), flush=True)
"""


def test_a_child_that_knows_its_local_rank_only_never_writes_over_its_parent(tmp_path):
    done = run(tmp_path, CHILD_WITH_LOCAL_RANK)
    assert (done.returncode, done.stdout) == (0, "trained 1\ntrained 0\n"), done.stderr
    assert done.stderr == ""  # it would join at `init_process_group`
    (path,) = (tmp_path / "distdiag-runs").rglob("report.json")
    report = json.loads(path.read_bytes())
    assert report["run"]["outcome"] == "finished"
    assert [rank["fate"] for rank in report["run"]["ranks"]] == ["finished"]


def test_two_processes_that_take_themselves_for_one_rank_do_not_mix_their_records(tmp_path):
    text = """
import os, subprocess, sys
import distdiag
distdiag.attach(run_dir="run", report=("json",))
print("trained", flush=True)
"""
    first = "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, 'a.py'])\n"
    (tmp_path / "a.py").write_text(text)
    done = run(tmp_path, first, RANK="0", WORLD_SIZE="1")
    assert done.stdout == "trained\ntrained\n", done.stderr
    assert done.stderr.count("another process is rank 0") == 1


def test_the_children_of_multiprocessing_are_no_ranks(tmp_path):
    text = """
import multiprocessing
import distdiag
distdiag.attach(report=("json",))

def work():
    print("worked", flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    print("trained")
"""
    done = run(tmp_path, text, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\ntrained\n", "")
    assert len(list((tmp_path / "distdiag-runs").glob("2*"))) == 1


def test_a_forked_child_is_reported_that_it_is_not_observed(tmp_path):
    text = """
import os
import distdiag
distdiag.attach(report=("json",))
pid = os.fork()
if pid == 0:
    distdiag.attach()
    print("worked", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("trained")
"""
    done = run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "worked\ntrained\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "runs unobserved: this process was forked from one that is observed already" in line
