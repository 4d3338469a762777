"""NUM010: steps leave parameters as they are, because the updates are smaller than the rounding."""

from collections.abc import Iterator, Mapping
from math import isnan, sqrt
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import TensorUpdate
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import Looks, UpdateView, lost_in, settled

_LEAST_EXPECTED: Final = 10.0
"""With stochastic rounding so many elements would have changed: none do with a chance of e^-10."""
_MOST_CHANGED: Final = 0.1
"""Of those, so many may change for other reasons, such as weight decay that is not estimated."""
_LEAST_PART: Final = 0.01
"""A lost tensor counts if it has a hundredth of the gradient: keys of an attention layer have a
bias whose gradient is rounding noise alone, and no step should change it."""
_MOST_NAMED: Final = 8


class LostUpdate(Check[UpdateView]):
    """Steps leave a parameter as it is, because each update is smaller than its rounding.

    ## What you see
    After training a parameter is still what it was at the start: the weights of a norm are exactly
    1.0. It has a gradient and a learning rate, but each update is rounded away.

    ## Example
        model = Model().bfloat16()                      # wrong: around 1.0 bfloat16 has steps of
        optimizer = AdamW(model.parameters(), lr=1e-4)  # 0.0078, and the update is 0.0001

        model = Model()                                 # right: weights in float32, ...
        optimizer = AdamW(model.parameters(), lr=1e-4)
        with torch.autocast("cuda", torch.bfloat16):    # ... arithmetic in bfloat16
            loss = model(batch)

    ## How to fix
    Keep the parameters in float32 (no `.to(torch.bfloat16)`), and compute in bfloat16 by
    `torch.autocast`, or by `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` of FSDP2. To stay at
    16 bits takes an optimizer with stochastic rounding or compensated sums.

    Changes: Weights begin to move, and need four bytes each.

    Leaves: The arithmetic of forward and backward passes.

    ## When it is not a defect
    The parameter is intended to stay as it is. Then freeze it with `requires_grad_(False)`.

    If so, add `ignore = ["NUM010"]` to `distdiag.toml`.

    ## References
    - https://github.com/vllm-project/speculators/issues/765
    - https://github.com/inclusionAI/AReaL/issues/1292
    """

    code = "NUM010"
    name = "lost-update"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Judge the last steps at which the learning rate was not low on purpose."""
        found = {rank: each for rank, looks in view.by_rank.items() if (each := _judged(looks))}
        if not found:
            return
        rank = min(found, key=lambda each: (found[each][1] is Grade.NOTE, each))
        lost, grade = found[rank]
        looks = settled(view.by_rank[rank])
        one = max(lost.values(), key=lambda each: each.gradient_norm)
        others = f" and {len(lost) - 1} more parameters" if len(lost) > 1 else ""
        steps = ", ".join(str(look.step) for look in looks)
        ranks = RankSet(each for each in found if found[each][1] is grade)
        yield self.finding(
            f"{view.title} does not change {one.name}{others}: {_reason(one)}",
            ranks=ranks,
            step=looks[0].step,
            location=user_location(looks[-1].site.frames),
            subjects=tuple(list(lost)[:_MOST_NAMED]),
            grade=grade,
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=ranks,
                    summary=f"{each.name} ({each.dtype}): {each.num_unchanged} of "
                    f"{each.num_sampled} sampled elements with a gradient did not change at steps "
                    f"{steps}",
                    values={
                        "dtype": each.dtype,
                        "gradient norm": each.gradient_norm,
                        "learning rate": each.learning_rate,
                        "update": None if isnan(each.update) else each.update,
                        "weight": each.weight,
                        "spacing": each.spacing,
                    },
                )
                for each in sorted(lost.values(), key=lambda each: -each.gradient_norm)[
                    :_MOST_NAMED
                ]
            ),
        )


def _reason(one: TensorUpdate) -> str:
    spacing = f"near {one.weight:.3g} the numbers of {one.dtype} are {one.spacing:.2g} apart"
    if isnan(one.update):
        return f"{spacing}, and the learning rate is {one.learning_rate:.2g}"
    return f"{spacing}, and the mean update is {one.update:.2g}"


def lost_narrow(looks: Looks) -> Mapping[str, TensorUpdate]:
    """Return the 16-bit parameters whose updates were surely lost at the last settled steps."""
    judged = _judged(looks)
    return judged[0] if judged is not None and judged[1] is not Grade.NOTE else {}


def _judged(looks: Looks) -> tuple[dict[str, TensorUpdate], Grade] | None:
    """Return what was lost, and how sure it is that it matters; None if nothing was."""
    last = settled(looks)
    lost = lost_in(last)
    if not lost:
        return None
    narrow = {name: each for name, each in lost.items() if each.is_narrow}
    if not narrow:
        is_all = len(lost) == len(last[-1].tensors)
        return (lost, Grade.NOTE) if is_all else None
    is_sure = _rounds_to_nearest(last) and _matters(narrow, looks)
    return narrow, Grade.LIKELY if is_sure else Grade.NOTE


def _rounds_to_nearest(looks: Looks) -> bool:
    """Say whether updates vanish, rather than change an element now and then."""
    if looks[-1].rounds_to_nearest:
        return True
    narrow = [each for look in looks for each in look.tensors if each.is_narrow]
    expected = sum(each.expected_changes for each in narrow)
    changed = sum(each.num_small_changed for each in narrow)
    return expected >= _LEAST_EXPECTED and changed <= _MOST_CHANGED * expected


def _matters(lost: Mapping[str, TensorUpdate], looks: Looks) -> bool:
    """Say whether what was lost is a part of the training that is not over yet."""
    now, first = looks[-1], looks[0]
    part = sqrt(sum(each.gradient_norm**2 for each in lost.values()))
    whole = sqrt(sum(each.gradient_norm**2 for each in now.tensors))
    at_first = sqrt(sum(each.gradient_norm**2 for each in first.tensors))
    return part >= _LEAST_PART * whole and whole >= _LEAST_PART * at_first
