import pytest

from distdiag.checks.moe.duplicated_experts import DuplicatedExperts
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.models import ExpertContents
from tests.checks.models import ZEROS, content, plan
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings

ROUTER = ("layer.gate.weight", (4, 8), content(0.1))


def view(*by_rank, evidence=ReplicaEvidence.WORLD, replicas=(0, 1)):
    """Each rank holds a router of four experts and what is given: names, shapes, contents."""
    held = {
        rank: tuple(
            (plan(name, shape=shape, evidence=evidence, replicas=replicas), each)
            for name, shape, each in (ROUTER, *parts)
        )
        for rank, parts in enumerate(by_rank)
    }
    return ExpertContents("Net", 0, held, {rank: plain_site(20) for rank in held})


def listed(*values, first=0):
    return [(f"layer.experts.{first + i}.weight", (8, 8), content(v)) for i, v in enumerate(values)]


def stacked(value, number=2):
    return [("layer.experts.weight", (number, 8, 8), content(value))]


def judged(*by_rank, **values):
    return findings(DuplicatedExperts, view(*by_rank, **values))


@pytest.mark.parametrize(
    "by_rank",
    [
        (listed(1.0, 2.0), listed(1.0, 2.0)),
        (listed(1.0, 2.0), listed(1.0, 2.0, first=2)),
        (stacked(1.0), stacked(1.0)),
        ([("layer.expert.up.weight", (8, 8), content(1.0))],) * 4,
    ],
    ids=["local numbers", "global numbers", "stacked", "one on each rank"],
)
def test_experts_that_all_ranks_hold_are_named(by_rank):
    (finding,) = judged(*by_rank)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet(range(len(by_rank))))
    assert "the router knows 4 experts" in finding.message
    assert finding.subjects[0].startswith("layer.")


@pytest.mark.parametrize(
    ("by_rank", "values"),
    [
        ((listed(1.0, 2.0), listed(3.0, 4.0)), {}),
        ((stacked(1.0), stacked(2.0)), {}),
        ((listed(1.0, 2.0, 3.0, 4.0),) * 2, {}),
        ((stacked(1.0, 4),) * 2, {}),
        ((listed(1.0, 1.0),) * 2, {}),
        ((listed(1.0, 2.0),) * 2, {"evidence": ReplicaEvidence.WRAPPER}),
        (([("layer.experts.0.bias", (8,), ZEROS)],) * 2, {}),
        (([("layer.shared_experts.0.weight", (8, 8), content(1.0))],) * 2, {}),
        ((listed(1.0),) * 2, {}),
    ],
    ids=[
        "parts of a list",
        "parts of a stack",
        "all experts everywhere",
        "a whole stack everywhere",
        "copies of a dense layer",
        "replicas, some experts compute nothing",
        "biases of zero",
        "experts that all tokens share",
        "stages that hold the rest",
    ],
)
def test_right_programs_are_silent(by_rank, values):
    assert not judged(*by_rank, **values)
