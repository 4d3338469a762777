"""SHD009: weights that a model's configuration calls tied are not one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.models import ModelView


class UntiedWeights(Check[ModelView]):
    """Weights that a model's configuration calls tied are not one tensor.

    ## What it detects
    A model whose configuration says `tie_word_embeddings`, with one embedding and one output layer
    of the same shape that do not share their weight.

    ## Why it matters
    The two drift apart. A checkpoint leaves the head out because it is tied, and loading fills it
    from the embedding: the model that resumes is another one.

    ## Example
    `to_empty` after a build on the meta device gives each name memory of its own, and nobody ties
    them again.

    ## How to fix
    Tie the weights after materialising or loading and before sharding.

    ## References
    - NVIDIA-NeMo/Automodel#2511
    """

    code = "SHD009"
    name = "untied-weights"
    severity = Severity.ERROR

    why = "A tie is two names for one object; what copies or replaces tensors one by one cuts it."
    fix = "Call `tie_weights()` after the model was materialised, before it is wrapped."
    fix_changes = "The head becomes the embedding: fewer parameters, another output."
    fix_leaves = "Checkpoints that were saved without the head while it was a tensor of its own."
    disproof = "Both names give the same tensor (`a.weight is b.weight`)."

    def check(self, view: ModelView) -> Iterator[Finding]:
        """Name the two tensors and the ranks where they are two."""
        pairs: dict[tuple[str, str], list[int]] = {}
        for rank, plans in view.by_rank.items():
            for plan in plans:
                if plan.untied_from and plan.keeper != "FSDP1":
                    pairs.setdefault((plan.name, plan.untied_from), []).append(rank)
        for (head, embedding), found in pairs.items():
            ranks = RankSet(found)
            location = location_on(view, ranks)
            yield self.finding(
                f"{head} and {embedding} of {view.model} are two tensors on {ranks.phrase()}, "
                "though its configuration says that they are tied",
                ranks=ranks,
                step=view.step,
                location=location,
                subjects=(head, embedding),
                evidence=(
                    Evidence(
                        ranks=ranks,
                        summary="`tie_word_embeddings` is true and the weights are not one object",
                        location=location,
                    ),
                ),
            )
