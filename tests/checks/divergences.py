"""Divergences as the parity comparison shows them to the checks."""

from distdiag.checks.base import Check
from distdiag.events.comparisons import Difference, Divergence, Subject
from distdiag.events.ranks import RankSet


def divergence(subject: Subject, *, culprits=(), explanation="", step=3, **more) -> Divergence:
    difference = Difference(
        name="Net/layers.1.weight", measured=0.5, bound=0.001, ratio=500.0, factor=2.0
    )
    return Divergence(
        rank=0,
        seq=0,
        time_ns=0,
        step=step,
        subject=subject,
        candidate="2 ranks",
        reference="1 rank",
        differences=() if subject is Subject.DATA else (difference,),
        num_compared=10,
        explanation=explanation,
        culprits=RankSet(culprits),
        **more,
    )


def findings(check: type[Check], shown: Divergence):
    return list(check().check_event(shown, {}))
