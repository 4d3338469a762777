"""One thing of one tensor changed on one rank: whatever it is, it must be the one named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdiag.checks.shd.sharding_plan_mismatch import ShardingPlanMismatch
from distdiag.engine.models.models import Models
from distdiag.events.models import Mesh, ModelPlan, ReplicaEvidence, TensorPlan
from distdiag.findings.finding import Finding
from distdiag.views.models import ModelView
from tests.checks.models import plan_event

FEW, MANY = 100, 1_000

SHARDS = ("S(0)", "S(1)", "_StridedShard(dim=0, sf=2)")
REPLICATE = "R"
DTYPES = ("float32", "bfloat16", "float16")
WRAPPERS = ("FSDP2", "DDP", "")

Plans = list[TensorPlan]
Change = Callable[[st.DataObject, TensorPlan, list[str]], TensorPlan]


class Job(NamedTuple):
    """The plans of each rank, and a thing that was changed in them."""

    by_rank: dict[int, Plans]
    rank: int = -1
    name: str = ""


@st.composite
def module_trees(draw: st.DrawFn) -> list[str]:
    """The names of the parameters of a model of up to three levels, in the order of its modules."""
    words = st.sampled_from(["embed", "layers", "attention", "mlp", "norm", "0", "1", "head"])
    leaves = st.sampled_from(["weight", "bias", "scale"])
    paths = st.tuples(st.lists(words, max_size=3), leaves).map(lambda t: ".".join([*t[0], t[1]]))
    return draw(st.lists(paths, min_size=2, max_size=8, unique=True))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = tuple(draw(st.lists(st.integers(2, 3), min_size=1, max_size=3)))
    number = 1
    for size in sizes:
        number *= size
    ranks = draw(st.permutations(range(number)))
    return Mesh(("dp_replicate", "dp_shard", "tp")[: len(sizes)], sizes, tuple(ranks))


@st.composite
def tensors(draw: st.DrawFn, name: str, mesh: Mesh) -> TensorPlan:
    placement = st.sampled_from([*SHARDS, REPLICATE])
    return TensorPlan(
        name,
        tuple(draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))),
        draw(st.sampled_from(DTYPES)),
        requires_grad=draw(st.booleans()),
        wrapper=draw(st.sampled_from(WRAPPERS)),
        unit=draw(st.sampled_from(["", name.rpartition(".")[0]])),
        placements=tuple(draw(placement) for _ in mesh.sizes),
        mesh=mesh,
        evidence=ReplicaEvidence.MESH,
    )


def replicas_of(plan: TensorPlan, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one only along the axes that replicate."""
    places = list(itertools.product(*map(range, mesh.sizes)))
    here = places[mesh.ranks.index(rank)]
    alike = [
        other
        for other, place in zip(mesh.ranks, places, strict=True)
        if all(
            mine == theirs or placement == REPLICATE
            for mine, theirs, placement in zip(here, place, plan.placements, strict=True)
        )
    ]
    return tuple(sorted(alike))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    mesh = draw(meshes())
    plans = [draw(tensors(name, mesh)) for name in draw(module_trees())]
    return Job(
        {
            rank: [
                msgspec.structs.replace(plan, replicas=replicas_of(plan, mesh, rank))
                for plan in plans
            ]
            for rank in sorted(mesh.ranks)
        }
    )


def another(data: st.DataObject, values: tuple[str, ...], old: str) -> str:
    return data.draw(st.sampled_from([value for value in values if value != old]))


def other_shape(data: st.DataObject, plan: TensorPlan, _: list[str]) -> TensorPlan:
    place = data.draw(st.integers(0, len(plan.shape) - 1))
    shape = tuple(size + (number == place) for number, size in enumerate(plan.shape))
    return msgspec.structs.replace(plan, shape=shape)


def other_dtype(data: st.DataObject, plan: TensorPlan, _: list[str]) -> TensorPlan:
    return msgspec.structs.replace(plan, dtype=another(data, DTYPES, plan.dtype))


def other_placement(data: st.DataObject, plan: TensorPlan, _: list[str]) -> TensorPlan:
    axis = data.draw(st.integers(0, len(plan.placements) - 1))
    placements = list(plan.placements)
    placements[axis] = another(data, (*SHARDS, REPLICATE), placements[axis])
    return msgspec.structs.replace(plan, placements=tuple(placements))


