"""NUM011: an optimizer keeps its averages in 16 bits."""

from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.lost_update import lost_narrow
from distdiag.events.ranks import RankSet
from distdiag.events.updates import NARROW, TensorUpdate
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.updates import UpdateView

_MOST_NAMED: Final = 8


class NarrowOptimizerState(Check[UpdateView]):
    """An optimizer keeps its running averages in 16 bits, as it does the parameters.

    ## What you see
    The loss stays above that of a run with float32 state, above all late in training: with a beta
    of 0.999 a running average changes by less than the numbers of bfloat16 are apart, and stands
    still.

    ## Example
        model = Model().bfloat16()                       # wrong: exp_avg and exp_avg_sq are
        optimizer = AdamW(model.parameters())            # bfloat16, as the parameters are

        optimizer = AdamW(model.float().parameters())    # right: float32 state, and autocast

    ## How to fix
    Keep the parameters in float32 (no `.to(torch.bfloat16)`): the state of an optimizer has the
    type of its parameter. Compute in bfloat16 by `torch.autocast`, or by
    `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` of FSDP2.

    Changes: Averages follow the gradients; each state needs four bytes.

    Leaves: The arithmetic of forward and backward passes.

    ## When it is not a defect
    The optimizer rounds stochastically, or is made for 16-bit state. It is a warning only if its
    updates were measured to be lost.

    If so, add `ignore = ["NUM011"]` to `distdiag.toml`.

    ## References
    - https://github.com/inclusionAI/AReaL/issues/1292
    """

    code = "NUM011"
    name = "narrow-optimizer-state"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Judge the types of what the optimizer keeps."""
        narrow = {
            rank: [each for each in looks[-1].tensors if _narrow_state(each)]
            for rank, looks in view.by_rank.items()
        }
        ranks = RankSet(rank for rank, tensors in narrow.items() if tensors)
        if not ranks:
            return
        first = narrow[min(ranks)]
        lost = any(lost_narrow(view.by_rank[rank]) for rank in ranks)
        kept = _kept(_narrow_state(first[0]))
        look = view.by_rank[min(ranks)][-1]
        yield self.finding(
            f"{view.title} keeps {kept} for {first[0].name}"
            + (f" and {len(first) - 1} more parameters" if len(first) > 1 else "")
            + (", and its updates are lost" if lost else ""),
            ranks=ranks,
            step=look.step,
            location=user_location(look.site.frames),
            subjects=tuple(each.name for each in first[:_MOST_NAMED]),
            grade=Grade.LIKELY if lost else Grade.NOTE,
            confidence=0.85,
            evidence=f"parameters with state of 16 bits: {len(first)}, of type {first[0].dtype}",
        )


def _kept(state: Sequence[tuple[str, str]]) -> str:
    """Return ``exp_avg and exp_avg_sq in bfloat16``."""
    keys: dict[str, list[str]] = {}
    for key, dtype in state:
        keys.setdefault(dtype, []).append(key)
    return ", ".join(f"{' and '.join(each)} in {dtype}" for dtype, each in keys.items())


def _narrow_state(one: TensorUpdate) -> list[tuple[str, str]]:
    if one.keeps_precision or not one.is_narrow:
        return []
    return [(key, dtype) for key, dtype in one.state if dtype in NARROW]
