"""CKP002: some ranks save their part of a sharded parameter, and the others save none."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.alignment import SliceSaveView


class SliceSavedAsWhole(Check[SliceSaveView]):
    """Some ranks save their part of a sharded parameter, and the others save none.

    ## What it detects
    `torch.save` of the local parts of sharded parameters on some of the ranks that hold parts, and
    on the others never in the whole run.

    ## Why it matters
    The file holds a fraction of each parameter. What the other ranks had trained is lost, and a
    load leaves their parts as they were initialised.

    ## Example
    `if rank == 0: torch.save({n: p.to_local() for n, p in model.named_parameters()}, path)`.

    ## How to fix
    Gather first (`full_tensor()` on all ranks, or `get_model_state_dict` with full state), then
    save on one rank; or save with `torch.distributed.checkpoint` on all ranks.

    ## References
    - huggingface/accelerate#4206
    """

    code = "CKP002"
    name = "slice-saved-as-whole"
    severity = Severity.ERROR

    why = "A sharded parameter is on no rank as a whole: each has its own rows or columns."
    fix = "Call `full_tensor()` on all ranks and save the result on one of them."
    fix_changes = "The size of the checkpoint, and the memory that saving it needs."
    fix_leaves = "Checkpoints that were written before: they lack the other parts."
    disproof = "The saved tensors have the global shapes of the parameters."

    def check(self, alignment: SliceSaveView) -> Iterator[Finding]:
        """Name the ranks whose parts were never saved."""
        if alignment.kind != "save":
            return
        first = alignment.any_event
        location = user_location(first.site.frames)
        lost = alignment.missing_ranks
        yield self.finding(
            f"{alignment.present_ranks.phrase()} saved only its own part of "
            f"{first_and_more(first.names)}; the parts of {lost.phrase()} were saved nowhere",
            ranks=lost,
            step=first.step,
            location=location,
            subjects=first.names,
            evidence=(
                Evidence(
                    ranks=alignment.present_ranks,
                    summary=f"torch.save of the local parts of {len(first.names)} parameters",
                    location=location,
                ),
                Evidence(ranks=lost, summary="never saved their parts in this run"),
            ),
        )
