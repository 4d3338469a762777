"""DAT009: ranks that hold shards of one model are given different batches."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import Relation, ReplicatedInputs


class UnequalInput(Check[ReplicatedInputs]):
    """Ranks that hold shards of one model are given different batches.

    ## What you see
    The loss falls more slowly or not at all. Ranks that hold shards of one model must get the same
    batch, because their results are added up; with different batches the sums belong to no sample.

    ## Example
        # wrong: tensor-parallel ranks get different parts of the data
        sampler = DistributedSampler(data)
        # right
        sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())

    ## How to fix
    Divide the data over the data-parallel ranks only:
    `DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank)`. Use the same seed for the
    order on all ranks of one model.

    Changes: Tensor-parallel ranks are given the same batch.

    Leaves: What was already trained on sums of different batches.

    ## When it is not a defect
    Each rank is intended to get its part of one batch, which the model gathers.

    If so, add `ignore = ["DAT009"]` to `distdiag.toml`. Inputs that come from no data loader with
    indices are a note.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "DAT009"
    name = "unequal-input"
    severity = Severity.WARNING
    explains = ("SHD004", "REP003")

    def check(self, view: ReplicatedInputs) -> Iterator[Finding]:
        """Compare the bytes of what the ranks were given."""
        if view.cell.relation is not Relation.EQUAL or view.is_right:
            return
        for by_rank in view.passes:
            known = {fed.inputs for fed in by_rank.values()}
            if len(known) == 1 or any(not each or "" in each for each in known):
                return
        last = view.passes[-1]
        first, number = last[min(last)], len(view.passes)
        yield self.finding(
            f"{view.model} gets different batches on {view.ranks.phrase()}, which hold shards of "
            f"it, in {number} of {number} steps that were compared{view.doubt}",
            ranks=view.ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.model,),
            grade=Grade.NOTE if view.doubt else Grade.LIKELY,
            confidence=0.85,
            evidence=(
                *(
                    Evidence(
                        ranks=view.ranks,
                        summary=f"backward pass {fed.number}: {fed.num_batch} of {fed.num_samples} "
                        "samples, different ones on each rank",
                        values={"stream": fed.stream, "indices": fed.batch},
                    )
                    for fed in (each[min(each)] for each in view.passes)
                ),
                Evidence(
                    ranks=view.ranks,
                    summary=f"the ranks are {view.axis}, as {view.known_by}: {view.cell.reason}",
                ),
            ),
        )
