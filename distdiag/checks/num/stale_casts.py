"""NUM018: autocast goes on with casts of weights from before the optimizer's step."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import CastsReused
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity


class StaleCasts(Check[CastsReused]):
    """A forward pass uses casts of weights that autocast made before the optimizer's step.

    ## What you see
    The loss does not fall, or falls in jumps: within one region autocast casts each weight once,
    and keeps the result although the optimizer has changed the weight.

    ## Example
        with torch.autocast("cuda", torch.bfloat16):   # wrong: one region around several steps
            for batch in batches:
                model(batch).backward()
                optimizer.step()

        for batch in batches:                          # right: a region for each forward pass
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch)
            loss.backward()
            optimizer.step()

    ## How to fix
    Leave the autocast region before the optimizer steps, or pass `cache_enabled=False`.

    Changes: Each forward pass uses the weights of its step.

    Leaves: The type of the arithmetic.

    ## When it is not a defect
    The passes behind the step use other weights than those that it has changed.

    If so, add `ignore = ["NUM018"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/amp.html
    """

    code = "NUM018"
    name = "stale-casts"
    severity = Severity.WARNING

    def check(self, view: CastsReused) -> Iterator[Finding]:
        """Report what a rank has seen: the probe writes it down only where it happens."""
        ranks, location = RankSet([view.rank]), user_location(view.step_site.frames)
        yield self.finding(
            f"{view.optimizer} steps inside an autocast region, and a pass behind it uses casts to "
            f"{view.dtype} from before the step",
            ranks=ranks,
            step=view.step,
            location=location,
            subjects=(view.optimizer,),
            evidence=(
                Evidence(ranks=ranks, summary="steps here", location=location),
                Evidence(
                    ranks=ranks,
                    summary="runs the next backward pass here, in the same region",
                    location=user_location(view.site.frames),
                ),
            ),
        )
