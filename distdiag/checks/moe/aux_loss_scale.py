"""MOE009: a balancing loss is multiplied with the rest of a loss that was divided beforehand."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import (
    is_close,
    known_windows,
    location_of_pass,
    total_weight,
)
from distdiag.events.base import Frame
from distdiag.events.losses import AuxTerm, Factor, LossPass
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import module_of
from distdiag.record.coefficient_names import is_coefficient
from distdiag.views.losses import AuxLossView, CombinedAuxLossView, LossView, LossWindow

# Which numbers the source of a loss names as coefficients of a balancing loss.

_ARGUMENT = "add_argument"


def coefficients_in(frames: Iterable[Frame]) -> frozenset[float]:
    """Return the literals that the files of these frames give such a name, or multiply by one."""
    files = dict.fromkeys(frame.file for frame in frames if "/torch/" not in frame.file)
    return frozenset(value for file in files for value in _of_file(file))


@lru_cache(maxsize=64)
def _of_file(file: str) -> frozenset[float]:
    tree = module_of(Frame(file, 1, ""))
    named = (*_named(tree), *_multiplied(tree)) if tree is not None else ()
    found = (_number(value) for name, value in named if is_coefficient(name))
    return frozenset(number for number in found if number)


def _number(value: ast.expr | None) -> float:
    """Return a literal, or one that is divided by something."""
    match value:
        case ast.Constant(value=float(number)):
            return number
        case ast.BinOp(left=left, op=ast.Div()):
            return _number(left)
        case _:
            return 0.0


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AnnAssign(target=target, value=value):
                yield ast.unparse(target), value
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_], keywords=keywords):
                if ast.unparse(func).endswith(_ARGUMENT):
                    yield from ((name, each.value) for each in keywords if each.arg == "default")
            case ast.keyword(arg=str(name), value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                yield from ((ast.unparse(k), v) for k, v in zip(keys, values, strict=True) if k)
            case ast.arguments():
                yield from _defaults(node)


def _multiplied(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                yield ast.unparse(left), right
                yield ast.unparse(right), left


def _defaults(given: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    places = (*given.posonlyargs, *given.args)
    optional = places[len(places) - len(given.defaults) :]
    yield from ((a.arg, v) for a, v in zip(optional, given.defaults, strict=True))
    yield from ((a.arg, v) for a, v in zip(given.kwonlyargs, given.kw_defaults, strict=True))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values):
            yield from ((ast.unparse(n), v) for n, v in zip(names, values, strict=False))
        case _:
            yield ast.unparse(target), value


# How much a balancing loss weighs in a step, beside the rest of the loss.


@dataclass(frozen=True, slots=True)
class AuxScale:
    """A balancing loss weighs `times` as much as its coefficient says.

    `num_ranks` and `num_passes` are by what it is too heavy, 1 if it is not these.
    """

    layer: str
    num_ranks: int
    num_passes: int
    is_sure: bool

    @property
    def times(self) -> int:
        """How much too heavy it is."""
        return self.num_ranks * self.num_passes


def aux_scale_of(window: LossWindow) -> AuxScale | None:
    """Return the first balancing loss of a step that is too heavy for a known reason."""
    passes = [each for _, each in window.passes() if each.num_counted]
    numbers = {len(each.aux) for each in passes}
    if len(numbers) != 1 or not window.num_passes or not total_weight(window):
        return None
    for place in range(numbers.pop()):
        found = _scale(window, [(each, each.aux[place]) for each in passes])
        if found is not None:
            return found
    return None


def _scale(window: LossWindow, terms: list[tuple[LossPass, AuxTerm]]) -> AuxScale | None:
    num_passes, divisor = window.num_passes, window.divisor
    num_ranks = len(window.by_rank)
    counts = {num_passes, num_ranks, num_passes * num_ranks} - {1}
    whole = sum(_weight(aux, counts) for _, aux in terms) / divisor
    ratio = whole / total_weight(window)
    is_by_ranks = divisor > 1 and all(_has_outer(aux, divisor) for _, aux in terms)
    by_ranks = num_ranks if is_by_ranks and divisor == num_ranks else 1
    by_passes = num_passes if _is_main_divided(window) else 1
    ways = [(by_ranks, by_passes), (by_ranks, 1), (1, by_passes)]
    fitting = [way for way in ways if math.prod(way) > 1 and is_close(ratio, math.prod(way))]
    if not fitting:
        return None
    if any(_is_divided(_coefficient(aux), aux.held, counts) for _, aux in terms):
        return None
    literals = coefficients_in(f for event in window.by_rank.values() for f in event.site.frames)
    is_sure = all(aux.is_own_mean and _is_whole(aux, literals, counts) for _, aux in terms)
    return AuxScale(terms[0][1].layer, *fitting[0], is_sure)


def _product(factors: Iterable[Factor]) -> float:
    return math.prod(f.value if f.op == "*" else 1 / f.value for f in factors if f.value)


def _weight(aux: AuxTerm, counts: Iterable[int]) -> float:
    """Return by what a balancing loss is multiplied, its coefficient and constants left out.

    A mean over several balancing losses, such as those of layers, is such a constant.
    """
    inner = aux.factors[aux.num_outer :]
    divisions = [f for f in inner if f.op == "/" and any(is_close(f.value, n) for n in counts)]
    return _product(aux.factors[: aux.num_outer]) * _product(divisions)


def _coefficient(aux: AuxTerm) -> float:
    return _product(f for f in aux.factors[aux.num_outer :] if f.value % 1)


def _is_divided(value: float, held: tuple[int, ...], counts: Iterable[int]) -> bool:
    """Say whether a coefficient may have been divided by ranks or micro-steps beforehand."""
    if 1 in held:
        return False
    return any(n in held or is_close(value * n, 1.0) for n in counts)


def _is_whole(aux: AuxTerm, literals: Iterable[float], counts: Iterable[int]) -> bool:
    """Say whether a coefficient is one that the program names, and no part of one."""
    value = _coefficient(aux)
    named = {n for n in (1, *counts) if any(is_close(value * n, each) for each in literals)}
    named.update(aux.named)
    return value == 1 or (1 in named and named.isdisjoint(counts))


def _has_outer(aux: AuxTerm, number: float) -> bool:
    return any(f.op == "*" and f.value == number for f in aux.factors[: aux.num_outer])


def _is_main_divided(window: LossWindow) -> bool:
    """Say whether the rest of the loss is divided for all passes before they are added up."""
    if window.num_passes < 2:
        return False
    by_rank: dict[int, list[float]] = {}
    for rank, each in window.passes():
        if each.num_counted:
            outer = each.factors[: each.aux[0].num_outer]
            by_rank.setdefault(rank, []).append(each.mass / _product(outer))
    masses = [mass for each in by_rank.values() for mass in each]
    if all(is_close(mass, 1.0) for mass in masses):
        return False
    sums = [sum(each) for each in by_rank.values()]
    whole = sum(sums)
    is_of_ranks = all(is_close(each, 1.0) for each in sums)
    return is_of_ranks or is_close(whole, 1.0) or is_close(whole, window.divisor)


# ---


class AuxLossScale(Check[AuxLossView | CombinedAuxLossView]):
    """An auxiliary (load-balancing) loss grows with the number of ranks or micro-steps.

    ## What you see
    The auxiliary loss outweighs the rest of the loss in large jobs, and results depend on the
    number of ranks and micro-steps. It is a mean over the tokens of one rank and micro-step, but is
    multiplied or added up as if it were divided by a count over all of them, as the rest is.

    ## Example
        # wrong: both terms are multiplied to undo the average over ranks
        loss = (token_loss.sum() / num_tokens_of_all_ranks + 0.01 * aux_loss) * world_size
        # right
        loss = token_loss.sum() / num_tokens_of_all_ranks * world_size
        loss = loss + 0.01 * aux_loss / num_micro_steps

    ## How to fix
    Multiply only what was divided by a count over all ranks, and divide the auxiliary loss by the
    number of micro-steps.

    Changes: The gradient of the routers, and how evenly tokens spread over experts.

    Leaves: A coefficient that was tuned with the heavy auxiliary loss: it is too low then.

    ## When it is not a defect
    The coefficient in the loss was divided by that number beforehand.

    Where the loss has a coefficient it is a note, unless the configuration declares the whole one:

        [aux_loss]
        coefficient = 0.01

    If so, add `ignore = ["MOE009"]` to `distdiag.toml`.

    ## References
    - https://github.com/huggingface/transformers/issues/48706
    - https://github.com/NVIDIA-NeMo/Automodel/issues/3359
    """

    code = "MOE009"
    name = "aux-loss-scale"
    severity = Severity.WARNING

    def check(self, view: AuxLossView | CombinedAuxLossView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case AuxLossView():
                yield from self._check_losses(view)
            case CombinedAuxLossView():
                yield from self._check_combined_losses(view)

    def _check_losses(self, view: LossView) -> Iterator[Finding]:
        """Look for the same factor in all steps."""
        windows = [w for w in known_windows(view) if any(p.aux for _, p in w.passes())]
        windows = list(dropwhile(_is_begun_late, windows))
        found = {aux_scale_of(part) for window in windows for part in _parts(window, view)}
        if len(found) != 1 or (scale := found.pop()) is None:
            return
        window = windows[-1]
        is_sure = scale.is_sure and len(windows) > 1
        yield self.finding(
            f"the balancing loss of {scale.layer or 'the model'} behind step {window.step} weighs "
            f"{scale.times} times as much as its coefficient says: {_reason(scale)}",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            subjects=(scale.layer,) if scale.layer else (),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=_evidence(window),
        )

    def _check_combined_losses(self, view: CombinedAuxLossView) -> Iterator[Finding]:
        """Look the same way where gradients are combined by hand."""
        if view.is_measured:
            yield from self._check_losses(view)


def _is_begun_late(window: LossWindow) -> bool:
    """Say whether routers were not known yet in the first of the passes of a step."""
    return not all(each.aux for _, each in window.passes() if each.num_counted)


def _parts(window: LossWindow, view: LossView) -> list[LossWindow]:
    """Return what can be judged: each rank alone if nothing tells how gradients are combined."""
    return [window] if view.is_told else [window.alone(rank) for rank in window.by_rank]


def _reason(scale: AuxScale) -> str:
    reasons = []
    if scale.num_ranks > 1:
        reasons.append(
            f"it is multiplied by {scale.num_ranks} to undo the average over ranks, as the rest of "
            "the loss must be, but is a mean over each rank's own tokens"
        )
    if scale.num_passes > 1:
        reasons.append(
            f"it is added in each of {scale.num_passes} micro-steps and not divided by them, as "
            "the rest of the loss is"
        )
    return "; ".join(reasons)


def _evidence(window: LossWindow) -> tuple[Evidence, ...]:
    rank, each = next((rank, each) for rank, each in window.passes() if each.aux)
    aux = each.aux[0]
    return (
        Evidence(
            ranks=RankSet([rank]),
            summary=f"from the root on, the loss over tokens: {_phrase(each.factors)}; "
            f"the balancing loss: {_phrase(aux.factors)}",
            values={"num_passes": window.num_passes, "num_shared_factors": aux.num_outer},
        ),
    )


def _phrase(factors: tuple[Factor, ...]) -> str:
    shown = " ".join(f"{f.op} {f.value:.6g}" for f in factors if f.op in "*/")
    return shown or "no factors"
