"""SHD009: weights that should be tied are not one tensor."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import ContentView


class UntiedWeights(Check[ContentView]):
    """Weights that should be tied, by the configuration or since they were, are not one tensor.

    ## What you see
    The embedding and the head train separately. The checkpoint leaves the head out, because it
    counts as tied, and loading fills it from the embedding: the resumed model is a different one,
    and its loss jumps.

    ## Example
        model = build_on_meta_device(config)  # with model.head.weight = model.embed.weight
        # wrong: each name gets memory of its own
        model.to_empty(device="cuda")
        # right
        model.to_empty(device="cuda")
        model.head.weight = model.embed.weight  # or model.tie_weights()

    ## How to fix
    Tie the weights again after the model is materialised or loaded and before it is sharded:
    `model.tie_weights()`, or `model.head.weight = model.embed.weight`.

    Changes: The head becomes the embedding: fewer parameters, a different output.

    Leaves: Checkpoints that were saved without the head while the head was a separate tensor.

    ## When it is not a defect
    Both names give the same tensor: `model.embed.weight is model.head.weight`.

    If so, add `ignore = ["SHD009"]` to `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA-NeMo/Automodel/issues/2511
    """

    code = "SHD009"
    name = "untied-weights"
    severity = Severity.ERROR

    def check(self, view: ContentView) -> Iterator[Finding]:
        """Name the two tensors and the ranks where they are two."""
        pairs: dict[tuple[str, str, str], list[int]] = {}
        for rank, held in view.by_rank.items():
            for plan, _ in held:
                if plan.untied_from and plan.wrapper != "FSDP1":
                    pair = (plan.name, plan.untied_from, plan.untied_by)
                    pairs.setdefault(pair, []).append(rank)
        for (head, embedding, call), found in pairs.items():
            ranks = RankSet(found)
            declared = "its configuration says that they are tied"
            reason = f"they were one until `{call}` was called" if call else declared
            yield self.finding(
                f"{head} and {embedding} of {view.model} are two tensors on {ranks.phrase()}, "
                f"though {reason}",
                ranks=ranks,
                step=view.step,
                location=location_on(view, ranks),
                subjects=(head, embedding),
                evidence=f"`{call}` gave each name a parameter of its own"
                if call
                else "`tie_word_embeddings` is true and the weights are not one object",
            )
