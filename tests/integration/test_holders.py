"""Real ranks that wait for what somebody has: the report says who, and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import Launch

PROGRAM = Path(__file__).with_name("holders.py")
OPTIONS = ["--hang-timeout", "2", "--on-hang", "abort"]

pytestmark = pytest.mark.timeout(200)


def finding_of(folder, *arguments, launcher="forked"):
    """The one finding above info about rank 1, at the line where it stands."""
    run = Launch(launcher=launcher, folder=folder).checked(PROGRAM, arguments, options=OPTIONS)
    found = run.reported()
    assert len(found) == 1, run.describe()
    (finding,) = found.values()
    assert run.report["run"]["outcome"] == "aborted", run.describe()
    return finding


def stuck(folder, kind, line, *arguments, **options):
    finding = finding_of(folder, kind, *arguments, **options)
    assert finding["ranks"] == [1]
    assert finding["location"]["source"] == line
    return finding


def line_of(text):
    (number,) = [n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line]
    return f"holders.py:{number}"


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "cache.lock")


@pytest.fixture
def stranger(path):
    """A process outside of the job that has the lock."""
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)"
    )
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def test_a_lock_of_a_process_outside_of_the_job(tmp_path, path, stranger):
    finding = stuck(tmp_path, "flock", "fcntl.flock(file, fcntl.LOCK_EX)", path)
    assert finding["code"] == "HNG005"
    assert f"{path} is locked by process {stranger.pid} `{sys.executable} -c" in finding["message"]
    assert f"Let process {stranger.pid} release the lock, or end it" in finding["fix"]


def test_a_lock_of_another_rank(tmp_path, path):
    finding = stuck(tmp_path, "record_lock", "fcntl.lockf(file, fcntl.LOCK_EX)", path)
    assert f"{path} is locked by rank 0, which waits in all_reduce #3" in finding["message"]
    assert "Release the lock before the collective" in finding["fix"]


def test_a_lock_that_a_process_has_inherited(tmp_path, path):
    finding = stuck(tmp_path, "inherited_lock", "fcntl.flock(file, fcntl.LOCK_EX)", path)
    assert f"{path} is locked by process" in finding["message"]
    assert " (forked from rank 0), which is sleeping" in finding["message"]
    assert "; it inherited the open file from rank 0; rank 0 waits in" in finding["message"]


def test_a_lock_that_is_polled_for(tmp_path, path, stranger):
    finding = stuck(tmp_path, "polled_lock", "with FileLock(path):", path)
    assert finding["code"] == "HNG011"
    assert f"{path} is locked by process {stranger.pid} " in finding["message"]


@pytest.mark.parametrize(
    ("kind", "line", "content", "owner"),
    [
        ("soft_lock", "with SoftFileLock(path):", "4711\nnode-7\n", "process 4711 on node-7"),
        ("baton", "FileBaton(str(path)).wait()", "", "no process of this node has it locked"),
    ],
)
def test_a_lock_file_that_a_dead_process_left(tmp_path, path, kind, line, content, owner):
    Path(path).write_text(content)
    finding = stuck(tmp_path, kind, line, path)
    assert f"the lock file {path} is there since" in finding["message"]
    assert owner in finding["message"]
    assert finding["fix"].endswith(f"remove the file: rm {path}")


def test_a_key_that_nobody_sets(tmp_path):
    finding = stuck(tmp_path, "store_key", 'store.get("ready/5")')
    assert finding["code"] == "HNG020"
    assert 'weights/ready/5" of the store ' in finding["message"]
    assert ", which no rank has set; rank 0 set " in finding["message"]
    assert 'weights/ready/4" at ' in finding["message"]
    assert line_of('store.set("ready/4"') in finding["message"]


def test_groups_that_threads_create_in_another_order(tmp_path):
    finding = finding_of(tmp_path, "group_order")
    assert finding["code"] == "COL008"
    assert finding["ranks"] == [0, 1]
    assert "new_group([0]) in thread groups-of-1 on rank 0" in finding["message"]
    assert "new_group([0, 1]) in thread groups-of-2 on rank 1" in finding["message"]
    assert finding["fix"].startswith("Create all process groups in one thread")


def test_a_question_to_a_person(tmp_path):
    line = 'input("Overwrite the checkpoint? [y/n] ")'
    finding = stuck(tmp_path, "question", line, launcher="torchrun")
    assert finding["code"] == "HNG021"
    assert "it asks a person, and nobody answers at the terminal /dev/pts/" in finding["message"]


def test_a_standard_input_that_nobody_writes_to(tmp_path):
    finding = stuck(tmp_path, "question_in_library", "sys.stdin.readline()")
    assert finding["code"] == "HNG021"
    assert "waits for an answer on its standard input (pipe:[" in finding["message"]


@pytest.mark.parametrize(
    ("kind", "line", "code"),
    [
        ("forked_lock", "for _ in DataLoader(images, num_workers=1):", "HNG004"),
        ("forked_process", "worker.join()", "HNG013"),
    ],
)
def test_a_lock_that_a_fork_has_copied(tmp_path, kind, line, code):
    finding = stuck(tmp_path, kind, line)
    assert finding["code"] == code
    assert "waiting for the lock `" in finding["message"]
    assert "a thread of the rank had it when the process was forked" in finding["message"]
    assert "by spawn instead of fork" in finding["fix"]
    assert any("stack of MainThread" in each.get("values", {}) for each in finding["evidence"])


def test_a_command_that_does_not_end(tmp_path):
    finding = stuck(tmp_path, "child", 'subprocess.run(["sleep", "987"], check=True)')
    assert finding["code"] == "HNG013"
    assert " `sleep 987` is sleeping in " in finding["message"]


def test_a_script_that_does_not_end(tmp_path):
    finding = stuck(tmp_path, "python_child", "subprocess.run([sys.executable, str(script)])")
    assert " is sleeping in accept" in finding["message"]
    assert "serve_me.py:4" in finding["message"]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("dead_worker", "results.get()"),
        ("dead_pool_worker", "pool.map(square, range(6), chunksize=1)"),
    ],
)
def test_a_process_that_died_with_the_answer(tmp_path, kind, line):
    finding = stuck(tmp_path, kind, line)
    assert "was ended by SIGKILL, and what it had to answer is lost" in finding["message"]


def test_a_lock_of_another_thread(tmp_path):
    finding = stuck(tmp_path, "thread_lock", "with lock:  # nobody else has it for long")
    assert finding["code"] == "HNG011"
    assert "its thread writer has the lock `lock`, and is at" in finding["message"]
    assert line_of("answers.get()") in finding["message"]


def test_what_is_released_in_time_is_not_reported(tmp_path, path):
    run = Launch(folder=tmp_path).checked(PROGRAM, ["released", path], options=OPTIONS)
    assert run.exit_status == 0, run.describe()
    assert run.stdout.count("done") == 2
    assert run.reported() == {}, run.describe()
