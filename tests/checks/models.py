"""Builds views of models and states of optimizers as the engine would show them."""

from distdiag.events.models import (
    Content,
    Mesh,
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    ReplicaEvidence,
    TensorPlan,
)
from distdiag.events.ranks import RankSet
from distdiag.views.models import (
    ContentView,
    Disagreement,
    EvaluationReplicas,
    GradientReplicas,
    ModelView,
    ScalingView,
    StartReplicas,
    StepReplicas,
)
from tests.checks.streams import event_of, plain_site, together


def plan(name="layer.weight", **values):
    """A parameter that DDP keeps."""
    values.setdefault("wrapper", "DDP")
    values.setdefault("requires_grad", True)
    values.setdefault("evidence", ReplicaEvidence.WRAPPER)
    return TensorPlan(name, values.pop("shape", (4, 4)), values.pop("dtype", "float32"), **values)


def content(value=0.5, *, least=None, greatest=None, digest=None, **values):
    """What a tensor around this value holds; equal arguments give equal digests."""
    least = value - 1 if least is None else least
    greatest = value + 1 if greatest is None else greatest
    made = f"c{hash((value, least, greatest, *sorted(values.items()))):x}"
    number = values.pop("num_elements", 16)
    return Content(digest or made, number, least, greatest, value, **values)


NAN = float("nan")
ALL_NAN = content(NAN, least=NAN, greatest=NAN, digest="cnan", nan_share=1.0)
ZEROS = content(0.0, least=0.0, greatest=0.0, zero_share=1.0)


def differing(*held, name="layer.weight", **values):
    """A tensor of which rank 0, 1, … hold these contents, or contents around these values."""
    whole = [each if isinstance(each, Content) else content(each) for each in held]
    values.setdefault("replicas", tuple(range(len(whole))))
    return Disagreement(plan(name, **values), dict(enumerate(whole)))


REPLICAS = {
    Moment.START: StartReplicas,
    Moment.GRADIENT: GradientReplicas,
    Moment.STEP: StepReplicas,
    Moment.EVALUATION: EvaluationReplicas,
}


def replicas(*tensors, moment=Moment.START, **values):
    """The view of tensors that differ, of the kind that such a moment has."""
    ranks = RankSet(tensors[0].by_rank)
    return values.pop("kind", REPLICAS[moment])(
        values.pop("model", "DDP Net"),
        moment,
        values.pop("step", 0),
        values.pop("evidence", tensors[0].plan.evidence),
        ranks,
        tensors,
        values.pop("num_compared", len(tensors)),
        values.pop("alike_at", None),
        {rank: plain_site(20 + rank) for rank in ranks},
    )


def contents(*held_by_rank, kind=ContentView, **values):
    """The view of what rank 0, 1, … hold: contents by name, all of them parameters.

    All ranks keep the model together, unless the values of the plans say otherwise.
    """
    values.setdefault("replicas", tuple(range(len(held_by_rank))))
    by_rank = {
        rank: tuple((plan(name, **values), each) for name, each in held.items())
        for rank, held in enumerate(held_by_rank)
    }
    return kind("DDP Net", 0, by_rank, {rank: plain_site(20 + rank) for rank in by_rank})


def model(*plans_of_ranks, **values):
    """The view of the plans of rank 0, 1, …."""
    by_rank = {rank: tuple(plans) for rank, plans in enumerate(plans_of_ranks)}
    sites = {rank: plain_site(10 + rank) for rank in by_rank}
    return ModelView("FSDP2 Net", Moment.START, values.pop("step", 0), by_rank, sites)


def scaling(*factors, step=1):
    """The view of the factors of rank 0, 1, …."""
    by_rank = dict(enumerate(factors))
    return ScalingView("FSDP2 Net", step, by_rank, {0: plain_site(30)})


def optimizer_state(rank=0, **values):
    """A healthy optimizer of four parameters."""
    fields = {
        "optimizer": "AdamW",
        "members": (),
        "num_backwards": 1,
        "num_gradients": 4,
        "num_steps": 3,
        "num_zero_steps": 0,
        "num_stale_states": 0,
        "num_stateless": 0,
        "stateless": (),
        "forgotten": (),
        "num_parameters": 4,
        "num_without_gradient": 0,
        "num_foreign": 0,
        "replaced": (),
        "learning_rates": (0.1,),
        "least_count": 3,
        "greatest_count": 3,
        "site": plain_site(40 + rank),
        "step": 3,
    }
    return event_of(OptimizerState, rank, **{**fields, **values})


def optimizers(*changes):
    """One step of an optimizer; rank 0, 1, … differ from a healthy one by these fields.

    All of them keep its model together, unless their fields say otherwise.
    """
    members = {"members": tuple(range(len(changes)))}
    states = [optimizer_state(r, **{**members, **change}) for r, change in enumerate(changes)]
    return together(*states)


def mesh(*sizes, ranks=None):
    """A mesh with these sizes, of ranks from 0 on if none are given."""
    number = 1
    for size in sizes:
        number *= size
    names = ("dp_replicate", "dp_shard", "tp")[: len(sizes)]
    return Mesh(names, sizes, tuple(ranks or range(number)))


def plan_event(rank, plans, *, name="Net", first=0, total=None, **values):
    """A rank tells a plan, or a part of it."""
    return event_of(
        ModelPlan,
        rank,
        step=values.pop("step", 0),
        model=name,
        moment=values.pop("moment", Moment.START),
        first=first,
        total=len(plans) if total is None else total,
        tensors=tuple(plans),
        site=plain_site(10 + rank),
    )


def state_event(rank, held, *, name="Net", first=0, total=None, **values):
    """A rank tells what the tensors of a plan hold, or those of a part of it."""
    return event_of(
        ModelState,
        rank,
        step=values.pop("step", 0),
        model=name,
        moment=values.pop("moment", Moment.START),
        first=first,
        total=len(held) if total is None else total,
        contents=tuple(c if c is None or isinstance(c, Content) else content(c) for c in held),
        site=plain_site(20 + rank),
    )
