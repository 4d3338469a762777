"""SHD004: an optimizer applies gradients that were not reduced over all copies."""

from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    NOT_REDUCED,
    evidence_of,
    first_and_more,
    grade_of,
    location_on,
    names_of,
)
from distdiag.checks.shd.partly_reduced_gradient import FEWEST_STEPS
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.contributions import FEWEST, Contribution, ContributionView
from distdiag.views.gradients import SameWorkView
from distdiag.views.models import GradientReplicas

_IF_AVERAGED: Final = (
    "Nothing, if the ranks are to step by themselves here and average their weights from time to "
    "time, as local SGD does. Else:"
)


def givers_of(found: Contribution) -> dict[str, int]:
    """Return, for shards, the one rank of several whose gradient alone is applied, by parameter."""
    if not found.is_sharded or len(found.ranks) < 2:
        return {}
    givers = {each.name: each.giver for each in found.outliers if each.giver is not None}
    used = [source for source in found.vector if not found.is_nothing(source)]
    sole = {rank for source in used for rank in source.ranks}
    return givers | (dict.fromkeys(found.names, sole.pop()) if len(sole) == 1 else {})


def parted_groups(view: ContributionView) -> tuple[tuple[int, ...], ...]:
    """Return the groups of several ranks of which each applies the sum over itself in all steps."""
    found: set[tuple[tuple[int, ...], ...]] = set()
    for contributions in view.by_step().values():
        groups = {each.ranks for each in contributions}
        used = [
            {rank for source in each.vector if not each.is_nothing(source) for rank in source.ranks}
            for each in contributions
        ]
        pairs = zip(contributions, used, strict=True)
        is_own = all(ranks == set(each.ranks) and len(ranks) > 1 for each, ranks in pairs)
        is_whole = sorted(rank for group in groups for rank in group) == sorted(view.ranks)
        found.add(tuple(sorted(groups)) if is_own and is_whole else ())
    is_known = len(found) == 1 and len(view.by_step()) >= FEWEST_STEPS
    parts = found.pop() if is_known else ()
    return parts if len(parts) > 1 else ()


