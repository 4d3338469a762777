"""REP002: a tensor was never written on some ranks."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    MOST_SHOWN,
    evidence_of,
    figures,
    first_and_more,
    grade_of,
    is_garbage,
    is_untouched,
    location_on,
    names_of,
    suspects_of,
    unwritten_ranks,
)
from distdiag.events.models import Content, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ContentView, StartReplicas


class UninitialisedReplica(Check[ContentView | StartReplicas]):
    """A tensor was never written, on some ranks or on all.

    ## What you see
    The model trains on whatever the memory held: huge numbers, zeros or NaN. These ranks only
    reserved memory for the tensor, and nothing loaded or sent its values to them (often buffers or
    frozen modules).

    ## Example
        if rank != 0:
            model.to_empty(device="cuda")
        # wrong: buffers are not parameters
        for tensor in model.parameters():
            dist.broadcast(tensor, src=0)
        # right
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)

    ## How to fix
    Load or broadcast every tensor on these ranks before it is used: `dist.broadcast(tensor, src=0)`
    for all of `model.parameters()` and `model.buffers()`, modules that are not trained included.

    Changes: The values on these ranks, and with them the results.

    Leaves: Tensors that differ but do not look unwritten: REP001 names those.

    ## When it is not a defect
    The values on these ranks are those of the checkpoint or of the initialiser.

    If so, add `ignore = ["REP002"]` to `distdiag.toml`.

    ## References
    - https://github.com/hiyouga/LlamaFactory/issues/10820
    - https://github.com/huggingface/transformers/issues/45902
    """

    code = "REP002"
    name = "uninitialised-replica"
    severity = Severity.ERROR

    def check(self, view: ContentView | StartReplicas) -> Iterator[Finding]:
        """Judge all contents, or what differs between copies."""
        yield from (
            self._of_contents(view) if isinstance(view, ContentView) else self._of_copies(view)
        )

    def _of_contents(self, view: ContentView) -> Iterator[Finding]:
        """Find tensors that look like memory that nobody wrote, on some ranks or on all."""
        suspects = suspects_of(view)
        if not suspects:
            return
        ranks = RankSet(suspects)
        names = tuple(dict.fromkeys(p.name for pairs in suspects.values() for p, _ in pairs))
        yield self.finding(
            _message(names, view.model, ranks),
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(ranks=RankSet([rank]), summary=_summary(plan, content))
                for rank, pairs in suspects.items()
                for plan, content in pairs[:MOST_SHOWN]
            ),
        )

    def _of_copies(self, view: StartReplicas) -> Iterator[Finding]:
        """Find tensors that are zero on some ranks only; others are found by their contents."""
        zeros = [
            each
            for each in view.tensors
            if not any(is_garbage(each.plan, content) for content in each.by_rank.values())
        ]
        culprits = unwritten_ranks(zeros)
        if not culprits:
            return
        bad = [tensor for tensor in view.tensors if unwritten_ranks([tensor])]
        rest = [tensor for tensor in view.tensors if tensor not in bad]
        names = names_of([*bad, *rest])
        yield self.finding(
            _message(names, view.model, culprits),
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            grade=grade_of(view, has_culprit=True),
            evidence=evidence_of(view, [*bad, *rest]),
        )


def _summary(plan: TensorPlan, content: Content) -> str:
    left = ", as `to_empty` left it" if is_untouched(plan, content) else ""
    return f"{plan.name}: {figures(content)}{left}"


def _message(names: tuple[str, ...], model: str, ranks: RankSet) -> str:
    return (
        f"{first_and_more(names)} of {model}: never written on {ranks.phrase()}, as the values show"
    )
