import pytest

from distdiag.checks.shd.sharding_plan_mismatch import ShardingPlanMismatch
from distdiag.events.models import Policy, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import mesh, model, plan
from tests.checks.verdicts import findings

BASE = {
    "wrapper": "FSDP2",
    "unit": "layers.0",
    "placements": ("S(0)",),
    "mesh": mesh(4),
    "replicas": (0,),
}
ASPECTS = [
    ({"shape": (4, 8)}, "global shape [4, 4] on ranks 0-2, [4, 8] on rank 3"),
    ({"dtype": "bfloat16"}, "dtype float32 on ranks 0-2, bfloat16 on rank 3"),
    ({"placements": ("R",)}, "placement S(0) on ranks 0-2, R"),
    ({"placements": ()}, "not sharded on rank 3"),
    ({"mesh": mesh(2, 2)}, "mesh dp_replicate=4 on ranks 0-2, dp_replicate=2 x dp_shard=2 on"),
    ({"wrapper": ""}, "wrapper FSDP2 on ranks 0-2, none on rank 3"),
    ({"unit": ""}, "wrapped unit layers.0 on ranks 0-2, the root on rank 3"),
    (
        {"policy": Policy(param_dtype="bfloat16")},
        "param_dtype that of the parameter on ranks 0-2, bfloat16 on rank 3",
    ),
    (
        {"policy": Policy(reduce_dtype="float32")},
        "reduce_dtype that of the gradient on ranks 0-2, float32 on rank 3",
    ),
    ({"policy": Policy(offload="cpu")}, "offload none on ranks 0-2, cpu on rank 3"),
    (
        {"policy": Policy(reshard_after_forward="False")},
        "reshard_after_forward none on ranks 0-2, False on rank 3",
    ),
    ({"requires_grad": False}, "requires_grad True on ranks 0-2, False on rank 3"),
    ({"tied_to": "embedding.weight"}, "tie not tied on ranks 0-2, embedding.weight on rank 3"),
    ({"mesh": mesh(4, ranks=(1, 0, 2, 3))}, "order of ranks on the mesh [0, 1, 2, 3] on ranks 0-2"),
]


def sharded(name="layers.0.weight", **changes):
    return plan(name, **{**BASE, **changes})


@pytest.mark.parametrize(
    ("change", "words"), ASPECTS, ids=[words.split()[0] for _, words in ASPECTS]
)
def test_the_aspect_and_the_rank_against_the_majority_are_named(change, words):
    view = model(*[[sharded()]] * 3, [sharded(**change)])
    (finding,) = findings(ShardingPlanMismatch, view)
    assert (finding.ranks, finding.grade) == (RankSet([3]), Grade.PROVEN)
    assert (finding.subjects, finding.location.line) == (("layers.0.weight",), 13)
    assert words in finding.message


def test_two_ranks_are_both_named_and_neither_is_surely_wrong():
    (finding,) = findings(ShardingPlanMismatch, model([sharded()], [sharded(dtype="bfloat16")]))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_a_missing_tensor_is_named_wherever_it_stands():
    names = [sharded("a"), sharded("b"), sharded("c")]
    (finding,) = findings(ShardingPlanMismatch, model(names, names, [names[0], names[2]]))
    assert (finding.subjects, finding.ranks) == (("b",), RankSet([2]))
    assert "presence there on ranks 0-1, missing on rank 2" in finding.message


def test_a_tensor_that_only_one_rank_has_is_named():
    (finding,) = findings(
        ShardingPlanMismatch, model([sharded()], [sharded()], [sharded(), sharded("extra")])
    )
    assert (finding.subjects, finding.ranks) == (("extra",), RankSet([2]))


def test_the_first_tensor_in_the_order_of_the_model_is_named():
    good = [sharded(name) for name in "abc"]
    bad = [sharded("a"), sharded("b", unit=""), sharded("c", dtype="float16")]
    (finding,) = findings(ShardingPlanMismatch, model(good, good, bad))
    assert finding.subjects == ("b",)


def test_every_value_is_evidence():
    view = model([sharded()], [sharded(dtype="float16")], [sharded(dtype="bfloat16")])
    (finding,) = findings(ShardingPlanMismatch, view)
    assert [each.ranks for each in finding.evidence] == [RankSet([n]) for n in range(3)]
    assert finding.ranks == RankSet([0, 1, 2])


def test_equal_plans_are_silent():
    assert not findings(ShardingPlanMismatch, model(*[[sharded(), sharded("b")]] * 4))


@pytest.mark.parametrize(
    "change", [{"replicas": (1, 3)}, {"owners": ("AdamW",)}, {"is_late": True}], ids=str
)
def test_what_may_differ_between_ranks_is_silent(change):
    assert not findings(ShardingPlanMismatch, model([sharded()], [sharded(**change)]))


def test_submeshes_of_other_ranks_are_no_other_order():
    halves = [sharded(mesh=mesh(2, ranks=ranks)) for ranks in ((0, 1), (0, 1), (2, 3), (2, 3))]
    assert not findings(ShardingPlanMismatch, model(*[[half] for half in halves]))


def test_parts_that_each_rank_has_for_itself_are_a_note():
    dense = {"wrapper": "DDP", "replicas": (0, 1), "evidence": ReplicaEvidence.WRAPPER}
    own = {"wrapper": "", "evidence": ReplicaEvidence.WORLD}
    tables = {0: [plan("tables.0", **own), plan("tables.1", **own)], 1: [plan("tables.0", **own)]}
    plans = {rank: (*tables[rank], plan("top.weight", **dense)) for rank in (0, 1)}
    (finding,) = findings(ShardingPlanMismatch, model(*plans.values()))
    assert (finding.grade, finding.subjects) == (Grade.NOTE, ("tables.1",))


DENSE = {"wrapper": "DDP", "replicas": (0, 1), "evidence": ReplicaEvidence.WRAPPER}
IGNORED = {"wrapper": "", "replicas": (), "evidence": ReplicaEvidence.WRAPPER, "is_ignored": True}
OWN = {"wrapper": "", "replicas": (), "evidence": ReplicaEvidence.OWN}


@pytest.mark.parametrize("declared", [IGNORED, OWN], ids=["ignored", "marked"])
def test_names_that_one_rank_has_for_itself_as_declared_are_silent(declared):
    top = plan("top.weight", **DENSE)
    experts = [plan(f"experts.{number}.weight", **declared) for number in range(4)]
    view = model([*experts[:2], top], [*experts[2:], top])
    assert not findings(ShardingPlanMismatch, view)


def test_a_missing_name_beside_declared_ones_is_still_found():
    experts = [plan(f"experts.{number}.weight", **IGNORED) for number in range(2)]
    view = model([experts[0], plan("top.weight", **DENSE)], [experts[1]])
    (finding,) = findings(ShardingPlanMismatch, view)
    assert (finding.subjects, finding.grade) == (("top.weight",), Grade.LIKELY)


def test_what_only_one_rank_ignores_is_found():
    view = model([plan("gate.weight", **DENSE)], [plan("gate.weight", **IGNORED)])
    (finding,) = findings(ShardingPlanMismatch, view)
    assert "wrapper DDP on rank 0, none on rank 1" in finding.message
    assert finding.severity is Severity.ERROR


def test_other_shapes_of_what_all_ranks_ignore_are_a_note():
    top = plan("top.weight", **DENSE)
    view = model(
        [plan("experts.weight", shape=(3, 4), **IGNORED), top],
        [plan("experts.weight", shape=(2, 4), **IGNORED), top],
    )
    (finding,) = findings(ShardingPlanMismatch, view)
    assert finding.grade is Grade.NOTE
