"""NUM036: a model predicts worse than a table of how often each class occurs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.logged import LossNumbers, Prediction
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import LossView

LEAST_STEPS: Final = 500
"""Frequencies are learnt within the first few hundred steps, most of which warm up."""
LAST: Final = 8
MARGIN: Final = 0.05
"""Of the entropy of a guess: the error of frequencies that are counted in a few thousand labels."""


class UnlearntPrediction(Check[LossView]):
    """A model predicts worse than a table of how often each class occurs.

    ## What you see
    After hundreds of steps the predictions are still nearly uniform, and the loss is near the
    logarithm of the number of classes. A table of class frequencies would predict better, because
    some classes are much more frequent than others.

    ## Example
        logits = self.head(hidden.detach())   # wrong: only the head is trained, and on noise
        logits = self.head(hidden)            # right

    ## How to fix
    Train on one single batch until its loss is near zero. If that fails, look for a detached part
    (`.detach()`, `no_grad`), a learning rate that is much too low, labels that do not belong to
    their inputs, or logits that are multiplied by a tiny number.

    Changes: The model learns from its inputs.

    Leaves: The data and how the program reads them.

    ## When it is not a defect
    The learning rate still rises, or the model is intended to be uncertain. `entropy_share` in
    `[numerics]` sets which predictions are nearly uniform. A loss that picks the partner of a row
    among candidates, as contrastive ones do, has places for labels, and is not judged.

    ## References
    - https://karpathy.github.io/2019/04/25/recipe/
    """

    code = "NUM036"
    name = "unlearnt-prediction"
    severity = Severity.WARNING

    def check(self, view: LossView) -> Iterator[Finding]:
        """Compare the loss with that of the frequencies of the labels seen before."""
        found: dict[int, tuple[float, float, Prediction]] = {}
        for rank, passes in view.by_rank.items():
            seen = [p for p in passes if p.prediction is not None]
            if seen and seen[-1].step >= LEAST_STEPS and not rises(seen):
                verdict = compare(seen, view.thresholds.entropy_share)
                if verdict is not None:
                    found[rank] = verdict
        if not found:
            return
        own, table, last = found[min(found)]
        share = last.entropy / math.log(last.num_classes)
        yield self.finding(
            f"the loss of predicting {last.num_classes} classes is {own:.3f}, worse than the "
            f"{table:.3f} of a table of their frequencies; the entropy is {share:.0%} of that of a "
            "uniform guess",
            ranks=RankSet(found),
            step=view.by_rank[min(found)][-1].step,
            location=user_location(view.site.frames),
            grade=Grade.LIKELY,
            confidence=0.8,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"loss {each[0]:.3f}, by frequencies {each[1]:.3f}",
                    values={"entropy": each[2].entropy, "num_classes": each[2].num_classes},
                )
                for rank, each in found.items()
            ),
        )


def rises(passes: Sequence[LossNumbers]) -> bool:
    """Say whether the learning rate still rises, or is zero."""
    rates = [p.rate for p in passes if not math.isnan(p.rate)]
    return bool(rates) and (rates[-1] == 0 or rates[-1] > rates[len(rates) // 2])


def compare(passes: Sequence[LossNumbers], share: float) -> tuple[float, float, Prediction] | None:
    """Return the loss of the model and that of frequencies, if the first is clearly higher."""
    seen = [p.prediction for p in passes if p.prediction is not None]
    num_classes = seen[-1].num_classes
    last = [p for p in seen[-LAST:] if p.num_classes == num_classes]
    highest = math.log(num_classes)
    if len(last) < LAST or not all(p.entropy > share * highest for p in last):
        return None
    if are_places(seen):
        return None
    losses = [p.cross_entropy for p in last]
    if not all(map(math.isfinite, losses)):
        return None
    own, table = fmean(losses), _loss_of_frequencies([p.targets for p in seen], num_classes)
    return (own, table, last[-1]) if own > table + MARGIN * highest else None


def are_places(predictions: Sequence[Prediction]) -> bool:
    """Say whether labels are places among candidates, so that their frequencies tell nothing.

    Where rows choose their partner, each row has the same label in every pass: one place for all,
    as with a queue of negatives, or one for each, which begin behind those of the ranks before.
    """
    by_size: dict[int, set[tuple[int, ...]]] = {}
    for each in predictions:
        by_size.setdefault(each.num_rows, set()).add(each.targets)
    return all(
        len(labels) == 1 and len(set(row := next(iter(labels)))) in (1, len(row))
        for labels in by_size.values()
    )


def _loss_of_frequencies(labels: Sequence[tuple[int, ...]], num_classes: int) -> float:
    """Return the loss on the second half of the labels of the frequencies in the first.

    Half of the probability is spread evenly, so that what was not seen before costs little more
    than a uniform guess. It is no lower than what a model can reach.
    """
    half = len(labels) // 2
    counts = Counter(label for some in labels[:half] for label in some)
    later = [label for some in labels[half:] for label in some]
    total = counts.total()
    if not total or not later:
        return math.inf
    even = 0.5 / num_classes
    return -fmean(math.log(0.5 * counts[label] / total + even) for label in later)
