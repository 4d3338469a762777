"""HNG019: what a log holds of known faults, where nothing else explains the end."""

from distdiag.checks.hng.known_fault import FaultView, KnownFault
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import FaultLogged
from distdiag.findings.finding import Grade, Severity
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import TORCH, Job, event_of
from tests.checks.verdicts import findings

FULL = "NCCL WARN Error: failed to extend /dev/shm/nccl-ab12 to 9637892 bytes"
GONE = "NCCL WARN socketProgress: Connection closed by remote peer n1<5>"


def line(fault, text, rank=0, **values):
    return event_of(FaultLogged, rank, fault=fault, text=text, file="train.log", **values)


def judged(*lines, job=None):
    return findings(KnownFault, FaultView(lines, (job or Job()).view().states))


def test_a_cause_in_the_log_is_named_with_its_rank_and_row():
    (finding,) = judged(line("nccl-shm-full", FULL, rank=1))
    assert (finding.ranks, finding.severity) == (RankSet([1]), Severity.ERROR)
    assert finding.grade is Grade.LIKELY
    assert finding.message == (
        f'rank 1 wrote "{FULL}": /dev/shm is full or too small (known fault nccl-shm-full)'
    )
    assert "--shm-size" in finding.fix and finding.why.startswith("/dev/shm is full")
    (seen,) = finding.evidence
    assert seen.values["known_fault"] == "nccl-shm-full"
    assert seen.values["see"].startswith("https://docs.nvidia.com/")


def test_a_consequence_does_not_hide_the_cause_before_or_after_it():
    cause = line("nccl-shm-full", FULL, rank=1, place=7)
    consequence = line("nccl-remote-gone", GONE, rank=0, place=1)
    for lines in ((cause, consequence), (consequence, cause)):
        (finding,) = judged(*lines)
        assert finding.ranks == RankSet([1])
        assert "also in the log: nccl-remote-gone" in [e.summary for e in finding.evidence]


def test_only_consequences_are_a_note():
    (finding,) = judged(line("nccl-remote-gone", GONE))
    assert (finding.severity, finding.ranks) == (Severity.INFO, RankSet())
    assert finding.message.startswith("rank 0 wrote")
    assert "follows from something else" in finding.message


def test_what_was_survived_is_a_note_unless_the_rank_failed():
    told = line("cuda-out-of-memory", "CUDA out of memory. Tried", was_survived=True)
    (finding,) = judged(told)
    assert finding.severity is Severity.INFO
    assert "and went on" in finding.message
    job = Job()
    job.set(0, status=RankStatus.DIED, left_ns=9, exit_status=1)
    (finding,) = judged(told, job=job)
    assert finding.severity is Severity.ERROR


def test_ranks_with_one_fault_are_one_finding_and_unlike_lines_are_shown():
    lines = [line("nccl-shm-full", f"{FULL} {rank}", rank=rank) for rank in range(2)]
    (finding,) = judged(*lines, line("nccl-shm-full", "No space left: /dev/shm/nccl-x", rank=0))
    assert finding.ranks == RankSet([0, 1])
    assert [evidence.ranks for evidence in finding.evidence] == [RankSet([0, 1]), RankSet([0])]


def test_the_first_of_two_causes_in_one_file_is_the_finding():
    first = line("cuda-ecc-error", "uncorrectable ECC error encountered", rank=1, place=2)
    second = line("nccl-shm-full", FULL, rank=0, place=5)
    (finding,) = judged(second, first)
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("cuda-ecc-error",))


def test_a_general_line_is_less_than_the_special_one_after_it():
    general = line("nccl-system-error", "unhandled system error", rank=0, place=1)
    (finding,) = judged(general, line("nccl-shm-full", FULL, rank=0, place=2))
    assert finding.subjects == ("nccl-shm-full",)


def test_a_line_of_nobody_blames_nobody():
    (finding,) = judged(line("nccl-shm-full", FULL, is_rank_known=False))
    assert finding.ranks == RankSet()
    assert finding.message.startswith("a rank that the log does not name wrote")


def test_what_a_rank_raised_is_left_to_hng001():
    job = Job()
    message = f"NCCL error in: x.hpp:1, unhandled system error\nLast error:\n{FULL}"
    job.fail(0, 5, TORCH, kind="DistBackendError", message=message)
    general = line("nccl-system-error", "unhandled system error")
    assert not judged(line("nccl-shm-full", FULL), general, job=job)


def test_nothing_in_the_log_is_silent():
    assert not judged()


def test_what_may_come_of_a_lost_peer_comes_after_a_cause():
    lost = line("ib-retry-exceeded", "NET/IB : Got completion with error 12", rank=0, place=1)
    (finding,) = judged(lost, line("cuda-ecc-error", "uncorrectable ECC error", rank=1, place=9))
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("cuda-ecc-error",))
    (finding,) = judged(lost)
    assert (finding.ranks, finding.severity) == (RankSet([0]), Severity.ERROR)
