"""NUM018: autocast goes on with casts of weights from before the optimizer's step."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.updates import CastsView


class StaleCasts(Check[CastsView]):
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

    def check(self, view: CastsView) -> Iterator[Finding]:
        """Report what ranks have seen: the probe writes it down only where it happens."""
        seen, ranks = view.any_event, view.ranks
        location = user_location(seen.step_site.frames)
        yield self.finding(
            f"{seen.optimizer} steps inside an autocast region, and a pass behind it uses casts to "
            f"{seen.dtype} from before the step",
            ranks=ranks,
            step=seen.step,
            location=location,
            subjects=(seen.optimizer,),
            evidence=(
                Evidence(ranks=ranks, summary="steps here", location=location),
                Evidence(
                    ranks=ranks,
                    summary="runs the next backward pass here, in the same region",
                    location=user_location(seen.site.frames),
                ),
            ),
        )
