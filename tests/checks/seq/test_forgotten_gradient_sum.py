"""Parameters that sums leave out by mistake are reported; those that are meant to be are not."""

from dataclasses import replace

import msgspec
import pytest

from distdiag.checks.seq.forgotten_gradient_sum import ForgottenGradientSum
from distdiag.events.gradients import AutogradNode, Flow, GradientSum, GradientSums
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.gradients import GradientSample, GradientView, Sum, SumsView
from tests.checks.gradients import NOTHING, ROUNDING, given
from tests.checks.models import plan
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings

PAIR = (0, 1)
LAYERS = ("norm.weight", "gate.weight", "mlp.weight", "mlp.bias")
NAMES = ["embed.weight", *(f"layers.{n}.{part}" for n in range(4) for part in LAYERS)]
NAMES += ["head.weight", "head.bias"]
EXPERTS = [f"layers.{n}.experts.0.weight" for n in range(4)]


def sums(*forgotten, sometimes=(), num_samples=3, names=NAMES, shapes=None, **values):
    """A program that sums all gradients but the forgotten ones."""
    own = {name for name in names if any(part in name for part in forgotten)}
    reported = {name: (Sum.OWN if name in own else Sum.SUMMED,) * num_samples for name in names}
    other = {Sum.SUMMED: Sum.OWN, Sum.OWN: Sum.SUMMED}
    reported |= {name: (other[reported[name][0]], *reported[name][1:]) for name in sometimes}
    plans = {n: plan(n, owners=("SGD",), shape=(shapes or {}).get(n, (4, 4))) for n in names}
    values.setdefault("drifted", frozenset(own))
    return SumsView("Net", PAIR, plans, reported, step=0, site=plain_site(30), **values)


def judged(view):
    return findings(ForgottenGradientSum, view)


@pytest.mark.parametrize(
    "names",
    [
        ("layers.2.norm.weight",),
        ("layers.3.mlp.bias", "layers.3.mlp.weight"),
        ("layers.0.norm.weight", "layers.3.norm.weight"),
    ],
)
def test_what_is_torn_out_of_a_layer_and_of_its_kind_is_reported(names):
    (finding,) = judged(sums(*names))
    assert (finding.subjects, finding.ranks) == (names, RankSet(PAIR))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert f"while those of {len(NAMES) - len(names)} other parameters are" in finding.message
    assert finding.location.line == 30


def test_all_routers_are_reported_where_there_are_experts_beside_them():
    (finding,) = judged(sums(".gate.", names=[*NAMES, *EXPERTS]))
    assert finding.subjects == tuple(f"layers.{n}.gate.weight" for n in range(4))


def test_routers_beside_experts_that_each_rank_trains_alike_may_be_its_own():
    (finding,) = judged(sums(".gate.", "experts", names=[*NAMES, *EXPERTS]))
    assert all(".gate." in name for name in finding.subjects)
    assert finding.severity is Severity.INFO
    assert "each rank also trains experts for itself" in finding.message
    (finding,) = judged(sums("layers.2.norm.weight", "experts", names=[*NAMES, *EXPERTS]))
    assert finding.severity is Severity.WARNING


def test_what_is_summed_now_and_then_may_be_meant():
    (finding,) = judged(sums("layers.2.norm.weight", is_more_sent=True))
    assert finding.severity is Severity.INFO
    assert "more was sent between these ranks in a later step" in finding.message


def test_ranks_that_clip_the_rest_by_norms_of_their_own_are_reported():
    (finding,) = judged(sums("layers.2.norm.weight", drifted=frozenset(NAMES)))
    assert finding.subjects == ("layers.2.norm.weight",)


OWN_PARTS = {
    "a head": sums("head."),
    "a bias of the head": sums("head.bias"),
    "an embedding": sums("embed."),
    "the last layer": sums("layers.3."),
    "all norms": sums(".norm."),
    "all biases": sums("bias"),
    "gates of what are no experts": sums(".gate."),
    "a part of another size": sums("layers.1.mlp.weight", shapes={"layers.1.mlp.weight": (2, 4)}),
}


@pytest.mark.parametrize("name", OWN_PARTS)
def test_a_whole_module_or_kind_may_be_that_of_a_task_unless_there_is_one_task_only(name):
    (finding,) = judged(OWN_PARTS[name])
    assert finding.severity is Severity.INFO
    assert "each rank may have a task of its own" in finding.message
    (finding,) = judged(replace(OWN_PARTS[name], is_one_task=True))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    (finding,) = judged(replace(OWN_PARTS[name], is_one_task=True, is_more_sent=True))
    assert finding.severity is Severity.INFO


