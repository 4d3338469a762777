"""What stuck jobs leave in logs and stacks: the right rank, the right call, and nobody else."""

from pathlib import Path

import pytest

from distdiag.analysis import analyze
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Grade, Severity
from tests.analysis.stuck_logs import CASES, QUIET

SHARED = Path(__file__).parent / "postmortem"


def judge(path, **options):
    report = analyze([path], **options)
    bad = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    return report, bad


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stuck_job_is_judged_rightly(tmp_path, case):
    for name, content in case.files.items():
        (tmp_path / name).write_text(content)
    report, bad = judge(tmp_path)
    if case.code is None:
        assert [(f.code, f.message) for f in bad] == []
        return
    assert [(f.code, str(f.ranks)) for f in bad] == [(case.code, case.culprits)]
    (finding,) = bad
    for words in case.words:
        assert words in finding.message
    if case.certainty:
        assert finding.grade is Grade(case.certainty)
    if case.location:
        assert str(finding.location) == case.location
    assert "DIA002" not in {f.code for f in report.findings}


@pytest.mark.parametrize("name", QUIET)
def test_the_log_of_a_job_without_a_fault_gives_nothing(tmp_path, name):
    path = tmp_path / "train.log"
    path.write_text("\n".join(QUIET[name]) + "\n")
    try:
        _, bad = judge(tmp_path)
    except UsageError as error:
        assert "nothing that can be checked" in str(error)
        return
    assert [(f.code, f.message) for f in bad] == []


SHARED_TRUTH = {
    "f1_kind.log": ("COL002", "3", "#41", Grade.PROVEN),
    "f1_behind.log": ("COL001", "3", "never called all_reduce #41", Grade.LIKELY),
    "f1_same.log": ("HNG016", "", "wait in all_reduce #41", Grade.LIKELY),
    "f2_victim.log": ("COL001", "3", "never called all_reduce #41", Grade.LIKELY),
    "f3_stacks": ("HNG017", "2", "rank 2 is at train.py:31", Grade.LIKELY),
    "f6_all_pending": ("HNG016", "", "wait in all_reduce #2", Grade.LIKELY),
    "f6_one_missing": ("COL001", "2", "rank 2 left no record", Grade.LIKELY),
    "f7_one_file.txt": ("HNG017", "2", "pid 102 is at train.py:31", Grade.LIKELY),
}


@pytest.mark.parametrize("name", SHARED_TRUTH)
def test_what_people_bring_is_judged_rightly(name):
    code, culprits, words, grade = SHARED_TRUTH[name]
    report, (finding,) = judge(SHARED / name)
    assert (finding.code, str(finding.ranks), finding.grade) == (code, culprits, grade)
    assert words in finding.message
    assert not report.silent_ranks
    shown = {code: reason for code, reason in report.not_checked.items() if "rank" in code}
    assert shown == ({"rank 2": "nothing of them was found"} if "missing" in name else {})


def test_both_operations_of_a_contradiction_are_reported():
    _, (finding,) = judge(SHARED / "f1_kind.log")
    assert "all_reduce on ranks 0-2 but broadcast on rank 3" in finding.message


def test_how_far_the_rank_came_that_lies_behind():
    _, (finding,) = judge(SHARED / "f1_behind.log")
    assert "rank 3 had come no further than #40 in group default_pg" in finding.message


def test_where_all_are_equal_it_is_reported_what_to_collect_next():
    _, (finding,) = judge(SHARED / "f1_same.log")
    assert "for 600 s" in finding.message
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in finding.fix
    assert "Suspect a rank without a record first" in finding.why


@pytest.mark.parametrize("name", ["f3_stacks", "f6_all_pending", "f6_one_missing"])
def test_how_long_it_stood_still_is_reported_only_where_it_is_known(name):
    report, (finding,) = judge(SHARED / name)
    assert " s:" not in finding.message and " s;" not in finding.message
    assert not finding.message.endswith(" s")
    assert "assumed" not in str(report.not_checked)


def test_a_log_and_a_dump_of_one_job_do_not_contradict_one_another(tmp_path):
    for path in (SHARED / "f6_one_missing").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.log").write_text(
            f"[rank{rank}]:[E1] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=64, "
            "NumelOut=64, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
        )
    _, (finding,) = judge(tmp_path)
    assert (finding.code, str(finding.ranks)) == ("COL001", "2")
