"""SHD026: a method of a sharded model is called in the place of its forward pass."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import raised_phrase, user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, shortened
from distdiag.views.rank_states import JobView


class UnhookedMethod(Check[JobView]):
    """A method of a sharded model is called in the place of its forward pass.

    ## What you see
    An operator fails because it got plain tensors and DTensors together. FSDP2 gathers the
    parameters only when the module itself is called; inside any other method they are still shards.

    ## Example
        fully_shard(model)
        loss = model.compute_loss(batch)                          # wrong
        register_fsdp_forward_method(model, "compute_loss")       # right: before that

    ## How to fix
    Register the method: `register_fsdp_forward_method(model, "generate")` (from
    `torch.distributed.fsdp`). Or call the method from `forward`.

    Changes: FSDP2 gathers the parameters before the method and shards them again after it.

    Leaves: The result of the method.

    ## When it is not a defect
    The method is intended to work on shards, and the exception has a different reason.

    If so, add `ignore = ["SHD026"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    - https://github.com/pytorch/pytorch/issues/153354
    """

    code = "SHD026"
    name = "unhooked-method"
    severity = Severity.ERROR
    covers = ("HNG001",)

    def check(self, view: JobView) -> Iterator[Finding]:
        """Look at ranks that failed in such a method by an exception about shards."""
        raised = {
            rank: state.raised
            for rank, state in view.states.items()
            if state.raised is not None and state.raised.unhooked
        }
        found = {rank: each for rank, each in raised.items() if "DTensor" in each.message}
        if not found:
            return
        first = found[min(found)]
        where = user_location(first.frames)
        yield self.finding(
            f"{RankSet(found).phrase()} called {first.unhooked}, which FSDP2 does not know, so its "
            "parameters were not gathered: "
            f"{raised_phrase(view.states[min(found)])}",
            ranks=RankSet(found),
            step=first.step,
            location=where,
            subjects=(first.unhooked,),
            evidence=(
                Evidence(
                    ranks=RankSet(found),
                    summary=f"raised {raised_phrase(view.states[min(found)])}",
                    location=where,
                    values={"traceback": shortened(first.traceback, LONGEST_TRACEBACK)},
                ),
            ),
        )
