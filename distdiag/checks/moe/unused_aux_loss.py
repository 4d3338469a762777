"""MOE010: an auxiliary loss is computed, but no backward pass reaches it."""

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import nodes_around
from distdiag.views.routing import AuxLossRouting, RoutingView

_APPLY: Final = "apply"


def is_thrown_away(frames: Iterable[Frame]) -> bool:
    """Say whether `apply` of a function of the program is called for nothing, innermost first.

    What functions return at once is looked for in the line that called them.
    """
    name = _APPLY
    for frame in frames:
        statements = [node for node in nodes_around(frame) if isinstance(node, ast.stmt)]
        match statements[-1] if statements else None:
            case ast.Expr(value=ast.Call(func=func)):
                return _name_of(func) == name
            case ast.Return(value=ast.Call(func=func)) if _name_of(func) == name:
                name = frame.function
            case _:
                return False
    return False


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


class UnusedAuxLoss(Check[AuxLossRouting]):
    """An auxiliary (load-balancing) loss is computed, but no backward pass reaches it.

    ## What you see
    The auxiliary loss is logged and looks right, but does not train the router: most tokens go to
    few experts. Autograd passes gradients only through values that are used for the loss.

    ## Example
        # wrong: the result is thrown away
        AuxLossScaler.apply(weights, aux_loss)
        # right
        weights = AuxLossScaler.apply(weights, aux_loss)

    ## How to fix
    Add the auxiliary loss to the loss (`loss = loss + coefficient * aux_loss`), computed from
    scores that are not detached. Or, if a function injects it, continue with the tensor that this
    function returns (`x = inject(x, aux_loss)`).

    Changes: The gradient of the routers, and how evenly tokens spread over experts.

    Leaves: Experts that have got no tokens so far.

    ## When it is not a defect
    The number is only logged, or is used from a later step on.

    If so, add `ignore = ["MOE010"]` to `distdiag.toml`. It is a note until the sampled steps span
    400 steps or the later half of the run.

    ## References
    - https://github.com/NVIDIA-NeMo/Automodel/issues/1412
    """

    code = "MOE010"
    name = "unused-aux-loss"
    severity = Severity.WARNING

    def check(self, view: AuxLossRouting) -> Iterator[Finding]:
        """Look for layers whose auxiliary loss is used in no step."""
        by_layer: dict[str, list[AuxLoss]] = {}
        for event in view.aux:
            by_layer.setdefault(event.layer, []).append(event)
        unused = [e for e in by_layer.values() if not any(each.num_used for each in e)]
        thrown = [e for e in unused if all(each.num_injected for each in e)]
        meant = [e for e in unused if e not in thrown and all(each.coefficient for each in e)]
        for layers, what in ((thrown, _THROWN), (meant, _MEANT)):
            if layers:
                is_sure = any(_is_sure(events, view.num_steps) for events in layers)
                yield self._finding(view, layers, what, is_sure=is_sure)
        rest = [e for e in unused if e not in thrown and e not in meant]
        if rest:
            yield self._finding(view, rest, _NUMBER, is_sure=False)

    def _finding(
        self, view: RoutingView, layers: list[list[AuxLoss]], what: str, *, is_sure: bool
    ) -> Finding:
        last, steps = layers[0][-1], {each.step for events in layers for each in events}
        names = [events[0].layer or "the model itself" for events in layers]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        of_all = f" of the {view.num_steps} that the run took" if view.num_steps else ""
        text = what.format(layers=", ".join(names[:3]) + more, coefficient=last.coefficient)
        return self.finding(
            f"{text}, but it got no gradient in the {len(steps)} sampled steps "
            f"from {min(steps)} to {max(steps)}{of_all}, in which the scores of {view.model} "
            "got gradients",
            ranks=RankSet(each.rank for events in layers for each in events),
            step=last.step,
            location=user_location(last.site.frames),
            subjects=tuple(events[0].layer for events in layers),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.3,
            evidence=tuple(_evidence(events[-1]) for events in layers[:3]),
        )


def _is_sure(events: list[AuxLoss], num_steps: int) -> bool:
    """Say whether no other step is likely to use what was computed."""
    steps = {each.step for each in events}
    is_thrown = len(steps) > 1 and all(each.num_injected for each in events)
    is_thrown = is_thrown and all(is_thrown_away(each.site.frames) for each in events)
    is_over = num_steps >= _FEWEST and 2 * max(steps) >= num_steps
    return is_thrown or is_over or max(steps) - min(steps) >= _LONG


_FEWEST: Final = 4
"""A run that is over after fewer steps shows nothing."""

_LONG: Final = 400
"""A use every few steps falls on one of the sampled steps: each hundredth, and that before."""

_THROWN = (
    "a function got the auxiliary loss of {layers} and a tensor, and returned a similar tensor"
)
_MEANT = "the auxiliary loss of {layers}, which has {coefficient}, is computed"
_NUMBER = "a number is computed with a graph from the scores of {layers}"


def _evidence(event: AuxLoss) -> Evidence:
    return Evidence(
        ranks=RankSet([event.rank]),
        summary=f"step {event.step}: of {event.num_passes} forward passes of {event.layer} whose "
        f"scores got gradients, {event.num_computed} computed one number from them, and "
        f"{event.num_used} got a gradient for it",
        location=user_location(event.site.frames),
    )
