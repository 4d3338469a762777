"""PAR003: a loss is divided by another number of tokens than it sums."""

from collections.abc import Iterator, Sequence

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import (
    evidence_of,
    is_in_own_loop,
    known_windows,
    location_of_pass,
    num_counted,
    own_factors,
)
from distdiag.events.losses import LossPass
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.losses import LossView, LossWindow


class MiscountedTokens(Check[LossView]):
    """A loss is divided by one token more for each sequence than it sums.

    ## What you see
    Loss and gradient are too small, most of all for short sequences. The loss of a causal model
    does not score the first label of a sequence, but the divisor counts this label.

    ## Example
        # wrong: counts the first label of each sequence
        num_tokens = (labels != -100).sum()
        # right
        num_tokens = (labels[:, 1:] != -100).sum()
        loss = cross_entropy(logits[:, :-1], labels[:, 1:], reduction="sum") / num_tokens

    ## How to fix
    Count the labels after the shift, as the loss does: `(labels[:, 1:] != -100).sum()`.

    Changes: The loss and the gradient grow a little, more so for short sequences.

    Leaves: The share of each token in the whole.

    ## When it is not a defect
    The divisor is a constant that has nothing to do with the number of tokens.

    If so, add `ignore = ["PAR003"]` to `distdiag.toml`.

    ## References
    - https://github.com/Liquid4All/liquid-finetune/issues/40
    - https://github.com/huggingface/transformers/issues/34191
    """

    code = "PAR003"
    name = "miscounted-tokens"
    severity = Severity.WARNING

    def check(self, view: LossView) -> Iterator[Finding]:
        """Compare the divisor with the tokens, in integers."""
        windows = known_windows(view)
        excesses = {_excess(window) for window in windows}
        if not windows or None in excesses:
            return
        window = windows[-1]
        excess = _excess(window)
        assert excess is not None
        divisor, counted = excess
        is_sure = len(windows) > 1 and all(_is_ragged(each) for each in windows)
        # What a framework counts is hardly the user's to change, and it matters little.
        is_sure = is_sure and is_in_own_loop(view)
        yield self.finding(
            f"the loss of step {window.step} is divided by {divisor} tokens, but sums {counted}: "
            f"the divisor counts one token too many for each of the {divisor - counted} sequences",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=evidence_of(window),
        )


def _scopes(window: LossWindow) -> Iterator[list[list[LossPass]]]:
    """Yield the ways in which the passes of a step may be counted together."""
    passes = [(rank, each) for rank, each in window.passes()]
    yield [[each for _, each in passes]]
    yield [list(window.of(rank)) for rank in window.by_rank]
    yield [[each] for _, each in passes]


def _excess(window: LossWindow) -> tuple[int, int] | None:
    """Return the divisor and the number of tokens, if they are apart by the sequences."""
    for groups in _scopes(window):
        found = [_divided(passes) for passes in groups if num_counted(passes)]
        if found and None not in found:
            return found[0]
    return None


def _divided(passes: Sequence[LossPass]) -> tuple[int, int] | None:
    counted, num_more = num_counted(passes), _num_left_out(passes)
    if not num_more or any(each.kind == "dense" for each in passes):
        return None
    for each in passes:
        divisors = [f.value for f in own_factors(each) if f.op == "/"]
        if each.num_counted and counted + num_more not in divisors:
            return None
    return counted + num_more, counted


def _num_left_out(passes: Sequence[LossPass]) -> int:
    """Return how many first labels a shift has left out, 0 if that is not known."""
    if all(each.num_first >= 0 for each in passes):
        return sum(each.num_first for each in passes)
    is_known = all(each.num_rows for each in passes)
    return sum(each.num_rows for each in passes) if is_known else 0


def _is_ragged(window: LossWindow) -> bool:
    """Say whether the divisor is none of the sizes that batches have anyway."""
    excess = _excess(window)
    passes = [each for _, each in window.passes()]
    if all(each.num_first >= 0 for each in passes):
        return any(each.num_counted + each.num_first < each.num_elements for each in passes)
    sizes = {(each.num_elements, each.num_elements + each.num_rows) for each in passes}
    is_ragged = all(each.num_counted + 2 * each.num_rows <= each.num_elements for each in passes)
    return excess is not None and is_ragged and not any(excess[0] in pair for pair in sizes)