MEANT = {
    "nothing": sums(),
    "the last layers and the head": sums("layers.2.", "layers.3.", "head."),
    "gates and heads of tasks": sums(".gate.", "head.", names=[*NAMES, *EXPERTS]),
    "experts": sums("experts", names=[*NAMES, *EXPERTS]),
    "one of several experts": sums(
        "layers.1.experts.0", names=[*NAMES, *EXPERTS, "layers.1.experts.1.weight"]
    ),
    "most": sums("layers."),
    "beside shards": sums("layers.2.norm.weight", has_shards=True),
    "reduced in turns": sums("layers.2.norm.weight", sometimes=["layers.1.mlp.bias"]),
    "reduced at times": sums("layers.2.norm.weight", sometimes=["layers.2.norm.weight"]),
    "seen twice only": sums("layers.2.norm.weight", num_samples=2),
    "copies that are equal again": sums("layers.2.norm.weight", drifted=frozenset()),
    "few others": sums("layers.1.a", names=["layers.0.a", "layers.1.a", "layers.1.b"]),
    "local steps of all": sums("."),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_may_be_meant_is_not_reported(name):
    assert not judged(MEANT[name])


def test_another_optimizer_may_be_that_of_the_rank():
    view = sums("layers.2.norm.weight")
    mine = msgspec.structs.replace(view.plans["layers.2.norm.weight"], owners=("Adam",))
    view.plans["layers.2.norm.weight"] = mine
    assert not judged(view)


# Parts of sequences

UP, DOWN = Flow(32, 1.0, 2.0), Flow(64, 1.0, 2.0)
PARTS = ("layers.0.bias", "layers.0.norm.weight", "layers.1.bias", "layers.1.norm.weight")
SHARDS = tuple(f"layers.{n}.{part}.weight" for n in (0, 1) for part in ("up", "down"))
OUTSIDE = ("head.weight", "positions")


def gradient(name, rank, step, members, **values):
    applied = sum(given(name, each, step) for each in members)
    is_shard = name in SHARDS
    values.setdefault("weight", 0.5 + 0.1 * rank * (is_shard or (members == (rank,) and step)))
    own, weight = given(name, rank, step), values.pop("weight")
    sums = {"passes": ((own,),), "norms": (2.0,), "left": (), "applied": (applied,)}
    return GradientSum(name, 16, (), 0, weight, rounding=ROUNDING, **sums, **values)


def nodes(way):
    """Two layers of norm, gather, shards, scatter; the gradient comes the other way."""
    scatter, gather = (UP, DOWN), (DOWN, UP)
    if way == "experts":
        scatter = gather = (UP, UP)
    if way == "gathered twice":
        scatter = gather
    last = ("layers.1.norm.weight", "layers.0.bias", "positions")
    root = ("layers.1.bias", *OUTSIDE)
    sides = [
        AutogradNode("", (0, 0), NOTHING, NOTHING, root, (1,), True),
        AutogradNode("ScatterBackward", (1, 2), *scatter, SHARDS[2:], (2,), True),
        AutogradNode("GatherBackward", (2, 3), *gather, last, (3,), True),
        AutogradNode("ScatterBackward", (3, 4), *scatter, SHARDS[:2], (4,), True),
        AutogradNode("GatherBackward", (4, 5), *gather, ("layers.0.norm.weight",), (), True),
    ]
    if way == "no end":
        sides = [msgspec.structs.replace(each, is_bounded=False) for each in sides]
    return tuple(sides)


def parts_view(summed=(), way="", num_samples=3, placed=(), **values):
    """What two ranks give and apply, where these parameters are summed."""
    samples = []
    for step in range(num_samples):
        by_rank = {}
        for rank in PAIR:
            gradients = [
                gradient(n, rank, step, PAIR if n in summed else (rank,), **values.get(n, {}))
                for n in (*PARTS, *SHARDS, *OUTSIDE)
            ]
            by_rank[rank] = event_of(
                GradientSums,
                rank,
                step=step,
                model="Net",
                gradients=tuple(gradients),
                nodes=nodes(way),
                site=plain_site(12),
            )
        gathers = dict.fromkeys(PAIR, ((), PAIR, PAIR, PAIR, PAIR))
        none = dict.fromkeys(PAIR, ((),) * 5)
        samples.append(GradientSample(step, by_rank, none, frozenset({PAIR}), gathers))
    return GradientView("Net", RankSet(PAIR), tuple(samples), frozenset(placed))


def reported(*args, **values):
    return findings(ForgottenGradientSum, parts_view(*args, **values))


def test_parameters_of_layers_that_work_on_parts_are_reported():
    (finding,) = reported()
    assert finding.subjects == PARTS
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.LIKELY)
    assert "gathered over these ranks for 4 others" in finding.evidence[0].summary


def test_only_those_that_are_not_summed_are_reported():
    (finding,) = reported(summed=(*PARTS[:3], *OUTSIDE))
    assert finding.subjects == PARTS[3:]


def of_parts(**values):
    return {name: dict(values) for name in PARTS}


def test_a_rank_that_has_not_reported_leaves_its_groups_unjudged():
    view = parts_view()
    for sample in view.samples:
        del sample.by_rank[1]
    assert not findings(ForgottenGradientSum, view)


@pytest.mark.parametrize(
    "values",
    [
        {"summed": PARTS},
        {"way": "experts"},
        {"way": "gathered twice"},
        {"way": "no end"},
        {"num_samples": 1},
        {"placed": PARTS},
        of_parts(weight=0.5),
        of_parts(is_table=True),
        {"summed": SHARDS},
    ],
    ids=[
        "all are summed",
        "exchanges of equal parts",
        "gathers without a scatter",
        "a graph that is not known wholly",
        "one sample",
        "something tells who holds copies",
        "copies that stay equal",
        "tables of positions",
        "what works on all tokens is summed",
    ],
)
def test_what_is_right_or_not_clear_is_not_reported(values):
    assert not reported(**values)
