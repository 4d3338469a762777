from distdiag.checks.shd.placement_count_mismatch import PlacementCountMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.models import mesh, model, plan
from tests.checks.verdicts import findings

GOOD = plan("a", placements=("R", "S(0)"), mesh=mesh(2, 2))
BAD = plan("b", placements=("S(0)",), mesh=mesh(2, 2))


def test_a_tensor_with_too_few_placements_is_named():
    (finding,) = findings(PlacementCountMismatch, model([GOOD, BAD], [GOOD, BAD]))
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1]), ("b",))
    assert finding.grade is Grade.PROVEN
    assert "(S(0)) on mesh dp_replicate=2 x dp_shard=2" in finding.message


def test_only_the_ranks_concerned_are_named():
    many = plan("a", placements=("R", "R", "S(0)"), mesh=mesh(2, 2))
    (finding,) = findings(PlacementCountMismatch, model([GOOD], [many]))
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 11)


def test_the_first_five_of_many_are_evidence():
    wrong = [plan(name, placements=("R",), mesh=mesh(2, 2)) for name in "abcdefg"]
    (finding,) = findings(PlacementCountMismatch, model(wrong, wrong))
    assert finding.subjects == tuple("abcdefg")
    assert len(finding.evidence) == 5
    assert "a and 6 more" in finding.message


def test_one_placement_for_each_dimension_is_silent():
    plain = plan("c")
    assert not findings(PlacementCountMismatch, model([GOOD, plain], [GOOD, plain]))
