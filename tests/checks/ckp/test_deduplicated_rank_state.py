import pytest

from distdiag.checks.ckp.deduplicated_rank_state import DeduplicatedRankState
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.loads import entry, restored, saved
from tests.checks.streams import together
from tests.checks.verdicts import findings


def found(*events):
    return findings(DeduplicatedRankState, together(*events))


def both(key, *values, **more):
    return found(*(saved(rank, entry(key, v, **more)) for rank, v in enumerate(values)))


def test_positions_that_differ_under_one_key_are_named():
    (finding,) = both("loader.position", 14, 15)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert finding.subjects == ("loader.position",)
    assert [each.summary for each in finding.evidence] == [
        "saved loader.position: 14",
        "saved loader.position: 15",
    ]


def test_bytes_in_a_plain_dict_are_a_state_too():
    (finding,) = both("loader.0", "10 bytes", "11 bytes", kind="bytes", is_stateful=False)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("rng_state", "Tensor"),
        ("stats.average", "float"),
        ("run.host", "int"),
        ("a.time_ns", "int"),
    ],
)
def test_generators_and_measured_values_are_notes(key, kind):
    (finding,) = both(key, 3, 4, kind=kind)
    assert finding.grade is Grade.NOTE


def test_a_number_beside_the_weights_and_the_rank_itself_are_notes():
    assert both("step", 3, 4, is_stateful=False)[0].grade is Grade.NOTE
    assert both("place.number", 0, 1)[0].grade is Grade.NOTE


def test_equal_values_and_keys_of_one_rank_are_silent():
    assert not both("loader.position", 14, 14)
    assert not found(saved(0, entry("loader_0.at", 1)), saved(1, entry("loader_1.at", 2)))


def test_checkpoints_of_each_rank_are_silent():
    first, second = saved(0, entry("at.x", 1)), saved(1, entry("at.x", 2), checkpoint="/other")
    assert not found(first, second)


def test_a_value_that_came_back_as_that_of_another_rank_is_proven():
    (finding,) = found(restored(1, entry("step", "15 came back as 14", is_stateful=False)))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.PROVEN)
    assert finding.ranks == RankSet([1])