def other_wrapper(data: st.DataObject, plan: TensorPlan, _: list[str]) -> TensorPlan:
    return msgspec.structs.replace(plan, wrapper=another(data, WRAPPERS, plan.wrapper))


def other_unit(data: st.DataObject, plan: TensorPlan, names: list[str]) -> TensorPlan:
    return msgspec.structs.replace(plan, unit=another(data, ("", "block", *names), plan.unit))


def other_requires_grad(_: st.DataObject, plan: TensorPlan, __: list[str]) -> TensorPlan:
    return msgspec.structs.replace(plan, requires_grad=not plan.requires_grad)


def other_tie(data: st.DataObject, plan: TensorPlan, names: list[str]) -> TensorPlan:
    return msgspec.structs.replace(plan, tied_to=another(data, tuple(names), plan.name))


def other_name(_: st.DataObject, plan: TensorPlan, __: list[str]) -> TensorPlan | None:
    return None


CHANGES: dict[str, Change] = {
    "global shape": other_shape,
    "dtype": other_dtype,
    "placement": other_placement,
    "wrapper": other_wrapper,
    "wrapped unit": other_unit,
    "requires_grad": other_requires_grad,
    "tie": other_tie,
    "presence": other_name,
}


def changed(data: st.DataObject, job: Job, change: Change) -> Job:
    """The job with one thing of one tensor changed on one rank."""
    rank = data.draw(st.sampled_from(sorted(job.by_rank)), label="rank")
    plans = list(job.by_rank[rank])
    place = data.draw(st.integers(0, len(plans) - 1), label="place")
    before = plans[place]
    after = change(data, before, [plan.name for plan in plans])
    plans[place : place + 1] = [] if after is None else [after]
    return Job({**job.by_rank, rank: plans}, rank, before.name)


def parts_of(data: st.DataObject, rank: int, plans: Plans) -> list[ModelPlan]:
    size = data.draw(st.integers(1, len(plans)))
    return [
        plan_event(rank, plans[first : first + size], first=first, total=len(plans))
        for first in range(0, len(plans), size)
    ]


def shown(data: st.DataObject, job: Job) -> tuple[list[ModelView], list[Finding]]:
    """The views and the findings when ranks tell their plans in any order, in parts."""
    models, views = Models(), []
    waiting = {rank: parts_of(data, rank, plans) for rank, plans in job.by_rank.items()}
    for rank in data.draw(st.permutations(sorted(waiting))):
        for event in waiting[rank]:
            views += models.feed(event)
    check = ShardingPlanMismatch()
    return views, [finding for view in views for finding in check.check(view)]


def names_the_change(data: st.DataObject, job: Job, aspect: str) -> None:
    job = changed(data, job, CHANGES[aspect])
    _, (finding,) = shown(data, job)
    assert finding.subjects == (job.name,)
    assert job.rank in finding.ranks
    assert f"differently: {aspect} " in finding.message
    if len(job.by_rank) > 2:
        assert list(finding.ranks) == [job.rank]


@settings(max_examples=FEW, deadline=None)
@given(st.data(), jobs(), st.sampled_from(sorted(CHANGES)))
def test_the_tensor_that_one_rank_keeps_differently_is_named(data, job, aspect):
    names_the_change(data, job, aspect)


@settings(max_examples=FEW, deadline=None)
@given(st.data(), jobs())
def test_equal_plans_are_shown_once_and_nothing_is_found(data, job):
    views, findings = shown(data, job)
    assert [set(view.by_rank) for view in views] == [set(job.by_rank)]
    assert not findings


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, deadline=None)
@given(st.data(), jobs(), st.sampled_from(sorted(CHANGES)))
def test_the_tensor_that_one_rank_keeps_differently_is_named_in_many_models(data, job, aspect):
    names_the_change(data, job, aspect)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, deadline=None)
@given(st.data(), jobs())
def test_equal_plans_of_many_models_are_shown_once_and_nothing_is_found(data, job):
    views, findings = shown(data, job)
    assert [set(view.by_rank) for view in views] == [set(job.by_rank)]
    assert not findings
