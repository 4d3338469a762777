"""PAR001: tokens weigh unequally between the ranks or micro-steps of one optimizer step."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import (
    evidence_of,
    is_beyond_chance,
    is_per_token,
    known_windows,
    location_of_pass,
    own_mean_ratio,
)
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.losses import LossView

_MUCH: Final = 1.5
_SOME: Final = 1.1


class UnequalTokenWeights(Check[LossView]):
    """Tokens weigh unequally between ranks or micro-steps, since each divides by its own count.

    ## What you see
    A token on a rank with few targets changes the weights several times as much as a token on a
    rank with many targets, so the result depends on how the data is spread. Each rank or micro-step
    divides by its own count, and a mean of means is not the mean over all tokens.

    ## Example
        # wrong: each rank divides by its own count, then DDP averages
        loss = (token_loss * mask).sum() / mask.sum()
        # right
        count = mask.sum()  # of all micro-steps, if there are several
        dist.all_reduce(count)
        loss = (token_loss * mask).sum() / count * dist.get_world_size()

    ## How to fix
    Divide the sum over tokens by the number of valid tokens of all ranks and micro-steps:
    `dist.all_reduce(num_tokens)`, then `loss_sum / num_tokens`. Multiply by the number of ranks if
    the gradients are averaged over them.

    Changes: The gradient, and with it the loss curve and the best learning rate.

    Leaves: Weights that differ on purpose, for example a mean over each sequence.

    ## When it is not a defect
    The mean over each rank's own tokens is the intended objective.

    If so, add `ignore = ["PAR001"]` to `distdiag.toml`.

    ## References
    - https://github.com/PrimeIntellect-ai/prime-rl/issues/1961
    - https://github.com/huggingface/transformers/issues/34191
    """

    code = "PAR001"
    name = "unequal-token-weights"
    severity = Severity.WARNING

    def check(self, view: LossView) -> Iterator[Finding]:
        """Compare the weights of tokens in the sampled steps."""
        windows = known_windows(view)
        if not windows or not is_per_token(windows):
            return
        ratios = [own_mean_ratio(window) for window in windows]
        much = [r >= _MUCH and is_beyond_chance(w) for r, w in zip(ratios, windows, strict=True)]
        often = sum(much) * 2 > len(ratios)
        if sum(ratio >= _SOME for ratio in ratios) * 2 <= len(ratios):
            return
        is_sure = often and len(ratios) > 1 and view.has_wrapper and windows[-1].divisor > 0
        # The mean over the tokens of a pass with one sequence is the mean over that sequence.
        is_sure = is_sure and any(p.num_rows != 1 for w in windows for _, p in w.passes())
        # Void pixels are left out of each image's mean by custom.
        is_sure = is_sure and not any(p.kind == "pixels" for w in windows for _, p in w.passes())
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        yield self.finding(
            f"in step {windows[worst].step} some tokens weigh {ratios[worst]:.1f} times as much as "
            "others: each rank or micro-step divides by its own count of tokens, and these means "
            "are averaged",
            ranks=view.ranks,
            step=windows[worst].step,
            location=location_of_pass(view),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.8 if is_sure else 0.4,
            evidence=evidence_of(windows[worst]),
        )
