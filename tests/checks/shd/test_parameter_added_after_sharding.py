import pytest

from distdiag.checks.shd.parameter_added_after_sharding import ParameterAddedAfterSharding
from distdiag.events.models import Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def late(*tensors, moment=Moment.GRADIENT):
    return findings(ParameterAddedAfterSharding, replicas(*tensors, moment=moment))


@pytest.mark.parametrize(
    ("moment", "what"), [(Moment.START, "values"), (Moment.GRADIENT, "gradients")]
)
def test_a_late_parameter_that_differs_is_named_with_all_ranks(moment, what):
    (finding,) = late(differing(0.1, 0.1, 0.3, name="q.lora_A", is_late=True), moment=moment)
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1, 2]), ("q.lora_A",))
    assert finding.grade is Grade.PROVEN
    assert f"ranks 0-2 hold different {what}" in finding.message


def test_others_beside_it_are_not_named():
    view = differing(0.1, 0.3), differing(0.1, 0.3, name="q.lora_A", is_late=True)
    (finding,) = late(*view)
    assert finding.subjects == ("q.lora_A",)


def test_a_parameter_that_was_there_in_time_is_silent():
    assert not late(differing(0.1, 0.3))
