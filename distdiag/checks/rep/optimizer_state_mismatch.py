"""REP004: learning rates or step counters of one optimizer differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.events.models import OptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import Alignment, OptimizerView


class OptimizerStateMismatch(Check[OptimizerView]):
    """Learning rates or step counters of one optimizer differ between ranks.

    ## What it detects
    Ranks that keep one model together and take the same step of its optimizer with different
    learning rates, or whose state counts different numbers of steps before it.

    ## Why it matters
    Equal gradients then make different updates: copies of the model part, or shards of one model
    move at different speeds.

    ## Example
    A scheduler that follows each rank's own validation loss; optimizer state that only rank 0 has
    resumed.

    ## How to fix
    Feed the scheduler a value that all ranks share, and load the optimizer state on all ranks.

    ## References
    - `torch.optim.lr_scheduler.ReduceLROnPlateau`
    """

    code = "REP004"
    name = "optimizer-state-mismatch"
    severity = Severity.WARNING

    why = "Each rank computes its update alone, from its own rate and its own counters."
    fix = "Make the rate and the state the same on all ranks before the step."
    fix_changes = "The size of the update on the ranks that were wrong."
    fix_leaves = "Parameters that have parted already: broadcast them once."
    disproof = "The rates and counters of the optimizer, printed on each rank, are the same."

    def check(self, alignment: OptimizerView) -> Iterator[Finding]:
        """Compare rates, then counters."""
        if alignment.kind != "optimizer":
            return
        members = {rank for state in alignment.by_rank.values() for rank in state.members}
        states = {r: state for r, state in alignment.by_rank.items() if r in members}
        for aspect, value in (("learning rate", _rates), ("step counter", _counts)):
            camps = _camps(states, value)
            if len(camps) > 1:
                yield self._differs(alignment, aspect, camps)
                return

    def _differs(
        self,
        alignment: Alignment[OptimizerState],
        aspect: str,
        camps: Mapping[Hashable, RankSet],
    ) -> Finding:
        ordered = sorted(camps.items(), key=lambda item: len(item[1]), reverse=True)
        has_majority = len(ordered[0][1]) > len(ordered[1][1])
        odd = ordered[1:] if has_majority else ordered
        ranks = RankSet(rank for _, camp in odd for rank in camp)
        first = alignment.any_event
        what = ", ".join(f"{_plain(value)} on {camp.phrase()}" for value, camp in ordered)
        return self.finding(
            f"ranks take step {first.step} of {first.optimizer} with different {aspect}s: {what}",
            ranks=ranks,
            step=first.step,
            location=user_location(alignment.by_rank[min(ranks)].site.frames),
            subjects=(first.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(ranks=camp, summary=f"{aspect} {_plain(value)}") for value, camp in ordered
            ),
        )


def _rates(state: OptimizerState) -> Hashable:
    # A rate that lies on the device is not read.
    return tuple(rate for rate in state.learning_rates if rate == rate)


def _counts(state: OptimizerState) -> Hashable:
    return (state.least_count, state.greatest_count)


def _plain(value: Hashable) -> str:
    items = dict.fromkeys(value) if isinstance(value, tuple) else [value]
    return "/".join(f"{item:g}" for item in items)


def _camps(
    states: Mapping[int, OptimizerState], value: Callable[[OptimizerState], Hashable]
) -> dict[Hashable, RankSet]:
    camps: dict[Hashable, list[int]] = {}
    for rank, state in sorted(states.items()):
        camps.setdefault(value(state), []).append(rank)
    return {key: RankSet(ranks) for key, ranks in camps.items()}
