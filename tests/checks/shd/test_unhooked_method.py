from dataclasses import replace

from msgspec.structs import replace as replaced

from distdiag.checks.shd.unhooked_method import UnhookedMethod
from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.views.rank_states import JobView
from tests.checks.streams import Job
from tests.checks.verdicts import findings

LINE = Frame("train.py", 7, "generate")
MIXED = "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all"


def judged(unhooked, message=MIXED):
    job = Job(2)
    for rank in (0, 1):
        job.fail(rank, 5, LINE, kind="RuntimeError", message=message)
        state = job.states[rank]
        job.states[rank] = replace(state, raised=replaced(state.raised, unhooked=unhooked))
    return findings(UnhookedMethod, JobView(job.states))


def test_a_method_that_meets_shards_is_named():
    (finding,) = judged("Model.generate")
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 7)
    assert finding.subjects == ("Model.generate",)
    assert "called Model.generate, which FSDP2 does not know" in finding.message


def test_shards_in_a_forward_pass_and_other_exceptions_are_silent():
    assert not judged("")
    assert not judged("Model.generate", "bad prompt")
