"""Who trains one model together, along which axis, and whether ranks share samples on purpose."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.engine.relations import RelationAligner
from distdiag.events.models import ModelPlan, Moment, ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.relations import SHARED_WORK, TABLE, Axis, MaskView, OtherInputs, SampledInputs
from tests.checks.feeds import mask, model_fed
from tests.checks.streams import Job, event_of, plain_site, signature
from tests.engine.aligned import aligned

SINCE, BEGIN, END = 100, 200, 300


def is_shared(op: str, sizes: tuple[int, ...], seq: int) -> bool:
    """Say what is made of one call between the batch and the end of the forward pass."""
    job, events = Job(2), []
    for rank in (0, 1):
        call = job.call(rank, sign=signature(op, input_sizes=(sizes,)))
        events.append(msgspec.structs.replace(call, seq=seq))
    for number in (0, 1):
        for rank in (0, 1):
            events.append(model_fed(rank, number, since=SINCE, begin=BEGIN, end=END))
    return SHARED_WORK in aligned(RelationAligner, *events).views[-1].exceptions


@pytest.mark.parametrize(
    ("op", "sizes", "seq", "shared"),
    [
        ("all_gather", (8,), BEGIN + 1, True),
        ("all_reduce", (8, 8), BEGIN + 1, False),
        ("all_gather", (8,), SINCE + 1, True),
        ("all_reduce", (8,), SINCE + 1, True),
        ("all_reduce", (), SINCE + 1, False),
        ("all_reduce", (1,), SINCE + 1, False),
        ("broadcast", (8, 8), SINCE + 1, False),
        ("all_gather", (8,), SINCE - 1, False),
    ],
    ids=[
        "activations",
        "sum in the forward pass",
        "rewards of all",
        "mean reward of each sample",
        "count of tokens",
        "count of tokens in a vector",
        "the batch itself",
        "before the batch",
    ],
)
def test_samples_are_shared_on_purpose_if_more_is_exchanged_for_them(
    op: str, sizes: tuple[int, ...], seq: int, shared: bool
) -> None:
    assert is_shared(op, sizes, seq) is shared


# Models that nothing wraps


def plan(rank, *evidence, model="Net"):
    tensors = tuple(
        TensorPlan(f"p{n}", (4,), "float32", requires_grad=True, replicas=(0, 1), evidence=each)
        for n, each in enumerate(evidence)
    )
    fields = {"model": model, "moment": Moment.GRADIENT, "first": 0, "total": len(tensors)}
    return event_of(ModelPlan, rank, tensors=tensors, site=plain_site(5), **fields)


def bare(op, *evidence, activation="a {n} {r}", inputs="i {n} {r}"):
    """Return the views of passes whose gradients the program reduces, with one call in each."""
    job, events = Job(2), [plan(rank, *evidence) for rank in (0, 1)]
    for number in range(2):
        for rank in (0, 1):
            draws = (mask(f"s {number}", activation.format(n=number, r=rank)),)
            given = {"inputs": (inputs.format(n=number, r=rank),), "draws": draws}
            given |= {"model": "Net", "members": (), "begin": BEGIN, "end": END, "batch": ""}
            if op:
                call = job.call(rank, sign=signature(op, input_sizes=((8, 8),)))
                events.append(msgspec.structs.replace(call, seq=BEGIN + 1))
            events.append(model_fed(rank, number, **given))
    return {type(view): view for view in aligned(RelationAligner, *events).views}


REDUCED, WORLD_ = ReplicaEvidence.REDUCED, ReplicaEvidence.WORLD


def test_ranks_that_reduce_all_gradients_are_data_parallel():
    views = bare("", REDUCED, REDUCED)
    assert views[OtherInputs].axis is views[MaskView].axis is Axis.DATA
    assert views[OtherInputs].ranks == RankSet([0, 1])


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "send"])
def test_ranks_that_exchange_activations_too_hold_parts_of_a_sequence(op):
    views = bare(op, REDUCED, WORLD_)
    assert views.keys() == {MaskView}
    assert views[MaskView].axis is Axis.SEQUENCE


def test_parts_of_a_sequence_may_be_cut_inside_the_model():
    assert bare("reduce_scatter", REDUCED, inputs="i {n}")[MaskView].axis is Axis.SEQUENCE


@pytest.mark.parametrize(
    "views",
    [
        bare("all_reduce", REDUCED, WORLD_, inputs="i {n}"),
        bare("reduce_scatter", REDUCED, inputs="i {n}", activation="a {n}"),
        bare("", REDUCED, WORLD_),
        bare("", WORLD_),
    ],
    ids=["columns and rows", "whole activations", "parameters of its own", "alone"],
)
def test_what_is_not_known_is_not_compared(views):
    assert not views


def test_a_loader_with_indices_is_reported_from_what_has_none():
    events = [model_fed(rank, number) for number in (0, 1) for rank in (0, 1)]
    assert {type(view) for view in aligned(RelationAligner, *events).views} == {SampledInputs}
    assert aligned(RelationAligner, *events).why(OtherInputs)
    assert aligned(RelationAligner, *events).why(MaskView)


def test_each_cell_of_the_table_has_a_reason():
    assert all(cell.reason for cell in TABLE.values())
