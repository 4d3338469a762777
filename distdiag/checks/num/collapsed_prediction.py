"""NUM037: a model predicts one class for everything, and is sure of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_entropy, named
from distdiag.events.logged import LossNumbers, Prediction
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.logged import LoggedView, LossView

LAST: Final = 20
SURE: Final = 0.01
"""Of the entropy of a uniform guess: all other classes together have a chance of about that."""
WRONG: Final = 1.0
"""In nats: the right class has less than 37 percent on average, while another has 99."""
LEAST_ROWS: Final = 8


class CollapsedPrediction(Check[LossView | LoggedView]):
    """A model predicts one class for everything, and is sure of it.

    ## What you see
    The model predicts one class for all rows and is sure of it, while the labels differ: the loss
    is high and does not fall. A policy emits the same token again and again.

    ## Example
        logits = self.head(x) * 1e4          # wrong: a softmax of that has one winner
        logits = self.head(x)                # right

    ## How to fix
    Lower the learning rate, or clip the gradients
    (`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`), from before the step at which the
    entropy fell. Or look for a scale of the logits that grows, or an entropy bonus with the wrong
    sign.

    Changes: The predictions depend on the input again.

    Leaves: The data and how the program reads them.

    ## When it is not a defect
    All inputs have the same right answer.

    ## References
    - https://spinningup.openai.com/en/latest/algorithms/ppo.html
    """

    code = "NUM037"
    name = "collapsed-prediction"
    severity = Severity.WARNING

    def check(self, view: LossView | LoggedView) -> Iterator[Finding]:
        """Look at the last predictions, or at the last entropies that were logged."""
        if isinstance(view, LoggedView):
            yield from self._logged(view)
            return
        found = {r: v for r, passes in view.by_rank.items() if (v := collapsed(passes))}
        if not found:
            return
        first = found[min(found)]
        is_wrong = all(_is_wrong(each) for each in found.values())
        loss = f", with a loss of {first[-1].cross_entropy:.3f}" if is_wrong else ""
        yield self.finding(
            f"the model is sure of one of {first[-1].num_classes} classes for all rows{loss}; the "
            f"entropy is {first[-1].entropy:.4f} nats",
            ranks=RankSet(found),
            step=view.by_rank[min(found)][-1].step,
            location=user_location(view.site.frames),
            grade=Grade.LIKELY if is_wrong else Grade.NOTE,
            confidence=0.85 if is_wrong else 0.5,
            evidence=f"this holds in the last {LAST} sampled passes, of "
            f"{first[-1].num_rows} rows each",
        )

    def _logged(self, view: LoggedView) -> Iterator[Finding]:
        for rank, series in sorted(view.by_rank.items()):
            for each in named(series, is_entropy):
                if len(each.points) < 2 * LAST:
                    continue
                began, now = fmean(each.values[:LAST]), max(map(abs, each.values[-LAST:]))
                if began > 0 and now < SURE * began:
                    yield self.finding(
                        f"{each.name} fell from {began:.3g} to {now:.3g}",
                        ranks=RankSet([rank]),
                        step=each.points[-1][0],
                        location=user_location(each.site.frames),
                        subjects=(each.name,),
                        grade=Grade.NOTE,
                        confidence=0.5,
                        evidence=f"{each.logger} was given {len(each.points)} values",
                    )


def collapsed(passes: Sequence[LossNumbers]) -> list[Prediction]:
    """Return the last predictions if all are sure of one class for all rows."""
    last = [p.prediction for p in passes if p.prediction is not None][-LAST:]
    if len(last) < LAST or len({p.step for p in passes[-LAST:]}) < LAST // 2:
        return []
    are_sure = all(
        p.entropy < SURE * math.log(p.num_classes) and p.top_share == 1 and p.num_rows >= LEAST_ROWS
        for p in last
    )
    return last if are_sure else []


def _is_wrong(last: Sequence[Prediction]) -> bool:
    differ = len({label for p in last for label in p.targets}) > 1
    return differ and all(p.cross_entropy > WRONG for p in last)
