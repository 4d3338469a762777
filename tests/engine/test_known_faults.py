"""What logs and stacks show of known faults supports findings, and stands alone where none does."""

from distdiag.checks.base import Check
from distdiag.checks.hng.known_fault import KnownFault
from distdiag.events.base import Frame
from distdiag.events.lifecycle import Raised, TorchLoaded
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import FaultLogged, Stacks, ThreadStack
from distdiag.findings.finding import Evidence, Severity
from distdiag.findings.known_faults import known_faults
from tests.checks.streams import event_of
from tests.engine.aligned import engine_of

FULL = "NCCL WARN Error: failed to extend /dev/shm/nccl-ab12 to 9637892 bytes"


def line(rank=0, fault="nccl-shm-full", text=FULL, **values):
    return event_of(FaultLogged, rank, fault=fault, text=text, file="train.log", **values)


def raised(rank, message="bad", **values):
    frames = (Frame("/data/train.py", 9, "main"),)
    return event_of(
        Raised, rank, type="ValueError", message=message, frames=frames, traceback="", **values
    )


def stacks(rank, *names):
    frames = tuple(Frame("lib.cpp", 1, name, user=False) for name in names)
    thread = ThreadStack("pt_gloo", frames)
    return event_of(Stacks, rank, source="py-spy", threads=(thread,), is_native=True)


class Wrong(Check[TorchLoaded]):
    """Something is wrong with rank 0."""

    code, name, severity = "TST001", "wrong", Severity.WARNING

    def check(self, view):
        yield self.finding("wrong", ranks=RankSet([view.rank]), evidence=(), step=0)


def summaries(finding):
    return [(evidence.summary, evidence.ranks) for evidence in finding.evidence]


def test_a_line_alone_is_the_finding():
    found = engine_of(line(1)).findings
    assert [(f.code, f.ranks) for f in found if f.severity is Severity.ERROR] == [
        ("HNG019", RankSet([1]))
    ]


def test_a_line_is_no_sign_of_life():
    engine = engine_of(line(1))
    assert engine.states()[1].status == "silent"


def test_a_line_is_evidence_for_what_else_is_found_of_its_rank():
    loaded = event_of(TorchLoaded, 0, torch="2.13.0", tap="none")
    found = engine_of(loaded, line(0), checks=[Wrong(), KnownFault()]).findings
    by_code = {finding.code: finding for finding in found}
    assert ("it is the known fault nccl-shm-full", RankSet([0])) in summaries(by_code["TST001"])
    # What is proven beside it is less severe, so both stand.
    assert by_code["HNG019"].severity is Severity.ERROR


def test_what_a_rank_raised_itself_is_reported_once():
    engine = engine_of(raised(0, f"NCCL error\n{FULL}"), line(0), world=[0])
    (finding,) = engine.findings
    assert finding.code == "HNG001"
    rows = [e for e in finding.evidence if "known_fault" in e.values]
    assert len(rows) == 1


def test_stacks_support_the_findings_about_their_rank_and_no_others():
    frames = ("pthread_join", "c10d::ProcessGroupGloo::~ProcessGroupGloo()", "~AsyncAllgatherWork")
    loaded = [event_of(TorchLoaded, rank, torch="2.13.0", tap="none") for rank in (0, 1)]
    engine = engine_of(
        stacks(0, *frames), stacks(1, *frames[:2]), *loaded, checks=[Wrong(), KnownFault()]
    )
    by_ranks = {finding.ranks: finding for finding in engine.findings}
    row = ("it is the known fault gloo-shutdown-deadlock", RankSet([0]))
    assert row in summaries(by_ranks[RankSet([0])])
    assert not any("known fault" in summary for summary, _ in summaries(by_ranks[RankSet([1])]))


def test_why_there_was_no_such_line_is_reported():
    engine = engine_of(raised(0))
    assert engine.not_checked["HNG019"] == "no line of a known fault is in a log"
    assert "HNG019" in engine.idle
    assert "HNG019" not in engine_of(line(0)).not_checked


def test_evidence_names_row_and_source():
    row = next(row for row in known_faults() if row.id == "nccl-shm-full")
    assert row.evidence([1], said="x") == Evidence(
        ranks=RankSet([1]),
        summary="it is the known fault nccl-shm-full",
        values={"said": "x", "known_fault": row.id, "whose": "machine", "see": row.link},
    )
