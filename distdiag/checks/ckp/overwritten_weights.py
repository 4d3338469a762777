"""CKP008: a distributed checkpoint keeps one rank's weights under a key where each has its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.checkpoints import SavedWeight, WeightsSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class SavedWeightsView(View):
    """What all ranks gave to one distributed checkpoint as plain tensors.

    `own` are the keys of parameters that each rank has for itself, with how that is known.
    """

    by_rank: Mapping[int, WeightsSaved]
    own: Mapping[str, str]


class OverwrittenWeights(Check[SavedWeightsView]):
    """A distributed checkpoint keeps one rank's weights under a key where each rank has its own.

    ## What you see
    Saving and loading succeed, but after a resume all ranks have the weights of one rank, and the
    weights of the others are lost. A distributed checkpoint writes a tensor that is not sharded
    only once under its key, even if several ranks pass different tensors.

    ## Example
        # wrong: each rank numbers its experts from 0
        self.experts = nn.ModuleList(experts[first:last])
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        # right: a name of its own for each expert
        self.experts = nn.ModuleDict({str(i): experts[i] for i in range(first, last)})
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)

    ## How to fix
    Put the owner into the name of the tensor, for example the number of the expert among all
    experts (`experts.{rank * num_local + i}.weight`). Or save the tensors as shards of one
    `DTensor`.

    Changes: The keys of new checkpoints; old ones cannot be loaded under the new keys.

    Leaves: Checkpoints that were already written: they lack the weights of the other ranks.

    ## When it is not a defect
    After a load, the weights of any rank are right for all ranks.

    If so, add `ignore = ["CKP008"]` to `distdiag.toml`.

    ## References
    - https://github.com/KempnerInstitute/KempnerForge/issues/202
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "CKP008"
    name = "overwritten-weights"
    severity = Severity.ERROR

    def check(self, view: SavedWeightsView) -> Iterator[Finding]:
        """Name the keys under which ranks save different values."""
        if len({event.checkpoint for event in view.by_rank.values()}) > 1:
            return
        by_key: dict[str, dict[int, SavedWeight]] = {}
        for rank, event in view.by_rank.items():
            for weight in event.weights:
                if weight.key in view.own:
                    by_key.setdefault(weight.key, {})[rank] = weight
        apart = {k: e for k, e in by_key.items() if len({x.digest for x in e.values()}) > 1}
        if not apart:
            return
        ranks = RankSet(rank for each in apart.values() for rank in each)
        event = view.by_rank[min(ranks)]
        key, different = next(iter(apart.items()))
        yield self.finding(
            f"{ranks.phrase()} save different weights as {first_and_more(tuple(apart))}, but a "
            "distributed checkpoint keeps those of one rank only",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=tuple(apart)[:32],
            evidence=(
                Evidence(ranks=ranks, summary=f"{key}: {view.own[key]}"),
                *(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"saved {list(each.shape)} numbers with digest {each.digest[1:9]}",
                    )
                    for rank, each in sorted(different.items())[:8]
                ),
            ),
        )
