"""SEQ008: gradients of parts of one sequence are never combined over the ranks that share it."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import Losses, ModelEquality, SequenceView


class UnreducedSequenceAxis(Check[SequenceView]):
    """Gradients of parts of one sequence are never combined over the ranks that share it.

    ## What you see
    The copies of the model diverge, because each rank trains on its own tokens only. The process
    group of DDP or FSDP leaves out the ranks that share a sequence, or there is no such group.

    ## Example
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
        # wrong: averages over 2 of 8 ranks
        fully_shard(model, mesh=mesh["dp"])
        # right
        fully_shard(model, mesh=mesh["dp", "sp"]._flatten("dp_sp"))

    ## How to fix
    Wrap the model over the data-parallel and the sequence-parallel ranks together:
    `DistributedDataParallel(model, process_group=dp_and_sp_group)`, or pass a mesh of both axes to
    `fully_shard(model, mesh=mesh)`.

    Changes: The gradient on every rank: it becomes the gradient of whole sequences.

    Leaves: Copies that have already diverged in earlier steps.

    ## When it is not a defect
    The gradient of a parameter is the same on these ranks when the step begins.

    If so, add `ignore = ["SEQ008"]` to `distdiag.toml`. It is a note where the ranks begin with
    different weights.

    ## References
    - https://github.com/bigcode-project/Megatron-LM/issues/37
    """

    code = "SEQ008"
    name = "unreduced-sequence-axis"
    severity = Severity.ERROR

    def check(self, view: SequenceView) -> Iterator[Finding]:
        """Look for groups in which nothing is combined."""
        if (
            view.is_reduced
            or view.how == "all_gather"
            or view.equality is ModelEquality.OTHER_MODELS
        ):
            return
        # Ranks that begin with other values may train models of their own.
        is_sure = view.equality is not ModelEquality.OTHER_VALUES
        for members in members_of(view):
            last = view.losses[-1]
            if _are_stages(last, members):
                continue
            combined = sorted({RankSet(last[rank].members or (rank,)) for rank in members}, key=str)
            use = view.passes[-1][members[0]].uses[0]
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)}, but their "
                f"gradients are not combined: over {len(view.losses)} sampled steps "
                "nothing was reduced between these ranks, and one reduction in each step was "
                "expected",
                ranks=RankSet(members),
                step=last[members[0]].step,
                location=user_location(last[members[0]].site.frames),
                grade=Grade.LIKELY if is_sure else Grade.NOTE,
                confidence=0.85 if is_sure else 0.4,
                evidence=(
                    Evidence(
                        ranks=RankSet(members),
                        summary="gradients are combined over "
                        + ", ".join(each.phrase() for each in combined)
                        + ", each by itself; sequences are shared at this line",
                        location=user_location(use.site.frames),
                    ),
                ),
            )


def _are_stages(losses: Losses, members: tuple[int, ...]) -> bool:
    """Say whether only some ranks have a loss: then what they pass on is a pipeline's."""
    return len({any(losses[rank].passes) for rank in members}) > 1
