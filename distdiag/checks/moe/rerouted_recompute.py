"""MOE001: activation checkpointing repeats a forward pass and sends tokens to other experts."""

from collections.abc import Iterator, Sequence

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import boundary_phrase, choice_phrase, layer_names
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import RepeatedRouting, Rerouting


class ReroutedRecompute(Check[RepeatedRouting]):
    """Activation checkpointing repeats a forward pass and sends tokens to other experts.

    ## What you see
    Gradients are computed for experts that had no part in the loss. If an expert gets another
    number of tokens, torch raises CheckpointError; if the numbers happen to be equal, nothing shows
    it.

    ## Example
        # wrong: the bias changes between the two passes
        hidden = checkpoint(moe_layer, hidden, use_reentrant=False)
        moe_layer.router.update_bias()
        loss_of(hidden).backward()
        # right: after the backward pass
        hidden = checkpoint(moe_layer, hidden, use_reentrant=False)
        loss_of(hidden).backward()
        moe_layer.router.update_bias()

    ## How to fix
    Make all that the router reads the same in both passes: change its biases and counts after the
    backward pass, and draw random numbers from torch's generators, which checkpointing restores
    (not from `random` or NumPy). Or save the choice of experts in the forward pass, by
    `create_selective_checkpoint_contexts` with `MUST_SAVE` for `topk`.

    Changes: The memory for the saved indices.

    Leaves: What is not deterministic elsewhere.

    ## When it is not a defect
    The indices of the experts, printed in both passes, are the same.

    If so, add `ignore = ["MOE001"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    code = "MOE001"
    name = "rerouted-recompute"
    severity = Severity.ERROR

    def check(self, view: RepeatedRouting) -> Iterator[Finding]:
        """Report all choices that were not repeated as one finding."""
        sure = [each for each in view.reroutings if not _is_random(each)]
        wrong = sure or list(view.reroutings)
        if not wrong:
            return
        noise = "" if sure else ", since it draws other random numbers then"
        first = wrong[0].repeated
        ranks = RankSet(each.repeated.rank for each in wrong)
        same = all(each.is_given_the_same for each in wrong)
        layers = layer_names(each.repeated for each in wrong)
        tokens = "the same tokens" if same else "activations that are not quite the same"
        yield self.finding(
            f"{layers} of {view.model} chooses different experts when activation checkpointing "
            f"repeats its forward pass on {ranks.phrase()}, given {tokens}: "
            f"{len(wrong)} of {view.num_repeated} repeated choices{noise}",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=tuple(dict.fromkeys(each.repeated.layer for each in wrong)),
            severity=None if sure else Severity.WARNING,
            grade=Grade.PROVEN if sure else Grade.LIKELY,
            confidence=0.95 if sure else 0.8,
            evidence=_evidence(wrong),
        )


def _is_random(each: Rerouting) -> bool:
    # What only the repeated pass draws, no gate is meant to draw.
    return any(event.is_random for event in each.first)


def _evidence(wrong: Sequence[Rerouting]) -> tuple[Evidence, ...]:
    shown: dict[int, Rerouting] = {}
    for each in wrong:
        shown.setdefault(each.repeated.rank, each)
    return tuple(
        Evidence(
            ranks=RankSet([rank]),
            summary=f"step {each.repeated.step}, {each.repeated.layer}: {_how(each)}; "
            f"{boundary_phrase(each.repeated)}",
            location=user_location(each.repeated.site.frames),
            values={
                "first": each.first[-1].chosen,
                "repeated": each.repeated.chosen,
                "tokens_first": each.first[-1].given,
                "tokens_repeated": each.repeated.given,
            },
        )
        for rank, each in sorted(shown.items())
    )


def _how(each: Rerouting) -> str:
    scores = {event.scores for event in each.first}
    if each.repeated.scores in scores:
        how = "the same scores, but different indices"
    elif each.is_given_the_same:
        how = "the same tokens, but different scores"
    else:
        how = "different tokens and scores"
    return f"{how}, {choice_phrase(each.repeated)}"
