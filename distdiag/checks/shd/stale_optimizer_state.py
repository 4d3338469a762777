"""SHD007: an optimizer keeps its state for parameters that it does not hold any more."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.models import OptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import OptimizerView


class StaleOptimizerState(Check[OptimizerView]):
    """An optimizer keeps its state for parameters that it does not hold any more.

    ## What you see
    Moments and step counts restart from zero, or the optimizer fails, and the old state keeps
    whole, unsharded tensors in memory. The state belongs to parameter objects that were replaced
    after the optimizer was created.

    ## Example
        optimizer = Adagrad(model.parameters())  # it fills its state at once
        fully_shard(model)
        # wrong: the state stays with the old parameters
        optimizer.param_groups[0]["params"] = list(model.parameters())
        # right
        optimizer = Adagrad(model.parameters())

    ## How to fix
    Create the optimizer after sharding. Or move each entry of `optimizer.state` to the new
    parameter, with its tensors sharded like the parameter.

    Changes: The next updates: they continue with the old moments instead of new ones.

    Leaves: Steps that were already taken without this state.

    ## When it is not a defect
    Every key of `optimizer.state` is a parameter in `optimizer.param_groups`.

    If so, add `ignore = ["SHD007"]` to `distdiag.toml`.

    ## References
    - https://github.com/huggingface/accelerate/issues/4142
    """

    code = "SHD007"
    name = "stale-optimizer-state"
    severity = Severity.ERROR

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Name the parameters that lack what stale entries hold."""
        # A part that was replaced, a new head, may well begin anew.
        stale = {r: s for r, s in view.by_rank.items() if _has_lost_all(s)}
        if not stale:
            return
        ranks = RankSet(stale)
        first = stale[min(stale)]
        yield self.finding(
            f"{first.optimizer} keeps state for {first.num_stale_states} parameters that it does "
            f"not hold, and has no state for {first_and_more(first.stateless)}",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=first.stateless,
            evidence=(
                f"{first.num_stale_states} stale entries, {len(first.stateless)} "
                "parameters without state"
            ),
        )


def _has_lost_all(state: OptimizerState) -> bool:
    is_whole = state.num_stale_states >= state.num_stateless == state.num_parameters
    return is_whole and bool(state.stateless)
