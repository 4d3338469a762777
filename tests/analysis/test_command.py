"""``distdiag analyze`` as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.findings.finding import Outcome
from distdiag.findings.report_json import decode_report
from tests import forked
from tests.dumps.recorders import recorders, write_dumps

ROOT = Path(__file__).parents[2]


@pytest.fixture
def analyze(tmp_path):
    def run(*arguments, stdin=""):
        command = ["-m", "distdiag.cli", "analyze", *map(str, arguments)]
        if not stdin:
            return forked.run(command, timeout=100, cwd=tmp_path)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths},
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )

    return run


def stuck_job(folder):
    ranks = recorders(3)
    for recorder in ranks:
        recorder.call(line=10)
    for recorder in ranks[:2]:
        recorder.call(line=20)
        recorder.pending()
    return write_dumps(folder, ranks)


def healthy_job(folder):
    ranks = recorders(2)
    for recorder in ranks:
        recorder.call()
    return write_dumps(folder, ranks)


def test_a_finding_ends_with_status_1_and_the_culprit(analyze, tmp_path):
    done = analyze(stuck_job(tmp_path / "dumps"))
    assert done.returncode == 1
    assert "ERROR COL001" in done.stdout
    assert "rank 2 never called all_reduce #2" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_what_the_configuration_ignores_is_counted_and_does_not_fail(analyze, tmp_path):
    dumps = stuck_job(tmp_path / "dumps")
    rule = '[[ignore]]\ncodes = ["COL001"]\nreason = "rank 2 is drained"\n'
    (tmp_path / "distdiag.toml").write_text(rule)
    done = analyze(dumps)
    assert done.returncode == 0, done.stdout
    assert "1 finding ignored." in done.stdout
    (tmp_path / "other.toml").write_text('ignore = ["NOSUCH"]\n')
    wrong = analyze(dumps, "--config", "other.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert 'unknown code or prefix "NOSUCH"' in wrong.stderr


def test_no_finding_ends_with_status_0(analyze, tmp_path):
    done = analyze(healthy_job(tmp_path / "dumps"))
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_a_report(analyze, tmp_path):
    done = analyze(stuck_job(tmp_path / "dumps"), "--report", "json")
    report = decode_report(done.stdout.encode())
    assert report.run.outcome is Outcome.HUNG
    assert [str(finding.ranks) for finding in report.findings] == ["2"]


def test_files_that_cannot_be_used_are_one_line_each(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    (folder / "nccl_trace_rank_9").write_bytes((folder / "nccl_trace_rank_0").read_bytes()[:-50])
    done = analyze(folder, "--report", "json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"distdiag: {folder}/nccl_trace_rank_9: the flight-recorder dump cannot")
    assert f"{folder}/nccl_trace_rank_9" in decode_report(done.stdout.encode()).not_checked


def test_checks_can_be_selected(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    done = analyze(folder, "--select", "COL003,COL002", "--report", "json")
    assert done.returncode == 0
    report = decode_report(done.stdout.encode())
    assert report.checked == ("COL002", "COL003")
    assert report.not_checked["COL001"] == "left out by --select or --ignore"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "Missing argument 'PATH...'"),
        (("gone",), "gone does not exist"),
        (("empty",), "nothing that can be checked was found"),
        (("empty", "--report", "xml"), 'unknown report "xml"'),
        (("empty", "--select", "XYZ"), 'unknown code or prefix "XYZ"'),
        (("empty", "--rank", "a"), "'a' is not FILE=RANK"),
        (("empty", "--rank", "a=b"), "'a=b' is not FILE=RANK"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(analyze, tmp_path, arguments, problem):
    (tmp_path / "empty").mkdir()
    done = analyze(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_rank_of_a_file_can_be_told(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    for rank, name in enumerate(["red", "green", "blue"]):
        (folder / f"nccl_trace_rank_{rank}").rename(folder / name)
    asked = analyze(folder)
    assert asked.returncode == 2
    assert "say --rank FILE=RANK" in asked.stderr
    told = analyze(folder, "--rank", "red=0", "--rank", "green=1", "--rank", "dumps/blue=2")
    assert told.returncode == 1
    assert "rank 2 never called" in " ".join(told.stdout.split())


FULL = "Error while creating shared memory segment /dev/shm/nccl-a1 (size 9637888)"
RAISED = f"""Traceback (most recent call last):
  File "/data/train.py", line 9, in <module>
    dist.barrier()
  File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 4551, in barrier
    work = group.barrier(opts=opts)
