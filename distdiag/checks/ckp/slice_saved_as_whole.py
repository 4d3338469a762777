"""CKP002: a checkpoint holds only some ranks' parts of a sharded parameter."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.alignment import SliceSaveView


class SliceSavedAsWhole(Check[SliceSaveView]):
    """A checkpoint holds only some ranks' parts of a sharded parameter.

    ## What you see
    The file holds only a part of each parameter, or the experts of some ranks; what the other ranks
    have trained is lost. No rank has a sharded parameter as a whole: each rank has its own rows or
    columns.

    ## Example
        # wrong: saves the rows of rank 0 only
        if rank == 0:
            torch.save({n: p.to_local() for n, p in model.named_parameters()}, path)

        # right: all ranks gather, one saves
        state = {n: p.full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(state, path)

    ## How to fix
    Call `parameter.full_tensor()` on all ranks and save the result on one of them. Or save on all
    ranks with `torch.distributed.checkpoint` (`dcp.save(state, checkpoint_id=folder)`). Each rank
    must save its own experts.

    Changes: The size of the checkpoint, and the memory that saving needs.

    Leaves: Checkpoints that were already written: they lack the other parts.

    ## When it is not a defect
    The saved tensors have the global shapes of the parameters.

    To silence it, set `ignore = ["CKP002"]` in `distdiag.toml`.

    ## References
    - https://github.com/huggingface/accelerate/issues/4206
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "CKP002"
    name = "slice-saved-as-whole"
    severity = Severity.ERROR

    def check(self, alignment: SliceSaveView) -> Iterator[Finding]:
        """Name the ranks whose parts were never saved."""
        first = alignment.any_event
        location = user_location(first.site.frames)
        lost = alignment.missing_ranks
        yield self.finding(
            f"{alignment.present_ranks.phrase()} saved only its own part of "
            f"{first_and_more(first.names)}; the parts of {lost.phrase()} were never saved",
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
