"""SEQ012: gradients of a rank's own tokens are never summed over the ranks that hold copies."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.gradient_event import GradientSums
from distdiag.gradient_view import GradientView, SumsView
from distdiag.model_event import ModelState
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.forgotten_sums import doubt_of, forgotten_in, summed_in
from distdiag.reasoning.part_gradients import PartGradients, part_gradients
from distdiag.reasoning.replicas import first_and_more


class ForgottenGradientSum(Check):
    """Gradients of a rank's own tokens are never summed over the ranks that hold copies.

    ## What it detects
    Parameters that are the same on all ranks of a group at first, get another gradient on each of
    them, and drift apart, since the optimizer applies these as they are. That it is not meant is
    told by one of two things. Either the graph of the loss tells that they are parameters of layers
    that work on parts of sequences, which are gathered for shards of other parameters. Or the
    program sums the gradients of others over these ranks: of routers it leaves out, or of some
    parameters whose like in other layers is summed, and others in the same layer, too. Where it
    sends more in some later step, it may be meant to be summed now and then; and routers may be
    each rank's own where experts are, too, that were the same at first: these are notes. Up to 24
    parameters of a model are looked at in the first way. Gathers by functional collectives, or
    within compiled code or reentrant checkpointing, are not followed.

    ## Why it matters
    Each copy is trained on one part of the tokens. The ranks go on with different models, and what
    is saved is one of them.

    ## Example
    Layer norms, routers and biases between the reduce-scatter and the next all-gather of sequence
    parallelism; a loop over parameters that leaves some of them out.

    ## How to fix
    All-reduce these gradients over the group after the backward pass, before clipping and the step.

    ## References
    - NVIDIA/Megatron-LM#656
    - bigcode-project/Megatron-LM#37
    """

    code = "SEQ012"
    name = "forgotten-gradient-sum"
    severity = Severity.ERROR
    needs = (GradientSums, ModelState)

    why = "A backward pass gives each rank the gradient of its own tokens."
    fix = "All-reduce the gradients of these parameters over these ranks before each step."
    fix_changes = "The gradient of every copy: it becomes that of all tokens."
    fix_leaves = "The copies that differ already since earlier steps."
    disproof = "Each rank is meant to train these parameters for itself."

    def check_gradients(self, view: GradientView) -> Iterator[Finding]:
        """Look for parameters that work on parts of sequences."""
        for found in part_gradients(view):
            ranks = RankSet(found.ranks)
            yield self.finding(
                f"the gradient of {first_and_more(found.names)} of {view.model} is that of each "
                f"rank's own part of the sequences, and is not summed over {ranks.phrase()}, "
                "which hold copies of it: one sum before each step was expected",
                ranks=ranks,
                step=found.step,
                location=user_location(view.looks[0].by_rank[found.ranks[0]].site.frames),
                subjects=found.names,
                grade=Grade.LIKELY,
                confidence=0.9,
                evidence=(self._given(view, found), *_applied(view, found)),
            )

    def _given(self, view: GradientView, found: PartGradients) -> Evidence:
        return Evidence(
            ranks=RankSet(found.ranks),
            summary=f"{len(found.names)} parameters work on parts of sequences that are gathered "
            f"over these ranks for {found.num_shards} others; all of them were the same at first, "
            f"and were different before step {view.looks[-1].step}",
        )

    def check_sums(self, view: SumsView) -> Iterator[Finding]:
        """Look for parameters that a program leaves out of its sums."""
        names, summed = forgotten_in(view), summed_in(view)
        if not names:
            return
        ranks = RankSet(view.ranks)
        doubt = doubt_of(view, names)
        but = f"; but {doubt}" if doubt else ""
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} is not summed over "
            f"{ranks.phrase()}, which hold copies of it, while those of {len(summed)} other "
            f"parameters are: one sum before each step was expected{but}",
            ranks=ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=names,
            severity=Severity.WARNING,
            grade=Grade.NOTE if doubt else Grade.LIKELY,
            confidence=0.4 if doubt else 0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{len(names)} parameters were the same at first, had different "
                    f"gradients at {len(view.sums[names[0]])} steps and differ since then; "
                    f"summed are {', '.join(summed[:3])} and others",
                ),
            ),
        )


def _applied(view: GradientView, found: PartGradients) -> Iterator[Evidence]:
    for rank in found.ranks:
        own = view.looks[0].named(rank)[found.names[0]]
        yield Evidence(
            ranks=RankSet([rank]),
            summary=f"{own.name}: the backward pass gave a gradient whose weighted sum is "
            f"{own.given:.4g}, the optimizer found {own.applied:.4g}",
        )
