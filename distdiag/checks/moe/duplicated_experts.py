"""MOE005: ranks that should hold different experts start with the same ones."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.experts import Experts, experts_in
from distdiag.views.models import ExpertContents


class DuplicatedExperts(Check[ExpertContents]):
    """Ranks that should hold different experts start with the same ones.

    ## What you see
    The model has fewer different experts than its router assumes, only as many as without expert
    parallelism. All ranks initialise their experts with the same random numbers, so experts on
    different ranks start as copies of one another.

    ## Example
        # wrong: each rank draws the same experts
        torch.manual_seed(0)
        experts = build_experts(num_local)
        # right
        torch.manual_seed(ep_rank)
        experts = build_experts(num_local)

    ## How to fix
    Call `torch.manual_seed(seed + ep_rank)` before the experts are created, with the rank in the
    expert-parallel group, and seed all ranks alike again after it. Or load the part of the
    checkpoint that belongs to the rank.

    Changes: The experts of all ranks but one.

    Leaves: The router and everything that is replicated.

    ## When it is not a defect
    The experts are intended to start as copies of one another, for example when a dense model is
    upcycled.

    If so, add `ignore = ["MOE005"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """

    code = "MOE005"
    name = "duplicated-experts"
    severity = Severity.WARNING

    def check(self, view: ExpertContents) -> Iterator[Finding]:
        """Count the experts that differ."""
        wrong = [each for each in experts_in(view.by_rank) if _are_duplicated(each)]
        if not wrong:
            return
        first = wrong[0]
        ranks = _ranks_with_copies(first)
        layers = list(dict.fromkeys(each.layer or "the model itself" for each in wrong))
        site = view.sites.get(min(ranks))
        yield self.finding(
            f"the experts of {', '.join(layers[:3])} of {view.model} are the same on "
            f"{ranks.phrase()}: the router knows {first.num_total} experts and each rank holds "
            f"{first.num_local}, but there are {_num_different(first)} different ones",
            ranks=ranks,
            step=view.step,
            location=user_location(site.frames) if site is not None else None,
            subjects=tuple(f"{e.layer}.{e.parameter}".lstrip(".") for e in wrong[:16]),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{first.parameter} of the experts of {first.layer or 'the model'}",
                    values={str(place): digest for place, digest in enumerate(digests[:8])},
                )
                for rank, digests in sorted(first.digests.items())
            ),
        )


def _are_duplicated(each: Experts) -> bool:
    if not 0 < each.num_local < each.num_total or each.num_total % each.num_local:
        return False
    if len(each.groups) * each.num_local < each.num_total:
        return False  # replicas, by what is known of them: not the experts are shared out
    if any(len(set(digests)) < len(digests) for digests in each.digests.values()):
        return False
    return _num_different(each) < each.num_total


def _num_different(each: Experts) -> int:
    different = {digest for digests in each.digests.values() for digest in digests}
    return len(different) * (each.num_local if each.is_stacked else 1)


def _ranks_with_copies(each: Experts) -> RankSet:
    holders: dict[str, set[int]] = {}
    for rank, digests in each.digests.items():
        for digest in digests:
            holders.setdefault(digest, set()).add(rank)
    return RankSet(rank for ranks in holders.values() if len(ranks) > 1 for rank in ranks)