def names_apart(view: ContributionView, groups: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Return the copies to which these groups apply different gradients in the first step."""
    applied: dict[str, set[tuple[float, ...]]] = {}
    for group in groups:
        sums: dict[str, list[tuple[float, ...]]] = {}
        for rank in group:
            for each in view.events[rank].gradients if rank in view.events else ():
                if each.name in view.copies and any(each.applied):
                    sums.setdefault(each.name, []).append(each.applied)
        for name, found in sums.items():
            applied.setdefault(name, set()).add(tuple(map(sum, zip(*found, strict=True))))
    return tuple(name for name, found in applied.items() if len(found) == len(groups) > 1)


class UnreducedGradient(Check[GradientReplicas | ContributionView | SameWorkView]):
    """An optimizer applies gradients that differ between the copies of a parameter.

    ## What you see
    From this step on the ranks train different models, while the loss looks plausible. Each rank
    updates its copy of the parameter with the gradient of its own batch, heads or tokens.

    ## Example
        loss.backward()
        # right: these two lines; wrong: without them
        for norm in replicated_norms:
            dist.all_reduce(norm.weight.grad, group=tp_group)
        optimizer.step()

    ## How to fix
    All-reduce the gradient over all ranks that hold a copy, once, after the last backward pass and
    before clipping and the step: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`. Or wrap the model
    in DDP, which does this.

    Changes: The gradient of every copy: it becomes the mean or the sum over the ranks.

    Leaves: Copies that have already diverged in earlier steps.

    ## When it is not a defect
    Each rank is intended to train its own model, or the ranks average their weights from time to
    time.

    If so, add `ignore = ["SHD004"]` to `distdiag.toml`.

    ## References
    - https://github.com/bigcode-project/Megatron-LM/issues/37
    - https://github.com/deepspeedai/DeepSpeed/issues/8382
    """

    code = "SHD004"
    name = "unreduced-gradient"
    severity = Severity.ERROR

    def check(self, view: GradientReplicas | ContributionView | SameWorkView) -> Iterator[Finding]:
        """Judge gradients at the step."""
        if isinstance(view, ContributionView):
            yield from self._of_shards(view)
            yield from self._of_groups(view)
        elif isinstance(view, SameWorkView):
            yield from self._of_same_work(view)
        else:
            yield from self._of_copies(view)

    def _of_groups(self, view: ContributionView) -> Iterator[Finding]:
        """Note groups that sum gradients of what all ranks began with, each for itself."""
        groups = parted_groups(view)
        names = names_apart(view, groups)
        if len(names) < FEWEST:
            return
        parts = " and ".join(RankSet(group).phrase() for group in groups)
        yield self.finding(
            f"the gradients of {first_and_more(names)} of {view.model} are summed over {parts}, "
            "each for itself, though all of these ranks began with the same parameters: nothing "
            "sums them over the other axis, and the copies drift apart",
            ranks=view.ranks,
            step=min(view.by_step()),
            location=user_location(view.site.frames),
            subjects=names,
            grade=Grade.NOTE,
            confidence=0.5,
            evidence=tuple(
                Evidence(
                    ranks=RankSet(group),
                    summary=f"apply what {RankSet(group).phrase()} gave, and nothing else",
                )
                for group in groups
            ),
        )

    def _of_shards(self, view: ContributionView) -> Iterator[Finding]:
        """Look for parts of which the optimizer finds one rank's gradient instead of the sum."""
        givers = [(each, givers_of(each)) for each in view.found if each.is_sharded]
        shown = [(each, names) for each, names in givers if len(names) >= FEWEST]
        if len({each.step for each, _ in shown}) < FEWEST_STEPS or len(shown) < len(givers):
            return
        first, names = shown[0]
        ranks = RankSet(first.ranks)
        yield self.finding(
            f"the gradient of {first_and_more(tuple(names))} of {view.model} was not reduced over "
            f"{ranks.phrase()}, which hold shards of it: step {first.step} applies the gradient "
            "of one rank alone",
            ranks=ranks,
            step=first.step,
            location=user_location(view.site.frames),
            subjects=tuple(names),
            evidence=tuple(_given(rank, names) for rank in sorted(set(names.values()))),
            why="The model learns from a part of each batch only, although the loss looks "
            "plausible. Each rank updates its shard with a gradient that lacks the batches of all "
            "other ranks.",
            fix="Reduce the gradients over all ranks that hold shards, before the step. If a "
            "library should do this, check its settings and its version for this device.",
        )

    def _of_same_work(self, view: SameWorkView) -> Iterator[Finding]:
        """Look for gradients that end where activations are exchanged, before they are summed."""
        if not view.apart or len(view.equal) < FEWEST:
            return
        ranks = RankSet(view.ranks)
        yield self.finding(
            f"the gradient of {first_and_more(view.apart)} of {view.model} differs between "
            f"{ranks.phrase()}, which hold copies of it, are given the same inputs and exchange "
            f"activations, while those of {len(view.equal)} other parameters are equal at step "
            f"{view.step}: it was not summed over these ranks",
            ranks=ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=view.apart,
            severity=Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{len(view.apart)} parameters were equal at first, had different "
                    f"gradients at {view.num_samples} steps and differ since then; the gradients "
                    f"of {', '.join(view.equal[:3])} and others were equal at first",
                ),
            ),
            why="The copies of all layers before a split layer drift apart. Each rank's part of "
            "the split layer computes one part of the gradient of its input, and these parts were "
            "not summed over the ranks.",
            fix="All-reduce the gradient of the input of the split layer over these ranks in the "
            "backward pass, as you all-reduce its output in the forward pass: an autograd function "
            "whose `backward` calls `dist.all_reduce(gradient, group=tp_group)`.",
        )

    def _of_copies(self, view: GradientReplicas) -> Iterator[Finding]:
        if view.evidence in (*NOT_REDUCED, ReplicaEvidence.BYPASSED):  # SHD019 names the bypassed
            return
        tensors = [tensor for tensor in view.tensors if not tensor.plan.is_late]
        if not tensors:
            return
        names = names_of(tensors)
        # Steps inside no_sync may be intended: local ones, and an average now and then.
        is_meant = view.evidence is ReplicaEvidence.UNSYNCED and not view.num_unsynced_steps
        if view.evidence is ReplicaEvidence.OTHER_GROUPS and not view.num_unsynced_steps:
            return  # they may yet be reduced in another way
        never = f"; in {view.num_unsynced_steps} steps nothing as large was exchanged between them"
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} differs between "
            f"{view.ranks.phrase()}, which hold copies of it, when step {view.step} begins"
            f"{never if view.num_unsynced_steps else ''}",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            severity=Severity.WARNING
            if view.evidence is ReplicaEvidence.LONE or view.num_unsynced_steps
            else None,
            grade=Grade.NOTE if is_meant else grade_of(view, has_culprit=True),
            confidence=0.5 if is_meant else 0.95,
            evidence=evidence_of(view, tensors),
            fix=f"{_IF_AVERAGED} {self.fix}" if is_meant else self.fix,
        )


def _given(rank: int, names: dict[str, int]) -> Evidence:
    mine = tuple(name for name, giver in names.items() if giver == rank)
    return Evidence(
        ranks=RankSet([rank]),
        summary=f"contributed the whole gradient that is applied to {first_and_more(mine)}, by "
        "weighted sums",
    )
