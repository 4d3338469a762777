import math

import pytest

from distdiag.checks.rep.uninitialised_replica import UninitialisedReplica
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import ALL_NAN, NAN, ZEROS, content, contents, differing, mesh, replicas
from tests.checks.models import plan as plan_of
from tests.checks.verdicts import findings

FOUND = {
    "nan": ALL_NAN,
    "some-nan": content(0.0, nan_share=0.01),
    "huge": content(0.0, greatest=3e38),
    "hugely-negative": content(0.0, least=-2e15),
    "subnormal": content(0.0, least=0.0, greatest=1e-40, subnormal_share=0.5),
}
PLAUSIBLE = {
    "values": content(0.3),
    "zeros": ZEROS,
    "large": content(0.0, greatest=1e14),
    "few-subnormal": content(0.0, subnormal_share=0.05),
    "many-zeros": content(0.0, zero_share=0.9),
    "empty": content(NAN, least=NAN, greatest=NAN, digest="c0", num_elements=0),
}


def one_view(check_view, **changes):
    """The findings about one tensor with this plan, which one rank holds."""
    view = contents({"w": check_view})
    view.by_rank[0] = ((plan_of("w", **changes), check_view),)
    return findings(UninitialisedReplica, view)


# What the ranks hold


def test_a_bias_that_begins_with_zeros_is_not_unwritten_where_all_else_differs():
    zero = differing(ZEROS, 0.01, name="norm.bias")
    rest = [differing(0.3, 0.01, name=name) for name in "abc"]
    assert not findings(UninitialisedReplica, replicas(zero, *rest))
    assert findings(UninitialisedReplica, replicas(zero))


@pytest.mark.parametrize("found", FOUND.values(), ids=FOUND)
def test_the_rank_with_memory_as_it_was_found_is_named(found):
    (finding,) = findings(UninitialisedReplica, contents({"w": content(0.1)}, {"w": found}))
    assert (finding.ranks, finding.subjects, finding.grade) == (RankSet([1]), ("w",), Grade.LIKELY)
    assert (finding.severity, finding.location.line) == (Severity.ERROR, 21)
    assert "w of DDP Net: never written on rank 1" in finding.message


@pytest.mark.parametrize("plausible", PLAUSIBLE.values(), ids=PLAUSIBLE)
def test_plausible_values_are_silent(plausible):
    held = {"a": content(0.1), "b": content(0.2), "w": plausible}
    assert not findings(UninitialisedReplica, contents({**held, "w": content(0.1)}, held))


@pytest.mark.parametrize(
    ("held", "plan", "is_found"),
    [
        (content(0.3), {"emptied": content(0.3).digest}, True),
        (content(0.3), {"emptied": content(0.4).digest}, False),
        (content(1.0, least=1.0, greatest=1.0, digest="c1"), {"emptied": "c1"}, False),
        (content(0.3), {"emptied": content(0.3).digest, "is_parameter": False}, False),
    ],
    ids=["as-it-was", "written", "one-number", "buffer-for-later"],
)
def test_what_to_empty_left_is_named_whatever_it_is(held, plan, is_found):
    found = one_view(held, **plan)
    assert [each.subjects for each in found] == [("w",)] * is_found
    assert all("as `to_empty` left it" in each.evidence[0].summary for each in found)


@pytest.mark.parametrize("emptied_on_0", [False, True])
def test_memory_that_held_the_same_weights_before_may_have_been_written(emptied_on_0):
    held = content(0.3)
    view = contents({"w": held}, {"w": held})
    view.by_rank[1] = ((plan_of("w", emptied=held.digest), held),)
    if emptied_on_0:
        view.by_rank[0] = ((plan_of("w", emptied=held.digest), held),)
    assert bool(findings(UninitialisedReplica, view)) == emptied_on_0


def test_memory_as_it_was_found_is_named_even_on_all_ranks():
    (finding,) = findings(UninitialisedReplica, contents({"w": ALL_NAN}, {"w": ALL_NAN}))
    assert finding.ranks == RankSet([0, 1])


def test_a_rank_most_of_whose_parameters_are_zero_is_named():
    good = {name: content(0.1) for name in "abcd"}
    (finding,) = findings(UninitialisedReplica, contents(good, {**dict.fromkeys("abc", ZEROS)}))
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("a", "b", "c"))


@pytest.mark.parametrize(
    "evidence", [ReplicaEvidence.WORLD, ReplicaEvidence.SENT, ReplicaEvidence.UNSYNCED]
)
def test_zeros_of_a_rank_that_may_have_a_model_of_its_own_are_silent(evidence):
    good = {name: content(0.1) for name in "abcd"}
    held = [good, dict.fromkeys("abcd", ZEROS)]
    assert not findings(UninitialisedReplica, contents(*held, evidence=evidence, wrapper=""))
    assert findings(UninitialisedReplica, contents(*held))


FLAT = {"wrapper": "FSDP1", "shape": (), "replicas": ()}


def of_pieces(*held_by_rank):
    """What ranks hold of flat parameters, beside a buffer that the wrapper keeps alike."""
    view = contents(*[{"scale": content(1.0)}] * len(held_by_rank), is_parameter=False)
    for rank, held in enumerate(held_by_rank):
        view.by_rank[rank] += tuple((plan_of(name, **FLAT), each) for name, each in held.items())
    return findings(UninitialisedReplica, view)


