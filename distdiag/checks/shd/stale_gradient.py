"""SHD022: a step applies the gradient of an earlier step once more."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.checks.shd.partly_reduced_gradient import FEWEST_STEPS, in_words
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.contributions import LEFT, Contribution, ContributionView


def applies_stale(view: ContributionView, found: Contribution) -> bool:
    """Say whether a step applies what the step before has applied already."""
    left = [source for source in found.vector if source.number == LEFT]
    is_applied = not left or any(not found.is_nothing(each) for each in left)
    return found.step in view.stale and bool(found.kept) and is_applied


class StaleGradient(Check[ContributionView]):
    """A step applies the gradient of an earlier step once more.

    ## What you see
    The first steps look right, then the updates become too large and follow earlier batches; the
    loss falls slowly or not at all. The gradient of an earlier step was not cleared and is applied
    again.

    ## Example
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            # right: this line; wrong: without it
            optimizer.zero_grad()

    ## How to fix
    Call `optimizer.zero_grad()` once after each `optimizer.step()`; if there is a copy of the model
    in lower precision, clear its gradients as well. With FSDP2 do not call `model.zero_grad()`
    between forward and backward pass: the outermost module then holds its gathered parameters, and
    the call does not reach the shards that keep the gradients.

    Changes: The gradient of every step but the first: it becomes the gradient of its own batch.

    Leaves: The accumulation over several passes before one step.

    ## When it is not a defect
    The program is intended to add up the gradients of several steps.

    If so, add `ignore = ["SHD022"]` to `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/issues/7839
    - https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
    """

    code = "SHD022"
    name = "stale-gradient"
    severity = Severity.ERROR

    def check(self, view: ContributionView) -> Iterator[Finding]:
        """Judge steps before which a gradient was left, and those that apply an earlier one."""
        yield from self._frozen(view)
        found = [each for each in view.found if applies_stale(view, each)]
        if len({each.step for each in found}) < FEWEST_STEPS:
            return
        first = found[0]
        ranks = RankSet(rank for each in found for rank in each.ranks)
        yield self.finding(
            f"step {first.step} applies the gradient of {first_and_more(first.kept)} of "
            f"{view.model} that step {first.step - 1} already applied, together with its own: "
            "the gradient was not cleared in between",
            ranks=ranks,
            step=first.step,
            location=user_location(view.site.frames),
            subjects=first.kept,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(ranks=RankSet(each.ranks), summary=in_words(each))
                for each in found
                if each.step == first.step
            ),
        )

    def _frozen(self, view: ContributionView) -> Iterator[Finding]:
        if len(view.frozen) < FEWEST_STEPS:
            return
        first = min(view.events.values(), key=lambda event: event.rank)
        shown = ", ".join(map(str, sorted(view.frozen)))
        yield self.finding(
            f"the steps {shown} apply the gradients of {view.model} that step {first.step} has "
            "applied, number for number, though their backward passes gave others",
            ranks=view.ranks,
            step=min(view.frozen),
            location=user_location(view.site.frames),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=view.ranks,
                    summary=f"finds the same weighted sums in all gradients at step {first.step} "
                    f"and at the steps {shown}, and other ones in what its passes gave",
                ),
            ),
            why="What the optimizer finds in `.grad` is not what the backward passes leave there: "
            "an old tensor was put in its place.",
            fix="Look for what assigns or copies to `.grad` between the backward pass and the "
            "step, and let it take the gradient of this step.",
        )
