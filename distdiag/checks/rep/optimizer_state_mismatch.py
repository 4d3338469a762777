"""REP004: learning rates or step counters of one optimizer differ between ranks."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.models import OptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView

_NONE: Final = -1


class OptimizerStateMismatch(Check[OptimizerView]):
    """Learning rates or step counters of one optimizer differ between ranks.

    ## What you see
    Copies of the model diverge, or shards of one model train at different speeds. Each rank
    computes its update from its own learning rate and step counters, and nothing compares them
    between ranks.

    ## Example
        # wrong: each rank follows its own validation loss
        scheduler.step(val_loss)
        # right
        dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)
        scheduler.step(val_loss)

    ## How to fix
    Let all ranks use the same values: load the optimizer state on all ranks
    (`optimizer.load_state_dict(state)`), and step the scheduler with a value that all ranks share
    (`dist.all_reduce(loss)` before `scheduler.step(loss)`).

    Changes: The size of the update on the ranks that were wrong.

    Leaves: Parameters that have already diverged: broadcast them once.

    ## When it is not a defect
    The rates and counters of the optimizer, printed on each rank, are the same.

    If so, add `ignore = ["REP004"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html
    """

    code = "REP004"
    name = "optimizer-state-mismatch"
    severity = Severity.WARNING
    explains = ("REP003",)

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Compare rates, then counters."""
        members = {rank for state in view.by_rank.values() for rank in state.members}
        states = {r: state for r, state in view.by_rank.items() if r in members}
        rates = _groups(states, _rates)
        earlier = _first_difference(states) if len(rates) == 1 else None
        if len(rates) > 1:
            yield self._differs(view, "learning rates", rates)
        elif earlier is not None:
            step, rates = earlier
            yield self._differs(view, "learning rates", rates, took=step)
        elif len(counts := _groups(states, _counts)) > 1:
            yield self._differs(view, "step counters in its state", counts)

    def _differs(
        self,
        view: OptimizerView,
        aspect: str,
        groups: Mapping[Hashable, RankSet],
        *,
        took: int | None = None,
    ) -> Finding:
        ordered = sorted(groups.items(), key=lambda item: len(item[1]), reverse=True)
        has_majority = len(ordered[0][1]) > len(ordered[1][1])
        odd = ordered[1:] if has_majority else ordered
        ranks = RankSet(rank for _, group in odd for rank in group)
        first = view.any_event
        what = ", ".join(f"{_plain(value)} on {group.phrase()}" for value, group in ordered)
        step = first.step if took is None else took
        verb = "take" if took is None else "took"
        return self.finding(
            f"ranks {verb} step {step} of {first.optimizer} with different {aspect}: {what}",
            ranks=ranks,
            step=step,
            location=user_location(view.by_rank[min(ranks)].site.frames),
            subjects=(first.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(ranks=group, summary=f"{aspect}: {_plain(value)}")
                for value, group in ordered
            ),
        )


def _rates(state: OptimizerState) -> Hashable:
    # A rate that lies on the device is not read.
    return tuple(rate for rate in state.learning_rates if rate == rate)


def _first_difference(
    states: Mapping[int, OptimizerState],
) -> tuple[int, dict[Hashable, RankSet]] | None:
    """Return the first step that is known to have been taken with different rates, and these."""
    if len({state.rate_history for state in states.values()}) == 1:
        return None
    changes = {rank: state.rate_changes for rank, state in states.items()}
    if not all(changes.values()):
        return None
    known_since = max(each[0][0] for each in changes.values())
    for step in sorted({step for each in changes.values() for step, _ in each}):
        if step < known_since:
            continue
        groups: dict[Hashable, list[int]] = {}
        for rank, each in sorted(changes.items()):
            rates = [rates for since, rates in each if since <= step][-1]
            groups.setdefault(rates, []).append(rank)
        if len(groups) > 1:
            return step, {rates: RankSet(ranks) for rates, ranks in groups.items()}
    return None


def _counts(state: OptimizerState) -> Hashable:
    return (state.least_count, state.greatest_count)


def _plain(value: Hashable) -> str:
    items = dict.fromkeys(value) if isinstance(value, tuple) else [value]
    return "/".join("none" if item == _NONE else f"{item:g}" for item in items)


def _groups(
    states: Mapping[int, OptimizerState], value: Callable[[OptimizerState], Hashable]
) -> dict[Hashable, RankSet]:
    groups: dict[Hashable, list[int]] = {}
    for rank, state in sorted(states.items()):
        groups.setdefault(value(state), []).append(rank)
    return {key: RankSet(ranks) for key, ranks in groups.items()}
