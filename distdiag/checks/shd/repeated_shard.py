"""SHD027: ranks add up what a layer makes, and all of them hold the same shard of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.models import PartsSummed
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class RepeatedSums(View):
    """Ranks gave the same to a sum, and held the same weights, at each of these steps."""

    by_rank: Mapping[int, PartsSummed]
    steps: tuple[int, ...]


class RepeatedShard(Check[RepeatedSums]):
    """Ranks add up what a layer makes, and all of them hold the same shard of it.

    ## What you see
    The loss falls like that of a model that is narrower than yours. Each rank drew its shard with
    the same seed, so all shards begin equal, get equal gradients and stay equal; the sum over the
    ranks is one part times the number of ranks.

    ## Example
        torch.manual_seed(0)                                   # wrong: all ranks draw one shard
        torch.manual_seed(1000 + dist.get_rank(tp_group))      # right: each rank draws its own
        self.weight = nn.Parameter(torch.randn(width, width // tp_size))

    ## How to fix
    Initialise the shards with a different seed on each rank: `torch.manual_seed(seed + tp_rank)`
    before the layer is created. Or create the whole tensor with one seed and let each rank keep its
    part.

    Changes: The values with which the shards begin.

    Leaves: Tensors that the ranks share as copies: initialise them with the same seed, before.

    ## When it is not a defect
    The layer is a copy on each rank, and the program divides the sum by the number of ranks.

    If so, add `ignore = ["SHD027"]` to `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/random.py
    """

    code = "SHD027"
    name = "repeated-shard"
    severity = Severity.WARNING

    def check(self, view: RepeatedSums) -> Iterator[Finding]:
        """Name the weights and the sum."""
        ranks, event = RankSet(view.by_rank), view.by_rank[min(view.by_rank)]
        names = tuple(name for name, _ in event.weights)
        model, _, layer = event.module.partition("/")
        steps = " and ".join(map(str, view.steps))
        yield self.finding(
            f"{ranks.phrase()} hold equal shards of {first_and_more(names)} of {model} and add up "
            f"the results of {layer or model}, so that the sum is one part times {len(ranks)}; "
            "shards should differ",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=names,
            # Copies that are summed on purpose look the same.
            grade=Grade.NOTE,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"added the same values to the sum and held the same weights at steps "
                    f"{steps}",
                    location=user_location(event.site.frames),
                    values={"given": event.digest, **dict(event.weights)},
                ),
            ),
        )
