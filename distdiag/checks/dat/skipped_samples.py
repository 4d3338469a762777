"""DAT014: a pass that goes on after an interruption leaves out other samples than were read."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import ResumedPassView


class SkippedSamples(Check[ResumedPassView]):
    """A pass that goes on after an interruption leaves out other samples than were read.

    ## What you see
    Training resumes in the middle of an epoch and skips as many batches as it had come to. But the
    loader draws its order from the state of the random numbers, which is now that of the middle:
    what is skipped is the beginning of another order. Some samples come twice, others never.

    ## Example
        # wrong: the order is drawn anew when the loop begins
        loader = DataLoader(data, shuffle=True)
        for step, batch in enumerate(loader):
            if step < resume_step: continue

        # right: the order follows from the epoch alone
        loader = DataLoader(data, shuffle=True, generator=generator)
        generator.manual_seed(seed + epoch)

    ## How to fix
    Let a generator of its own, seeded by the epoch, or a sampler with `set_epoch` make the order;
    or keep the state of a stateful loader in the checkpoint.

    Changes: The resumed epoch reads what was left of it.

    Leaves: The steps that earlier runs took on samples that they had seen.

    ## When it is not a defect
    The batches are left out for another reason, and the pass before it was broken off on purpose.

    To silence it, set `ignore = ["DAT014"]` in `distdiag.toml`.

    ## References
    - https://github.com/wyim-pgl/transgenic/issues/59
    - https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
    """

    code = "DAT014"
    name = "skipped-samples"
    severity = Severity.WARNING

    def check(self, view: ResumedPassView) -> Iterator[Finding]:
        """Compare the order of both passes by their first samples."""
        other = {r: one for r, one in view.after.items() if one.first != view.before[r].first}
        if not other:
            return
        ranks, rank = RankSet(other), min(other)
        before, after = view.before[rank], other[rank]
        place = user_location(after.site.frames)
        yield self.finding(
            f"{after.dataset} is read from the beginning, and its first {before.num_batches} "
            "batches are left out, as many as were read before the interruption; but they are "
            "others: its order is drawn anew",
            ranks=ranks,
            step=after.step,
            location=place,
            subjects=(after.stream,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"broken off after {before.num_batches} batches; it began with the "
                    f"samples {_listed(before.first)}",
                    location=user_location(before.site.frames),
                ),
                Evidence(
                    ranks=ranks,
                    summary=f"the pass after it begins with the samples {_listed(after.first)}",
                    location=place,
                ),
            ),
        )


def _listed(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices))
