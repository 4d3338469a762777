"""SHD029: a program combines the shards of one parameter as if they were copies of it."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.updates import ShardsView


class CombinedShards(Check[ShardsView]):
    """A collective reduces or broadcasts shards of one parameter as if they were copies.

    ## What you see
    The loss looks plausible and the model learns little: each rank holds other elements of the
    parameter or its gradient, and elements that have nothing to do with each other are added up,
    or overwritten. All shards are the same afterwards.

    ## Example
        fully_shard(model)
        loss.backward()                          # FSDP has reduced the gradients
        for p in model.parameters():
            dist.all_reduce(p.grad.to_local())   # wrong: adds up different elements
        optimizer.step()                         # right: without that loop

    ## How to fix
    Leave the reduction over the ranks that shard a parameter to the wrapper. Reduce by hand only
    over an axis of the mesh along which the parameter is replicated.

    Changes: The gradient, or the parameter, of every rank.

    Leaves: Parameters that were already trained with the mixed gradients.

    ## When it is not a defect
    The memory of the shard is used for something else at that moment.

    If so, add `ignore = ["SHD029"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "SHD029"
    name = "combined-shards"
    severity = Severity.ERROR

    def check(self, view: ShardsView) -> Iterator[Finding]:
        """Report what ranks have seen: the probe writes it down only where it happens."""
        seen, over = view.any_event, RankSet(view.any_event.ranks)
        what = f"the gradient of {seen.parameter}" if seen.is_gradient else seen.parameter
        how = f"reduces ({seen.reduce_op})" if seen.reduce_op else "broadcasts"
        yield self.finding(
            f"a collective over {over.phrase()} {how} {what}, of which each of these ranks holds "
            "other elements: their shards are no copies",
            ranks=view.ranks,
            step=seen.step,
            location=user_location(seen.site.frames),
            subjects=(seen.parameter,),
            evidence=(
                Evidence(
                    ranks=view.ranks,
                    summary=f"gives the memory of its own shard of {what} to the collective",
                ),
            ),
        )
