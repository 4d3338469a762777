"""DAT011: what is kept as the best is chosen by the samples of one rank."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import record_guards
from distdiag.views.data import LocalEvaluationView


class BestByLocalMetric(Check[LocalEvaluationView]):
    """What is kept as the best is chosen by the samples of one rank.

    ## What you see
    The run keeps a different checkpoint as the best than the whole data set would choose, and the
    reported metric changes with the number of ranks. Each rank evaluates its own part of the data,
    and one rank compares its own result with the best so far.

    ## Example
        loss = evaluate(model, loader)          # this rank's part
        if rank == 0 and loss < best:           # wrong
            best = loss
            torch.save(model.state_dict(), "best.pt")
        total = torch.tensor([loss * count, count])
        dist.all_reduce(total)                  # right: on all ranks, before the comparison

    ## How to fix
    Add up the sums and counts of the metric over all ranks before you compare or report it:
    `dist.all_reduce(total)`, `dist.all_reduce(count)`, then `total / count`.

    Changes: Which checkpoint counts as the best, and the metric that is reported.

    Leaves: What the ranks train.

    ## When it is not a defect
    The ranks exchange their results in a way that distdiag does not see (for example a pipe), or
    the part of one rank is intended to be enough.

    If so, add `ignore = ["DAT011"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_reduce
    """

    code = "DAT011"
    name = "best-by-local-metric"
    severity = Severity.WARNING

    def check(self, view: LocalEvaluationView) -> Iterator[Finding]:
        """Look at the conditions under which a file is written after an evaluation."""
        writes, passes = view.writes, view.passes
        rank = min(writes)
        write, fed = writes[rank], passes[rank]
        guard = next(record_guards(write.site.user_frames), None)
        if guard is None:
            return
        shares = ", ".join(f"{each.num_indices} on rank {r}" for r, each in passes.items())
        where = user_location(fed.site.frames)
        yield self.finding(
            f"{RankSet(writes).phrase()} {'keeps' if len(writes) == 1 else 'keep'} {write.written} "
            "as the best by the samples of one rank: between the evaluation"
            f"{at(where)}, of which each rank has a part, and the comparison the ranks exchange "
            "nothing",
            ranks=RankSet(writes),
            step=write.step,
            location=guard.location,
            subjects=(write.written,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet(passes),
                    summary=f"evaluates its part of {fed.dataset} ({fed.num_samples} samples): "
                    f"{shares}",
                    location=where,
                ),
                Evidence(
                    ranks=RankSet(writes),
                    summary=f"{write.api} behind `{guard.text}`, {view.num_writes} "
                    f"time{'s' * (view.num_writes > 1)}",
                    location=user_location(write.site.frames),
                ),
            ),
        )
