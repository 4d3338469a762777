"""What ``analyze`` says of logs of failed jobs: the cause, whose it is, and nobody else."""

from pathlib import Path

import pytest

from distdiag.analysis import analyze
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity
from tests.analysis.failed_logs import FAILED, RAISED_2, Truth, died, raised_by
from tests.analysis.healthy_logs import HEALTHY

INPUTS = Path(__file__).parent / "postmortem"
MISSING = ("ModuleNotFoundError: No module named 'wheel_that_is_missing'", "/data/train.py:4")
NO_SPACE = ("Error while creating shared memory segment /dev/shm/nccl-a1", "/data/train.py:9")

OF_FILES = {
    "f4_order.log": Truth("HNG001", 3, ("FileNotFoundError: shard-7", "/data/train.py:9")),
    "f8_exit1.log": Truth("HNG001", 2, MISSING),
    "f8_sigkill.log": died(2, "SIGKILL"),
    "f9_deepspeed.log": died(1, "SIGKILL"),
    "f9_iso.log": raised_by("a process in f9_iso.log"),
    "f9_openmpi5.log": RAISED_2,
    "f9_rank_style.log": RAISED_2,
    "f9_ray.log": raised_by("TrainWorker pid=31, ip=10.0.0.1"),
    "f9_raytask.log": raised_by("W pid=31, ip=10.0.0.1"),
    "f9_slurm.log": died(5, "want of memory"),
    "f9_spawn.log": died(1, "SIGKILL"),
    "f9_vllm.log": RAISED_2,
    "f10_json.log": RAISED_2,
    "f10_names": RAISED_2,
    "f10_srun.log": RAISED_2,
    "f10_tqdm.log": RAISED_2,
    "f10_utf16.log": RAISED_2,
}


def judge(report, truth):
    alarms = [f for f in report.findings if f.severity is not Severity.INFO]
    found = alarms or list(report.findings)
    assert [(f.code, str(f.severity)) for f in found] == [(truth.code, truth.severity)], found
    (finding,) = found
    for word in truth.words:
        assert word in finding.message
    labels = {info.rank: info.label for info in report.run.ranks}
    match truth.who:
        case int(rank):
            assert rank in finding.ranks
            assert len(finding.ranks) == 1 or truth.severity == "info"
            assert not labels[rank]
        case "":
            assert not finding.ranks
        case name:
            (number,) = finding.ranks
            assert name in labels[number]
            assert labels[number] in finding.message


@pytest.mark.parametrize(("name", "truth"), OF_FILES.items(), ids=list(OF_FILES))
def test_what_people_paste(name, truth):
    judge(analyze([INPUTS / name]), truth)


def test_shared_memory_that_is_too_small_is_the_cause_of_both_ranks_errors():
    (finding,) = analyze([INPUTS / "f5_shm.log"]).findings
    assert str(finding.ranks) == "0-1"
    assert finding.severity is Severity.ERROR
    assert all(word in finding.message for word in NO_SPACE)
    assert finding.why.startswith("/dev/shm is full or too small")
    assert "--shm-size" in finding.fix


def test_an_exit_with_status_1_is_no_matter_of_memory():
    (finding,) = analyze([INPUTS / "f8_exit1.log"]).findings
    text = f"{finding.message} {finding.why} {finding.fix}"
    assert "memory" not in text
    assert "signal" not in text


def test_sigkill_without_a_word_of_memory_says_how_to_tell():
    (finding,) = analyze([INPUTS / "f8_sigkill.log"]).findings
    assert "dmesg" in finding.fix
    assert "out-of-memory killer" in finding.why


@pytest.mark.parametrize(("log", "truth"), FAILED.values(), ids=list(FAILED))
def test_formats_of_launchers(log, truth, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(log)
    judge(analyze([path]), truth)


@pytest.mark.parametrize("log", HEALTHY.values(), ids=list(HEALTHY))
def test_healthy_logs_give_no_alarm(log, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(log)
    try:
        report = analyze([path])
    except UsageError as error:
        assert str(error).startswith("nothing that can be checked was found")
        return
    assert [f for f in report.findings if f.severity is not Severity.INFO] == []
