"""The end of what real processes wrote to stderr."""

import subprocess
import sys

from distdiag.dumps.logs.stderr_tail import MOST_BYTES, MOST_LINES, StderrTail
from tests.dumps.programs import running

WRITE = "import os, sys, time; os.write(2, eval(sys.argv[1])); print('ready', flush=True)\n"
SLEEP = WRITE + "time.sleep(100)"


def look(path, text, tail=None):
    with path.open("wb") as file, running(SLEEP, text, stderr=file) as process:
        return (tail or StderrTail()).observe_rank(2, process.pid, 5.0)


def test_the_last_lines_are_reported(tmp_path):
    path = tmp_path / "stderr.log"
    observed = look(path, r"b'one\ntwo\n[rank2]: NCCL WARN timeout\n\n'")
    assert (observed.rank, observed.source, observed.error) == (2, "stderr", "")
    assert observed.summary == "[rank2]: NCCL WARN timeout"
    assert observed.values == {
        "path": str(path),
        "size_bytes": 36,
        "tail": "one\ntwo\n[rank2]: NCCL WARN timeout",
    }


def test_an_empty_stderr_is_reported(tmp_path):
    observed = look(tmp_path / "stderr.log", "b''")
    assert (observed.summary, observed.values["tail"]) == ("stderr is empty", "")


def test_only_the_end_of_a_large_file_is_read(tmp_path):
    observed = look(tmp_path / "stderr.log", r"b'a' * 1_000_000 + b'\n' + b'line\n' * 100_000")
    assert observed.values["size_bytes"] == 1_500_001
    assert observed.values["tail"] == "\n".join(["line"] * MOST_LINES)
    one_line = look(tmp_path / "stderr.log", "b'a' * 1_000_000")
    assert one_line.values["tail"] == ""  # its beginning is not known
    assert len(str(observed.values["tail"])) <= MOST_BYTES


def test_nothing_that_a_terminal_would_obey_is_passed_on(tmp_path):
    text = r"b'\x1b[31mred\x1b[0m \x07bell\r\n 10%|#\r 20%|##\r 30%|###\n\xff\x00\x1b]0;t\x07\n'"
    observed = look(tmp_path / "stderr.log", text)
    assert observed.values["tail"] == "red bell\n 30%|###\n\ufffd0;t"


def test_a_pipe_or_a_terminal_is_no_file():
    with running(SLEEP, "b''", stderr=subprocess.PIPE) as process:
        error = StderrTail().observe_rank(0, process.pid, 5.0).error
        assert error == (
            "stderr is no file but pipe (torchrun --log-dir DIR --redirects 3 makes files)"
        )
        process.stderr.close()
    with running(SLEEP, "b''", stderr=subprocess.DEVNULL) as process:
        error = StderrTail().observe_rank(0, process.pid, 5.0).error
        assert error.startswith("stderr is no file but /dev/null (")


def test_a_closed_stderr_is_reported():
    code = "import os, time; os.close(2); print('ready', flush=True); time.sleep(100)"
    with running(code) as process:
        error = StderrTail().observe_rank(0, process.pid, 5.0).error
    assert error == "the process is gone, or has no stderr"


def test_a_file_that_was_deleted_is_still_read(tmp_path):
    path = tmp_path / "stderr.log"
    with path.open("wb") as file, running(SLEEP, r"b'kept\n'", stderr=file) as process:
        path.unlink()
        observed = StderrTail().observe_rank(0, process.pid, 5.0)
    assert observed.summary == "kept"
    assert observed.values["path"] == f"{path} (deleted)"


def test_the_file_of_a_process_that_is_gone_is_remembered(tmp_path):
    path = tmp_path / "stderr.log"
    tail = StderrTail()
    with (
        path.open("wb") as file,
        running(
            WRITE + "input()", r"b'last words\n'", stderr=file, stdin=subprocess.PIPE
        ) as process,
    ):
        assert tail.observe_rank(0, process.pid, 5.0).summary == "last words"
        tail.watch(process.pid)
        process.stdin.close()
        process.wait()
    assert tail.observe_rank(0, process.pid, 5.0).summary.startswith("EOFError")
    assert StderrTail().observe_rank(0, process.pid, 5.0).error == (
        "the process is gone, or has no stderr"
    )
    path.unlink()
    assert tail.observe_rank(0, process.pid, 5.0).error == (
        f"{path} cannot be read: No such file or directory"
    )


def test_a_launcher_that_redirects_makes_files(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "from distdiag.dumps.logs.stderr_tail import StderrTail\n"
        "print('the end of', os.environ['RANK'], file=sys.stderr, flush=True)\n"
        "print(StderrTail().observe_rank(0, os.getpid(), 5.0).summary)\n"
    )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "1",
            "--standalone",
            "--log-dir",
            tmp_path / "logs",
            "--redirects",
            "3",
            script,
        ],
        check=True,
        capture_output=True,
        timeout=100,
    )
    (out,) = (tmp_path / "logs").rglob("stdout.log")
    assert out.read_text() == "the end of 0\n"
