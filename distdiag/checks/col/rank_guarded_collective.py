"""COL009: a collective stands under a condition that holds on some ranks only."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import is_reliable, missing_evidence, parting_evidence
from distdiag.checks.shared.explanations import GuardedCall, explain, groups_by_place
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import CollectiveView, OpenCollective


class RankGuardedCollective(Check[CollectiveView | OpenCollective]):
    """A collective stands under a condition that holds on some ranks only.

    ## What you see
    The ranks that made the call wait for ever, or exchange data with a later call. The call needs
    every rank of its group, but a condition before it keeps some ranks away. Saving a sharded
    model, metrics, generation and each forward pass of a sharded model contain collectives too.

    ## Example
        # wrong: gathering the sharded weights is a collective, and only rank 0 gets there
        if rank == 0:
            torch.save(get_model_state_dict(model, options=full), path)

        # right: all ranks gather, one writes
        state = get_model_state_dict(model, options=full)
        if rank == 0:
            torch.save(state, path)

    ## How to fix
    Move the call out of the condition, so that every rank of the group makes it. Keep only the
    local part (writing, logging) under the condition.

    Changes: All ranks now spend the time and memory of the call.

    Leaves: A second guarded call further on, which would hang next.

    ## When it is not a defect
    A rank that the condition excludes has a record of exactly this call.

    To silence it, set `ignore = ["COL009"]` in `distdiag.toml`.

    ## References
    - https://github.com/huggingface/transformers/issues/29980
    - https://github.com/bghira/SimpleTuner/issues/262
    - https://github.com/KempnerInstitute/KempnerForge/issues/49
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "COL009"
    name = "rank-guarded-collective"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView | OpenCollective) -> Iterator[Finding]:
        """Judge a call that met another one, or that some ranks never made."""
        found = explain(alignment)
        if not isinstance(found, GuardedCall):
            return
        others = RankSet(alignment.expected_ranks - found.ranks)
        # Where most ranks are guarded, the few that the condition sends away are the odd ones.
        odd = others if len(found.ranks) > len(others) else found.ranks
        location = call_location(found.call)
        guard = found.guard
        yield self.finding(
            f"{call_phrase(found.call)}{at(location)} is reached by {found.ranks.phrase()} only, "
            f"under `{guard.text}` in line {guard.location.line}; {others.phrase()} "
            f"{_instead(found)}",
            ranks=odd,
            step=found.call.step,
            location=location,
            subjects=(found.call.site.module,) if found.call.site.module else (),
            grade=Grade.PROVEN if is_reliable(alignment) else Grade.NOTE,
            confidence=0.95,
            evidence=(
                Evidence(
                    ranks=found.ranks,
                    summary=f"is under the condition `{guard.text}`",
                    location=guard.location,
                ),
                *_calls(found),
                *missing_evidence(alignment),
                *parting_evidence(alignment),
            ),
        )


def _instead(found: GuardedCall) -> str:
    elsewhere = [call for r, call in found.point.by_rank.items() if r not in found.ranks]
    if not elsewhere:
        return "never got there"
    call = elsewhere[0]
    return f"called {call.signature.op} instead{at(call_location(call))}"


def _calls(found: GuardedCall) -> Iterator[Evidence]:
    for group in groups_by_place(found.point):
        call = found.point.by_rank[min(group)]
        yield Evidence(ranks=group, summary=call_phrase(call), location=call_location(call))
