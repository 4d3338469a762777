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
        "Give each rank at least two samples, or gather the samples of all ranks before. Or, if "
        "one sample is right, pass `correction=0` (`unbiased=False`).",
    ),
    "scheduler-before-optimizer": _Cause(
        "the scheduler steps before the optimizer, so that the first value of the schedule is "
        "never used",
        "Call `optimizer.step()` first, then `lr_scheduler.step()`.",
    ),
    "checkpoint-without-gradient": _Cause(
        "the inputs of a checkpointed part need no gradient, so its parameters get no gradient in "
        "training",
        "Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`, or call "
        "`model.enable_input_require_grads()`.",
        is_sure=False,  # an evaluation shows it, too, and needs no gradient
    ),
    "broadcast-target": _Cause(
        "the target of a loss and its input have different shapes, so that each row is compared "
        "with all rows",
        "Give both the same shape: `loss_function(input, target.view_as(input))`.",
    ),
    "gradient-of-no-leaf": _Cause(
        "the program reads `.grad` of a tensor that never has a gradient",
        "Call `tensor.retain_grad()` before the backward pass, or read `.grad` of the parameter.",
        is_sure=False,
    ),
    "mean-of-nothing": _Cause(
        "the mean of an empty tensor is taken, which is NaN",
        "Skip the metric if there is nothing to average: `if values.numel():`.",
        is_sure=False,
    ),
    "operator-without-gradient": _Cause(
        "a backward pass goes through an operator without a gradient of its own (collectives in "
        "place have none), so the gradient from other ranks is missing here",
        "Call the function of the same name in `torch.distributed.nn.functional`, or write a "
        "`torch.autograd.Function` with the backward pass that you need.",
        is_sure=False,  # a sum over tensor-parallel ranks passes the gradient on unchanged
    ),
    "dropped-imaginary-part": _Cause(
        "the imaginary part of a complex tensor is dropped",
        "Call `torch.view_as_real(x)`, or `x.real` if you need the real part only.",
        is_sure=False,
    ),
}
_SIZES: Final = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")


class TellingWarning(Check[WarningView]):
    """A warning was shown whose cause is known.

    ## What you see
    The cause of a later fault (for example NaN) is named by a warning that is one line among
    thousands in the log of one rank.

    ## Example
        advantages = rewards / rewards.std()      # wrong: one reward on this rank
        rewards = gather(rewards)                 # right: those of all ranks
        advantages = rewards / rewards.std()

    ## How to fix
    Do what the finding says; it differs from warning to warning.

    Changes: The warning is gone, with its cause.

    Leaves: Everything that does not depend on the cause of the warning.

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
