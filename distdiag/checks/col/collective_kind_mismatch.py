"""COL002: ranks call different collectives at the same point of a process group."""

from collections.abc import Iterator

from distdiag.checks.col.mismatch import CallMismatch
from distdiag.checks.shared.culprits import Reason, Verdict, blame, group_by
from distdiag.checks.shared.explanations import Condition, condition_passed, under, unexplained
from distdiag.findings.descriptions import at, call_location, call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class CollectiveKindMismatch(CallMismatch):
    """Ranks call different collectives at the same point of a process group.

    ## What you see
    The job hangs, aborts in C++, or exchanges memory that does not belong together. Ranks pair the
    collectives of a process group by their order alone: before this point one rank has made a call
    too many or too few, and from here on no call matches.

    ## Example
        # wrong: a rank without gradients skips the gather, and its next all_reduce meets it
        def step(self):
            if not any(p.grad is not None for p in self.params):
                return
            dist.all_gather(self.parts, self.update())

        # right: every rank makes the call
        def step(self):
            dist.all_gather(self.parts, self.update_or_zeros())

    ## How to fix
    Find the branch or early return that only some ranks take before these two lines, and let every
    rank take the same branch. If the branch depends on local data, let the ranks agree first:
    `dist.all_reduce(flag, op=dist.ReduceOp.MAX)`.

    Changes: A call that some ranks skipped now costs its time on every rank.

    Leaves: Wrong sizes or values of the same calls, which would show up next.

    ## When it is not a defect
    The ranks' records of this group show the same operation under this number.

    To silence it, set `ignore = ["COL002"]` in `distdiag.toml`.

    ## References
    - https://github.com/sgl-project/SpecForge/issues/781
    - https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
    - https://github.com/pytorch/pytorch/tree/main/torch/distributed/flight_recorder
    """

    code = "COL002"
    name = "collective-kind-mismatch"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the operation that they issued."""
        if unexplained(alignment) is not Aspect.OP:
            return
        groups = group_by(alignment, lambda call: call.signature.op)
        verdict = blame(alignment, groups, may_skip=True)
        calls = [alignment.by_rank[min(group)] for group in groups]
        what = " but ".join(
            f"{call.signature.op} on {group.phrase()}{at(call_location(call))}"
            for group, call in zip(groups, calls, strict=True)
        )
        skipped = ""
        if verdict.reason is Reason.SKIPPED:
            due = alignment.by_rank[min(verdict.others)]
            skipped = f"; {verdict.culprits.phrase()} never called {call_phrase(due)}"
        label = alignment.any_event.group.label
        found = self.mismatch(
            alignment,
            groups,
            f"collective #{alignment.key[-1]} of group {label} is {what}{skipped}",
            lambda call: f"{call_phrase(call)}, {sizes_phrase(call)}",
            verdict,
        )
        condition = _condition(alignment, verdict)
        yield found if condition is None else under(found, condition)


def _condition(alignment: CollectiveView, verdict: Verdict) -> Condition | None:
    """Return what decides about the call of one side; ranks that skipped one made none of it."""
    sides = [(verdict.others, verdict.culprits)]
    sides += [(verdict.culprits, verdict.others)] * (verdict.reason is not Reason.SKIPPED)
    found = (
        condition_passed(alignment, alignment, callers, others)
        for callers, others in sides
        if callers and others
    )
    return next((each for each in found if each is not None), None)
