"""NUM018: autocast goes on with casts of weights from before the optimizer's step."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.updates import CastsView


class StaleCasts(Check[CastsView]):
    """A forward pass uses casts of weights that autocast made before the optimizer's step.

    ## What you see
    The loss does not fall, or falls in jumps. Within one autocast region torch casts each weight
    once and keeps the cast, although the optimizer has changed the weight in the meantime.

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
    Close the `with torch.autocast(...)` block before `optimizer.step()`. Or pass
    `cache_enabled=False` to `torch.autocast`.

    Changes: Each forward pass uses the weights of its step.

    Leaves: The dtype of the arithmetic.

    ## When it is not a defect
    The forward passes after the step use weights that the step did not change.

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
            f"{seen.optimizer} steps inside an autocast region, and a later pass uses casts to "
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
