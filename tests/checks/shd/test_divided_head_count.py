from distdiag.checks.shd.divided_head_count import DividedHeadCount
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.models import model, plan
from tests.checks.verdicts import findings

HALVED = [plan("attention.qkv.weight", heads_divided_by=2), plan("up.weight")]


def test_the_parameters_of_the_module_and_the_ranks_are_named():
    (finding,) = findings(DividedHeadCount, model(HALVED, HALVED))
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1]), ("attention.qkv.weight",))
    assert finding.grade is Grade.LIKELY
    assert "has 2 times fewer attention heads than before" in finding.message


def test_only_the_ranks_concerned_are_named():
    whole = [plan("attention.qkv.weight"), plan("up.weight")]
    (finding,) = findings(DividedHeadCount, model(whole, HALVED, whole))
    assert finding.ranks == RankSet([1])


def test_whole_numbers_of_heads_are_silent():
    whole = [plan("attention.qkv.weight"), plan("up.weight")]
    assert not findings(DividedHeadCount, model(whole, whole))


def test_buffers_alone_are_silent():
    mask = [plan("attention.mask", is_parameter=False, heads_divided_by=2)]
    assert not findings(DividedHeadCount, model(mask, mask))
