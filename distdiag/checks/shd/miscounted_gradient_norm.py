"""SHD028: gradients are clipped by a norm that counts some of them wrongly."""

from collections.abc import Callable, Iterator, Sequence
from math import isclose, sqrt
from typing import Final

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import NUM_LOOKS, NormView, StepNorms

_SAME: Final = 1e-4
"""Norms in float32 that a program makes the same differ by less: each is a sum of many squares, and
torch divides by the norm plus 1e-6."""
_APART: Final = 1e-3
"""Beyond ten times that, no rounding makes them differ."""

Norm = Callable[[StepNorms], float]

_OWN: Final[tuple[tuple[str, Norm], ...]] = (
    (
        "each rank takes of its own part alone, so that ranks clip by different factors",
        lambda each: each.counted,
    ),
)
# What is left out may be meant to be clipped by itself, as experts often are; what is counted twice
# is not.
_WRONG: Final[tuple[tuple[str, Norm], ...]] = (
    ("counts what several ranks hold alike once for each of them", lambda each: each.counted),
    ("leaves out what several ranks hold alike", lambda each: each.parts),
    ("leaves out what ranks hold in parts", lambda each: each.shared),
)


_CERTAIN: Final = (_OWN[0][0], _WRONG[0][0])


def is_own(steps: Sequence[StepNorms]) -> bool:
    """Say whether each rank clips what it holds by the norm of that alone."""
    number = min((len(each.own) for each in steps), default=0)
    return number > 0 and all(bounded(steps, _own_of(place)) for place in range(number))


def _own_of(place: int) -> Norm:
    return lambda each: each.own[place]


def bounded(steps: Sequence[StepNorms], norm: Norm) -> tuple[StepNorms, ...]:
    """Return the steps whose gradients were clipped by this norm, if there are enough.

    Clipped ones come to have the same norm, the bound, and all others a smaller one.
    """
    most = max(map(norm, steps), default=0.0)
    found = tuple(each for each in steps if most > 0 and norm(each) >= (1 - _SAME) * most)
    return found if len(found) >= NUM_LOOKS else ()


def is_round(value: float) -> bool:
    """Say whether somebody may have written a number so: with two digits at most."""
    return isclose(value, float(f"{value:.1e}"), rel_tol=_SAME)


def is_round_but_for(bound: float, number: int) -> bool:
    """Say whether a bound is round if it is multiplied or divided by the root of a number."""
    root = sqrt(number)
    return not is_round(bound) and (is_round(bound * root) or is_round(bound / root))


class MiscountedGradientNorm(Check[NormView]):
    """Gradients are clipped by a norm that counts some of them several times, or leaves some out.

    ## What you see
    Training depends on the number of ranks: the norm, and so how much is clipped, is not that of
    the model. The program adds up the squares of all ranks, though several of them hold the same
    gradient of some parameters, or it forgets a part of the parameters.

    ## Example
        square = sum(g.square().sum() for g in local_gradients)
        dist.all_reduce(square, group=tp)           # wrong: norms and biases count on each rank
        # right
        square = sum(g.square().sum() for g in sharded_gradients)
        dist.all_reduce(square, group=tp)
        square += sum(g.square().sum() for g in replicated_gradients)

    ## How to fix
    Call `torch.nn.utils.clip_grad_norm_` on parameters that are DTensors, which knows what is a
    copy. Or add up over ranks only the squares of what they hold in parts.

    Changes: The norm, and how much is clipped.

    Leaves: The bound, which may have been tuned with the wrong norm.

    ## When it is not a defect
    A part of the parameters is intended to be clipped by a norm of its own: a norm that leaves some
    out is only a note.

    If so, add `ignore = ["SHD028"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
    - https://github.com/NVIDIA-NeMo/RL/pull/3788
    """

    code = "SHD028"
    name = "miscounted-gradient-norm"
    severity = Severity.ERROR

    def check(self, view: NormView) -> Iterator[Finding]:
        """Look for a norm that is the same at clipped steps, while the right one is not."""
        right = bounded(view.steps, lambda each: each.whole)
        if right:
            yield from self._all_counted(view, right)
            return
        for what, norm in _OWN if is_own(view.steps) else _WRONG:
            steps = bounded(view.steps, norm)
            whole = [each.whole for each in steps]
            if not steps or max(whole) - min(whole) <= _APART * max(whole):
                continue
            shown = ", ".join(f"{each.whole:.6g} at step {each.step}" for each in steps)
            yield self.finding(
                f"the gradients of {view.model} are clipped by a norm that {what}: taken so, the "
                f"norm is {norm(steps[0]):.6g} after clipping at {len(steps)} steps, but the true "
                f"norm over all ranks varies from {min(whole):.6g} to {max(whole):.6g}",
                ranks=view.ranks,
                step=steps[0].step,
                location=user_location(view.site.frames),
                grade=Grade.LIKELY if what in _CERTAIN else Grade.NOTE,
                confidence=0.9 if what in _CERTAIN else 0.5,
                evidence=(
                    Evidence(ranks=view.ranks, summary=f"the norm over all ranks is {shown}"),
                ),
            )
            return

    def _all_counted(self, view: NormView, steps: Sequence[StepNorms]) -> Iterator[Finding]:
        """Note a bound that is odd by itself, and round but for the number of ranks."""
        bound, number = steps[0].whole, len(view.ranks)
        if not is_round_but_for(bound, number):
            return
        yield self.finding(
            f"the gradients of {view.model} are clipped to the norm {bound:.6g}, which is a round "
            f"number but for the root of {number}, the number of ranks: the norm by which they are "
            f"clipped may be {sqrt(number):.4g} times too large, or too small",
            ranks=view.ranks,
            step=steps[0].step,
            location=user_location(view.site.frames),
            grade=Grade.NOTE,
            confidence=0.5,
            evidence=f"the norm is the same at {len(steps)} steps; a norm that is summed over "
            "ranks which all hold the same gradients, or averaged over ranks that hold parts, is "
            "wrong by this factor",
        )