def test_a_piece_of_a_flat_parameter_may_be_zero_or_empty():
    values = {name: content(0.1) for name in "abcd"}
    assert not of_pieces(values, dict.fromkeys("abcd", ZEROS))
    assert not of_pieces({"_flat_param": content(0.1)}, {"_flat_param": ZEROS})
    assert not of_pieces(values, {**dict.fromkeys("abc", PLAUSIBLE["empty"]), "d": ZEROS})


def test_a_piece_of_a_flat_parameter_that_holds_memory_as_it_was_found_is_named():
    (finding,) = of_pieces({"w": content(0.1)}, {"w": ALL_NAN})
    assert finding.ranks == RankSet([1])


def test_memory_as_it_was_found_is_named_even_in_a_model_of_its_own():
    held = [{"w": content(0.1)}, {"w": ALL_NAN}]
    assert findings(
        UninitialisedReplica, contents(*held, evidence=ReplicaEvidence.WORLD, wrapper="")
    )


def test_zeros_of_a_rank_of_a_mesh_are_named_though_each_holds_its_own_shard():
    good, bad = {name: content(0.1) for name in "ab"}, dict.fromkeys("ab", ZEROS)
    values = {"mesh": mesh(2), "evidence": ReplicaEvidence.MESH, "replicas": (), "wrapper": "FSDP2"}
    (finding,) = findings(UninitialisedReplica, contents(good, bad, **values))
    assert finding.ranks == RankSet([1])


@pytest.mark.parametrize("num_zero", [1, 4])
def test_zeros_on_all_ranks_are_how_a_model_begins(num_zero):
    held = {**{name: content(0.1) for name in "abcd"}, **dict.fromkeys("abcd"[:num_zero], ZEROS)}
    assert not findings(UninitialisedReplica, contents(held, held))


def test_a_few_zeros_on_one_rank_are_left_to_what_should_be_the_same():
    good = {name: content(0.1) for name in "abcd"}
    assert not findings(UninitialisedReplica, contents(good, {**good, "a": ZEROS}))


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint8", "float8_e4m3fn"])
def test_narrow_and_whole_numbers_tell_nothing(dtype):
    assert not one_view(content(0.0, greatest=3e38, subnormal_share=0.5), dtype=dtype)


def test_a_buffer_may_hold_huge_numbers_on_purpose():
    mask = content(0.0, least=-3e38)
    assert not one_view(mask, is_parameter=False)
    assert one_view(mask)


def test_a_buffer_may_not_hold_nan():
    assert one_view(ALL_NAN, is_parameter=False)


# Copies


def test_zeros_on_the_one_rank_of_two_are_named():
    (finding,) = findings(UninitialisedReplica, replicas(differing(0.1, ZEROS)))
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)
    assert "never written on rank 1" in finding.message


def test_all_ranks_but_the_one_that_loaded_are_named():
    (finding,) = findings(UninitialisedReplica, replicas(differing(0.1, ZEROS, ZEROS, ZEROS)))
    assert finding.ranks == RankSet([1, 2, 3])


def test_copies_with_plausible_values_are_silent():
    assert not findings(UninitialisedReplica, replicas(differing(0.1, 0.2, 0.3)))


def test_copies_with_memory_as_it_was_found_are_not_named_twice():
    assert not findings(UninitialisedReplica, replicas(differing(0.1, ALL_NAN)))


def test_a_single_zero_may_be_a_count_or_a_switch():
    single = content(0.0, least=0.0, greatest=0.0, zero_share=1.0, num_elements=1)
    assert not findings(UninitialisedReplica, replicas(differing(0.1, single)))


@pytest.mark.parametrize("dtype", ["int64", "bool", "float16"])
def test_zeros_of_narrow_and_whole_numbers_may_be_meant(dtype):
    assert not findings(UninitialisedReplica, replicas(differing(0.1, ZEROS, dtype=dtype)))


@pytest.mark.parametrize("evidence", list(ReplicaEvidence))
def test_a_buffer_of_zeros_is_named_where_all_ranks_should_hold_the_same(evidence):
    view = replicas(differing(0.1, ZEROS, is_parameter=False, evidence=evidence))
    is_known = evidence in (ReplicaEvidence.MESH, ReplicaEvidence.WRAPPER, ReplicaEvidence.MODEL)
    assert bool(findings(UninitialisedReplica, view)) is is_known


def test_an_empty_tensor_was_not_forgotten():
    empty = content(math.nan, zero_share=1.0, num_elements=0)
    assert not findings(UninitialisedReplica, replicas(differing(0.1, empty)))


def test_unwritten_copies_come_first_and_the_others_follow():
    view = replicas(differing(0.1, 0.2, name="a"), differing(0.1, ZEROS, name="b"))
    (finding,) = findings(UninitialisedReplica, view)
    assert finding.subjects == ("b", "a")
    assert "b and 1 more" in finding.message


def test_without_a_reason_to_compare_it_is_a_note():
    (finding,) = findings(
        UninitialisedReplica, replicas(differing(0.1, ZEROS), evidence=ReplicaEvidence.WORLD)
    )
    assert finding.grade is Grade.NOTE
