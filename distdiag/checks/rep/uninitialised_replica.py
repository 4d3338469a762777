"""REP002: a tensor was never written on some ranks."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    MOST_SHOWN,
    evidence_of,
    figures,
    first_and_more,
    grade_of,
    is_garbage,
    location_on,
    names_of,
    suspects_of,
    unwritten_ranks,
)
from distdiag.events.models import Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ContentView, StartReplicas


class UninitialisedReplica(Check[ContentView | StartReplicas]):
    """A tensor was never written, on some ranks or on all.

    ## What it detects
    A parameter or buffer that contains NaN or looks like memory as it was found (huge numbers, many
    subnormal ones) when the model is used for the first time; one that is all zeros on some ranks
    and not on others which should hold the same; a rank whose part of a model is mostly zeros.

    ## Why it matters
    Loading on one rank only is the usual way to spare memory. Whatever is then not sent to the
    others (frozen parts, buffers that are not saved, parts built later) is what the allocator left
    there: training runs on it, or turns into NaN by chance.

    ## Example
    `from_pretrained` on rank 0 and `to_empty` elsewhere, and a broadcast of the parameters that
    forgets the buffers.

    ## How to fix
    Send every tensor of every module to all ranks: parameters, persistent and other buffers, and
    the modules that are not trained.

    ## References
    - hiyouga/LlamaFactory#10820, huggingface/transformers#45902
    """

    code = "REP002"
    name = "uninitialised-replica"
    severity = Severity.ERROR

    why = "Materialising a tensor reserves memory and writes nothing into it."
    fix = "Load or broadcast the tensor on these ranks too, before it is used."
    fix_changes = "The values on these ranks, and with them the results."
    fix_leaves = "Tensors that differ without looking unwritten: REP001 names those."
    disproof = "The values that these ranks hold are those of the checkpoint or the initialiser."

    def check(self, view: ContentView | StartReplicas) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case ContentView():
                yield from self._check_contents(view)
            case StartReplicas():
                yield from self._check_replicas(view)

    def _check_contents(self, view: ContentView) -> Iterator[Finding]:
        """Judge what looks like memory as it was found, on some ranks or on all."""
        suspects = suspects_of(view)
        if not suspects:
            return
        ranks = RankSet(suspects)
        names = tuple(dict.fromkeys(p.name for pairs in suspects.values() for p, _ in pairs))
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: never written on {ranks.phrase()}, as its "
            "values look",
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(ranks=RankSet([rank]), summary=f"{plan.name}: {figures(content)}")
                for rank, pairs in suspects.items()
                for plan, content in pairs[:MOST_SHOWN]
            ),
        )

    def _check_replicas(self, view: StartReplicas) -> Iterator[Finding]:
        """Judge what looks unwritten on some ranks from the start."""
        # What is not zero is judged with all contents.
        zeros = [
            each
            for each in view.tensors
            if not any(is_garbage(each.plan, content) for content in each.by_rank.values())
        ]
        culprits = unwritten_ranks(zeros)
        if view.moment is not Moment.START or not culprits:
            return
        bad = [tensor for tensor in view.tensors if unwritten_ranks([tensor])]
        rest = [tensor for tensor in view.tensors if tensor not in bad]
        names = names_of([*bad, *rest])
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: never written on {culprits.phrase()}, as "
            "its values look",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            grade=grade_of(view, has_culprit=True),
            evidence=evidence_of(view, [*bad, *rest]),
        )
