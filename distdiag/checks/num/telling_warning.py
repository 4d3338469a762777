"""NUM040: a warning was shown whose cause is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from distdiag.checks.base import Check
from distdiag.events.logged import Warned
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import WarningView


class _Cause(NamedTuple):
    """What a warning means, and what to do. `is_sure`: a correct program does not show it."""

    what: str
    fix: str
    is_sure: bool = True


_CAUSES: Final = {
    "one-sample-variance": _Cause(
        "the variance or standard deviation of one sample is taken, which is NaN",
        "Give each rank at least two samples for it, gather over ranks before, or pass "
        "`correction=0` (`unbiased=False`) where one sample is right.",
    ),
    "scheduler-before-optimizer": _Cause(
        "the learning rate is advanced before the optimizer has stepped, so that the first value "
        "of the schedule is never used",
        "Call `optimizer.step()` first, then `lr_scheduler.step()`.",
    ),
    "checkpoint-without-gradient": _Cause(
        "a part is checkpointed whose inputs need no gradient: in training its parameters get none",
        "Pass `use_reentrant=False`, or call `enable_input_require_grads()` of the model.",
        is_sure=False,  # an evaluation shows it, too, and needs no gradient
    ),
    "broadcast-target": _Cause(
        "the target of a loss has another shape than the input, so that each row is compared with "
        "each other one",
        "Give both the same shape: `target.view_as(input)`.",
    ),
    "gradient-of-no-leaf": _Cause(
        "`.grad` of a tensor is read that never has one",
        "Call `retain_grad()` on it before the backward pass, or read that of the parameter.",
        is_sure=False,
    ),
    "mean-of-nothing": _Cause(
        "a mean over no element is taken, which is NaN",
        "Leave the metric out where there is nothing to average.",
        is_sure=False,
    ),
    "operator-without-gradient": _Cause(
        "a backward pass goes through an operator that has no gradient of its own, as collectives "
        "in place have none: what other ranks made of the value gives no gradient here",
        "Call the function of `torch.distributed.nn.functional`, or write an autograd function "
        "whose backward pass does what is meant.",
        is_sure=False,  # a sum over tensor-parallel ranks passes the gradient on unchanged
    ),
    "dropped-imaginary-part": _Cause(
        "the imaginary part of a complex tensor is dropped",
        "Use `torch.view_as_real`, or `.real` where that is meant.",
        is_sure=False,
    ),
}
_SIZES: Final = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")


class TellingWarning(Check[WarningView]):
    """A warning was shown whose cause is known.

    ## What you see
    A line among thousands in the log of one rank: `var(): degrees of freedom is <= 0`. What follows
    from it, such as NaN, is seen much later and elsewhere.

    ## Example
        advantages = rewards / rewards.std()      # wrong: one reward on this rank
        rewards = gather(rewards)                 # right: those of all ranks
        advantages = rewards / rewards.std()

    ## How to fix
    Do what the finding says; it differs from warning to warning.

    Changes: The warning is gone, with its cause.

    Leaves: All that does not depend on it.

    ## When it is not a defect
    The program uses none of what the warning is about. Silence it by `warnings.filterwarnings`, or
    say so with `ignore = ["NUM040"]` in the configuration.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.var.html
    - https://docs.pytorch.org/docs/stable/optim.html
    - https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    code = "NUM040"
    name = "telling-warning"
    severity = Severity.WARNING

    def check(self, view: WarningView) -> Iterator[Finding]:
        """Say what the warning means, and on which ranks it was shown."""
        cause = _CAUSES.get(view.topic)
        if cause is None:
            return
        first = view.by_rank[min(view.by_rank)]
        is_sure = cause.is_sure and all(_matters(each) for each in view.by_rank.values())
        yield self.finding(
            cause.what,
            ranks=RankSet(view.by_rank),
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.topic,),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.9 if is_sure else 0.5,
            fix=cause.fix,
            evidence=(
                Evidence(
                    ranks=RankSet(view.by_rank),
                    summary=f"{first.category}: {' '.join(first.text.split())[:200]}",
                    location=user_location(first.site.frames),
                ),
            ),
        )


def _matters(warned: Warned) -> bool:
    if warned.topic == "scheduler-before-optimizer":
        return warned.step == 0  # later, a gradient scaler has skipped the first steps
    if warned.topic == "broadcast-target":
        sizes = [_size(text) for text in _SIZES.findall(warned.text)]
        return len(sizes) == 2 and _broadcast(*sizes) > prod(sizes[1])
    return True


def _size(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace(",", " ").split())


def _broadcast(target: tuple[int, ...], given: tuple[int, ...]) -> int:
    """Return the number of elements that two shapes have together."""
    dims = max(len(target), len(given))
    wide = [(1,) * (dims - len(shape)) + shape for shape in (target, given)]
    return prod(max(pair) for pair in zip(*wide, strict=True))
