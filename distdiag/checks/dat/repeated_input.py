"""DAT008: ranks that train one model together are given the same batches, whatever makes them."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import OtherInputs, Relation, equal_ranks


class RepeatedInput(Check[OtherInputs]):
    """Ranks that train one model together are given the same batches, step after step.

    ## What you see
    The job computes on many GPUs what one GPU would: the average of equal gradients is one of them.
    A stream is not divided between the ranks, or no longer, or each rank cuts the same part out of
    the data.

    ## Example
        stream = split_dataset_by_node(stream, rank=rank, world_size=world_size)
        # wrong, where a version of the library forgets the division
        stream = stream.skip(seen)
        # right
        stream = split_dataset_by_node(stream.skip(seen), rank=rank, world_size=world_size)

    ## How to fix
    Divide the data between the ranks that train the model together, as the last step before the
    loader, and print the first batch of each rank.

    Changes: Each rank reads its own part, and an epoch has fewer steps.

    Leaves: The batch size of each rank; the learning rate may need another value.

    ## When it is not a defect
    The ranks share the work on one batch, as tensor-parallel ranks do, or the run is only a trial.

    If so, add `ignore = ["DAT008"]` to `distdiag.toml`. Batches that the program draws at random
    are a note.

    ## References
    - https://github.com/huggingface/datasets/issues/8568
    - https://huggingface.co/docs/datasets/use_with_pytorch#distributed
    """

    code = "DAT008"
    name = "repeated-input"
    severity = Severity.WARNING

    def check(self, view: OtherInputs) -> Iterator[Finding]:
        """Compare the bytes of what the ranks were given."""
        if view.cell.relation is not Relation.DIFFERENT or view.is_right:
            return
        same = set(view.ranks)
        for by_rank in view.passes:
            known = {rank: fed.inputs for rank, fed in by_rank.items()}
            if any(not digests or "" in digests for digests in known.values()):
                return
            same &= set(equal_ranks(known))
        if not same:
            return
        ranks, first = RankSet(same), view.passes[-1][min(same)]
        given = [by_rank[min(same)] for by_rank in view.passes]
        numbers = [str(fed.number) for fed in given]
        whence = f" from {first.stream.partition(' by ')[0]}" if first.stream else ""
        yield self.finding(
            f"{view.model} is given the same batch{whence} on {ranks.phrase()} in all "
            f"{len(given)} steps that were compared{view.doubt}",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.model,),
            grade=Grade.NOTE if view.doubt else Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"the tensors of {max(first.batch_sizes)} rows that the model is given "
                    f"have the same bytes, in each of the backward passes {', '.join(numbers)}",
                    values={"first_tensor": first.inputs[0]},
                ),
                Evidence(
                    ranks=view.ranks,
                    summary=f"the ranks are {view.axis}, as {view.known_by}: {view.cell.reason}",
                ),
            ),
        )
