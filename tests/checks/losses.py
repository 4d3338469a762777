"""Builds views of losses as the engine would show them."""

from distdiag.events.losses import AuxTerm, Factor, LossPass, LossWeights
from distdiag.events.ranks import RankSet
from distdiag.views.losses import CombinedLossView, LossView, LossWindow
from tests.checks.streams import event_of, plain_site


def over(value, num_terms=1):
    return Factor("/", float(value), num_terms)


def times(value):
    return Factor("*", float(value))


def part(num_counted, weight, *factors, **values):
    """One backward pass: so many tokens of 40 in 4 rows count, each with this weight."""
    return LossPass(
        values.pop("kind", "nll"),
        values.pop("reduction", "sum"),
        num_counted,
        values.pop("num_elements", 40),
        values.pop("num_rows", 4),
        weight,
        factors,
        values.pop("place", 0),
        values.pop("num_first", -1),
        values.pop("aux", ()),
        values.pop("num_shifted", -1),
        values.pop("num_targets", -1),
        values.pop("num_target_rows", 0),
    )


def aux(*inner, outer=(), **values):
    """An auxiliary loss with these factors, the outer ones of which are those of the whole loss."""
    return AuxTerm("layers.0", (*outer, *inner), len(outer), values.pop("is_own_mean", True))


def mean(num_counted, *factors, **values):
    """One backward pass: the mean over its own tokens, with these factors."""
    weight = 1 / num_counted if num_counted else 0.0
    for factor in factors:
        weight = weight / factor.value if factor.op == "/" else weight * factor.value
    return part(num_counted, weight, *factors, reduction="mean", **values)


def reported(rank, passes, step=0, **values):
    """A rank tells the passes of a step."""
    return event_of(
        LossWeights,
        rank,
        step=step,
        optimizer=values.pop("optimizer", "AdamW"),
        members=values.pop("members", (0, 1)),
        divisor=values.pop("divisor", 2.0),
        passes=tuple(passes),
        site=values.pop("site", plain_site(50)),
        groups=values.pop("groups", ()),
        aux_coefficient=values.pop("aux_coefficient", 0.0),
    )


def window(*passes_of_ranks, step=0, **values):
    """One step: the passes of rank 0, 1, …."""
    return LossWindow(
        step, {r: reported(r, passes, step, **values) for r, passes in enumerate(passes_of_ranks)}
    )


def losses(
    *passes_of_ranks, num_steps=3, has_wrapper=True, is_multiplied=False, scalings=(), **values
):
    """The same step several times: the passes of rank 0, 1, …."""
    sequences, is_measured = values.pop("sequences", ()), values.pop("is_measured", False)
    kind = values.pop("kind", CombinedLossView if sequences or is_measured else LossView)
    windows = tuple(window(*passes_of_ranks, step=n, **values) for n in range(num_steps))
    ranks = RankSet(range(len(passes_of_ranks)))
    scaled = has_wrapper, is_multiplied, frozenset(scalings)
    return kind("AdamW", ranks, windows, *scaled, sequences, is_measured)