torch.distributed.DistBackendError: NCCL error in: x.hpp:268, unhandled system error, NCCL version 2
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{FULL}
"""


def log_of(ranks, text=RAISED):
    return "".join(f"[rank{rank}]: {line}\n" for rank in ranks for line in text.splitlines())


def report_of(done):
    return decode_report(done.stdout.encode())


def test_a_log_in_a_pipe_is_read(analyze):
    done = analyze("-", "--report", "json", stdin=log_of([0, 1]))
    assert (done.returncode, done.stderr) == (1, "")
    report = report_of(done)
    (finding,) = report.findings
    assert (finding.code, finding.ranks) == ("HNG001", {0, 1})
    assert "known fault nccl-shm-full" in finding.message
    (file,) = report.files
    assert (file.path, file.kinds, file.ranks) == ("stdin", ("log",), {0, 1})
    assert file.num_understood == file.num_lines == 18


def test_a_pipe_and_files_go_together(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    done = analyze(folder, "-", "--report", "json", stdin=log_of([0]))
    assert done.returncode == 1
    kinds = {kind for file in report_of(done).files for kind in file.kinds}
    assert kinds == {"flight recorder", "log"}


def test_the_folder_of_a_job_is_read_without_its_sources_weights_and_data(analyze, tmp_path):
    stuck_job(tmp_path / "dumps")
    (tmp_path / "train.py").write_text("# Traceback (most recent call last):\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text("step 1\nstep 2\n")
    (tmp_path / "data").mkdir()
    for number in range(3000):
        (tmp_path / "data" / f"{number}.jpg").touch()
    for name in ("step-9.pt", "corpus.txt", "model.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
    done = analyze(".", "--report", "json")
    assert (done.returncode, done.stderr) == (1, "")
    report = report_of(done)
    assert [finding.code for finding in report.findings] == ["COL001"]
    assert report.not_checked["passed over in the folders"] == (
        "3,001 files of data, 2 of checkpoints, 1 of sources; name a file to have it read"
    )
    by_name = {file.path.rsplit("/", 1)[-1]: file for file in report.files}
    assert set(by_name) == {f"nccl_trace_rank_{rank}" for rank in range(3)} | {"train.log"}
    assert by_name["train.log"].num_lines == 2


def test_a_dump_of_several_jobs_is_one_report_for_each(analyze, tmp_path):
    thread = {"thread_name": "MainThread", "pid": 7, "thread_id": 1, "active": True}
    frame = {"name": "main", "filename": "/data/train.py", "line": 9}
    for job in ("job-node0_29500", "job-node0_29501"):
        (tmp_path / "dumps" / job).mkdir(parents=True)
        for rank in range(2):
            path = tmp_path / "dumps" / job / f"rank-{rank}.py-spy.json"
            path.write_text(json.dumps([thread | {"owns_gil": False, "frames": [frame]}]))
    done = analyze("dumps")
    assert done.returncode in (0, 1)
    assert done.stdout.count("What was read") == 2
    assert "both bear the name of rank" not in done.stderr
    for job in ("job-node0_29500", "job-node0_29501"):
        assert f"dumps/{job}/rank-0.py-spy.json" in done.stdout


def test_a_fault_that_no_rank_is_known_of_blames_nobody(analyze, tmp_path):
    text = f"starting\nn1:1:2 [0] misc/shmutils.cc:1 NCCL WARN {FULL}\n"
    (tmp_path / "train.log").write_text(text)
    done = analyze("train.log", "--report", "json")
    assert (done.returncode, done.stderr) == (1, "")
    (finding,) = report_of(done).findings
    assert (finding.code, len(finding.ranks)) == ("HNG019", 0)
    assert finding.subjects == ("nccl-shm-full",)


def test_a_known_fault_is_a_note_beside_what_is_proven(analyze, tmp_path):
    raised = (
        'Traceback (most recent call last):\n  File "/data/train.py", line 9, in f\nValueError: x'
    )
    text = log_of([1], raised) + log_of([0], f"NCCL WARN {FULL}")
    (tmp_path / "train.log").write_text(text)
    findings = {f.code: f for f in report_of(analyze(".", "--report", "json")).findings}
    assert (findings["HNG001"].severity, findings["HNG001"].ranks) == ("error", {1})
    assert findings["HNG019"].severity == "info"


def test_what_only_follows_from_a_fault_is_no_finding_beside_one(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    gone = "NCCL WARN socketProgress: Connection closed by remote peer n1<5>"
    (folder / "rank0.log").write_text(f"{gone}\n")
    findings = report_of(analyze(folder, "--report", "json")).findings
    assert [finding.code for finding in findings] == ["COL001"]


def test_it_is_reported_what_to_collect_only_where_something_was_missing(analyze, tmp_path):
    gone = "NCCL WARN socketProgress: Connection closed by remote peer n1<5>"
    (tmp_path / "train.log").write_text(log_of([0, 1], gone))
    out = " ".join(analyze("train.log").stdout.split())
    advice = out.partition("What to collect next time")[2].partition("What was read")[0]
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in advice and "TORCH_NCCL_DUMP_ON_TIMEOUT" in advice
    assert "distdiag dump --out" in advice
    (tmp_path / "train.log").write_text(log_of([0, 1]))
    assert "What to collect" not in analyze("train.log").stdout


def test_a_post_mortem_does_not_list_what_no_file_could_show(analyze, tmp_path):
    (tmp_path / "train.log").write_text(log_of([0]))
    done = analyze("train.log")
    out = " ".join(done.stdout.split())
    assert "not observed: only logs were given (-v says why)." in out
    assert "MOE001" not in out and "not present in this run" not in out
    details = " ".join(analyze("train.log", "-v").stdout.split())
    assert "MOE001" in details and "only logs were given: checks of models, data" in details
    report = report_of(analyze("train.log", "--report", "json"))
    assert "only logs were given" in report.not_checked["MOE001"]


def test_the_verdict_comes_first_and_what_was_read_after_the_findings(analyze, tmp_path):
    (tmp_path / "train.log").write_text(log_of([0, 1]))
    out = " ".join(analyze("train.log").stdout.split())
    assert out.startswith("distdiag: 1 error: ") and "; the run failed" in out
    assert out.index("ERROR HNG001") < out.index("What was read") < out.index("checks looked")
    assert "log of ranks 0-1: 18 of 18 lines understood" in out
