"""PAR013: a loss is multiplied by a number of ranks over which its gradients are not averaged."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import (
    evidence_of,
    is_close,
    known_windows,
    location_of_pass,
    own_factors,
    total_weight,
)
from distdiag.checks.shared.sequences import members_of, num_local_tokens
from distdiag.events.base import Frame
from distdiag.events.losses import LossPass
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.findings.source import module_of
from distdiag.views.losses import CombinedLossView, LossView, LossWindow
from distdiag.views.sequences import SequenceView

# Whether a program multiplies or divides a loss by a number of ranks, as far as its source shows.

_AXES: Final = "dp|tp|sp|cp|pp|ep|data|tensor|sequence|context|model|pipeline|expert|ulysses|ring"
_COUNT: Final = re.compile(
    r"(^|_)(world|worldsize|n_?gpus?|num_(ranks|processes|procs|replicas|gpus|devices)|nproc)(_|$)"
    rf"|(^|_)({_AXES})(_\w+)?_(size|degree)$",
    re.IGNORECASE,
)
_GROUP: Final = re.compile(r"group|mesh|(^|_)pg(_|$)", re.IGNORECASE)
_LOSS: Final = re.compile(r"loss|nll|entropy|objective|total|out|err", re.IGNORECASE)
Sign = Literal["*", "/"]
_OPERATORS: Final = {"*": ast.Mult, "/": ast.Div}
_METHODS: Final = {
    "*": ("mul", "mul_", "multiply", "multiply_"),
    "/": ("div", "div_", "divide", "divide_", "true_divide"),
}


def is_number_of_ranks(frames: Iterable[Frame], factor: float, sign: Sign = "*") -> bool:
    """Say whether a loss is multiplied by a count of ranks there, and none by a literal `factor`.

    Or divided by one, if that is the sign. The files of the frames are read, and what they
    import from beside them.
    """
    found = [
        each for frame in frames if "/torch/" not in frame.file for each in _factors_at(frame, sign)
    ]
    literals = {each.value for each in found if isinstance(each, ast.Constant)}
    return factor not in literals and any(not isinstance(each, ast.Constant) for each in found)


@lru_cache(maxsize=64)
def _factors_at(frame: Frame, sign: Sign) -> tuple[ast.expr, ...]:
    tree = module_of(frame)
    if tree is None:
        return ()
    folder = Path(frame.file).parent
    beside = [folder / f"{name.replace('.', '/')}.py" for name in _imports(tree)]
    trees = [tree, *(module_of(Frame(str(path), 1, "")) for path in beside if path.is_file())]
    return tuple(factor for each in trees if each is not None for factor in _factors_in(each, sign))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level < 2:
            yield node.module


def _factors_in(tree: ast.Module, sign: Sign) -> Iterator[ast.expr]:
    """Yield the literals and counts of ranks by which losses are multiplied, or divided."""
    names = _counting_names(tree)
    for whole, operands in _products(tree, sign):
        for operand in operands:
            rest = [each for each in (*whole, *operands) if each is not operand]
            is_factor = isinstance(operand, ast.Constant) or _counts(operand, names)
            if is_factor and any(_LOSS.search(name) for each in rest for name in _names_in(each)):
                yield operand


def _products(tree: ast.Module, sign: Sign) -> Iterator[tuple[list[ast.expr], list[ast.expr]]]:
    """Yield what is multiplied, or divided, with what it is assigned to if that is known."""
    operator = _OPERATORS[sign]
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=target, op=op, value=value) if isinstance(op, operator):
                yield [], [target, value]
            case ast.Assign(targets=targets, value=ast.BinOp(one, op, other)) if isinstance(
                op, operator
            ):
                yield targets, [one, other]
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, operator):
                yield [], [left, right]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
                if name in _METHODS[sign]:
                    yield [], [value, *args]


def _counting_names(tree: ast.Module) -> frozenset[str]:
    """Return what is assigned a count of ranks."""
    return frozenset(
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _counts(node.value, frozenset())
        for target in node.targets
    )


def _counts(value: ast.expr, names: frozenset[str]) -> bool:
    """Say whether a number is one of ranks, by the names that it is made of."""
    match value:
        case ast.Call(func=ast.Attribute(value=owner, attr="size")):
            return any(_GROUP.search(name) for name in _names_in(owner))
        case ast.Call(func=ast.Name(id="int" | "float" | "min" | "max")):
            return any(_counts(each, names) for each in value.args)
        case ast.Call(func=func):
            return _counts(func, names) or "WORLD_SIZE" in ast.unparse(value)
        case ast.Name() | ast.Attribute():
            last = value.id if isinstance(value, ast.Name) else value.attr
            return bool(_COUNT.search(last)) or ast.unparse(value) in names
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            return _counts(left, names)
        case ast.IfExp(body=body, orelse=other):
            return _counts(body, names) or _counts(other, names)
        case ast.Subscript():
            return "WORLD_SIZE" in ast.unparse(value)
        case _:
            return False


def _names_in(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


# Why the elements of a loss weigh more than 1 together: which ranks its factor counts.


@dataclass(frozen=True, slots=True)
class Excess:
    """The elements of a loss weigh `times` as much as they should.

    `factor` is what the loss is multiplied by, 0 if it is not; `of` says which ranks it counts.
    `sharing` are ranks that share a sequence, of which each has a loss over its own part.
    """

    times: int
    factor: float
    of: str
    divisor: float
    is_sure: bool
    sharing: tuple[int, ...] = ()


def excess_of(window: LossWindow, sequences: Sequence[SequenceView] = ()) -> Excess | None:
    """Return what multiplies the weights of one step, None if nothing is known to do so."""
    total, divisor = total_weight(window), window.divisor
    times = round(total)
    if times < 2 or not is_close(total, times) or not window.num_passes:
        return None
    groups, members = window.groups, tuple(window.by_rank)
    weights = {f.value for _, each in window.passes() for f in own_factors(each) if f.is_float}
    world = max(map(len, groups), default=0)
    for factor in _factors(window):
        mass = total * divisor / factor
        is_sure = factor not in weights
        # The sum over the ranks is divided by a count of all their elements: a factor can only be
        # meant to undo the division by the number of ranks.
        if is_close(mass, 1.0) and factor == world:
            return Excess(
                times, factor, "all ranks", divisor, is_sure=is_sure and not _is_own_mean(window)
            )
        parts = [group for group in groups if len(group) == factor]
        if is_close(mass / divisor, 1.0) and parts and len(members) > divisor:
            shared = _shared(window, parts, factor)
            what = "all ranks" if factor == world else _phrase(shared or parts)
            return Excess(times, factor, what, divisor, is_sure=is_sure and bool(shared))
        own = _sharing(window, times, sequences) if factor == times else ()
        if own:
            return Excess(times, factor, _phrase([own]), divisor, is_sure=is_sure)
    is_summed = len(members) > divisor and is_close(times * divisor, len(members))
    if is_summed and not _factors(window) and _is_own_mean(window):
        sharing = _sharing(window, times, sequences)
        return Excess(times, 0.0, "", divisor, is_sure=bool(sharing), sharing=sharing)
    return None


def _sharing(window: LossWindow, size: int, sequences: Sequence[SequenceView]) -> tuple[int, ...]:
    """Return so many ranks that share a sequence, if all ranks do, each with its part of a mean.

    A rank that has the loss of the whole sequence may keep only a part of its gradient.
    """
    if any(not _is_mean_of_tokens(each) for _, each in window.passes()):
        return ()
    groups: set[tuple[int, ...]] = set()
    for view in sequences:
        for members in members_of(view):
            parts = {rank: num_local_tokens(view, rank, len(members)) for rank in members}
            if len(members) == size and all(_has_part(window, *part) for part in parts.items()):
                groups.add(tuple(sorted(members)))
    is_whole = sorted(rank for group in groups for rank in group) == sorted(window.by_rank)
    return min(groups) if is_whole else ()


def _is_mean_of_tokens(each: LossPass) -> bool:
    return each.kind in ("nll", "masked") and each.num_elements > 1 and _own_mass(each)


def _has_part(window: LossWindow, rank: int, num_tokens: int) -> bool:
    passes = window.of(rank) if rank in window.by_rank else ()
    return bool(passes) and all(
        num_tokens / 2 <= each.num_elements <= num_tokens for each in passes
    )


def _factors(window: LossWindow) -> list[float]:
    """Return the whole numbers by which all passes are multiplied."""
    found: list[set[float]] = [
        {f.value for f in own_factors(each) if f.op == "*" and f.value >= 2 and f.value % 1 == 0}
        for _, each in window.passes()
        if each.num_counted
    ]
    return sorted(set.intersection(*found)) if found else []


def _is_own_mean(window: LossWindow) -> bool:
    """Say whether any pass weighs its elements by their own number, whatever factors it has."""
    return any(_own_mass(each) for _, each in window.passes() if each.num_counted)


def _own_mass(each: LossPass) -> bool:
    mass = each.mass
    for factor in own_factors(each):
        mass = mass * factor.value if factor.op == "/" else mass / factor.value
    return is_close(mass, 1.0)


def _shared(
    window: LossWindow, groups: Iterable[tuple[int, ...]], factor: float
) -> list[tuple[int, ...]]:
    """Return the groups that share one mean each, of which every rank has a part; or none."""
    masses = {rank: sum(each.mass for each in window.of(rank)) / factor for rank in window.by_rank}
    if all(is_close(mass, 1.0) for mass in masses.values()):
        return []
    inside = [group for group in groups if set(group) <= masses.keys()]
    sharing = [g for g in inside if is_close(sum(masses[rank] for rank in g), 1.0)]
    is_whole = {rank for group in sharing for rank in group} == masses.keys()
    return sharing if is_whole else []


def _phrase(groups: Iterable[tuple[int, ...]]) -> str:
    first = min(groups)
    return "ranks in the group " + ", ".join(map(str, first))


# The check.


class LossCountsModelRanks(Check[LossView | CombinedLossView]):
    """A loss is multiplied by a number of ranks over which its gradients are not averaged.

    ## What you see
    The gradient grows with the number of ranks that share the work on one model, so clipping,
    weight decay and the learning rate have a different effect in each layout. The loss is
    multiplied by a number of ranks, but the gradients are not averaged over these ranks.

    ## Example
        # 8 ranks: 4 for data parallelism, 2 for tensor parallelism; DDP averages over 4
        # wrong
        loss = loss_sum / num_tokens_of_all_ranks * dist.get_world_size()
        # right
        loss = loss_sum / num_tokens_of_all_ranks * mesh["dp"].size()

    ## How to fix
    Multiply the loss by the size of the group over which the gradients are averaged:
    `loss * dist.get_world_size(dp_group)`. If each rank has the mean over its own part of a
    sequence, average these gradients over all ranks.

    Changes: The size of the gradient, and so what clipping and the learning rate do.

    Leaves: Learning rates that were tuned with the large gradient: they will be too low.

    ## When it is not a defect
    The factor is a weight of the loss that has nothing to do with ranks.

    If so, add `ignore = ["PAR013"]` to `distdiag.toml`. It is a note where the source does not show
    that the factor counts ranks.

    ## References
    - https://github.com/huggingface/transformers/issues/39648
    - https://github.com/NVIDIA/Megatron-LM/issues/906
    - https://github.com/deepspeedai/DeepSpeed/issues/5248
    """

    code = "PAR013"
    name = "loss-counts-model-ranks"
    severity = Severity.WARNING

    def check(self, view: LossView | CombinedLossView) -> Iterator[Finding]:
        """Look for the same factor in all steps, first without what ranks share of sequences."""
        if isinstance(view, CombinedLossView) and not view.is_measured:
            alone = replace(view, sequences=())
            if any(each.grade is Grade.LIKELY for each in self._found(alone)):
                return
        yield from self._found(view)

    def _found(self, view: LossView) -> Iterator[Finding]:
        windows = [w for w in known_windows(view) if any(p.num_counted for _, p in w.passes())]
        found = {excess_of(window, view.sequences) for window in windows}
        if len(found) != 1 or not view.has_wrapper or view.is_multiplied:
            return
        excess = found.pop()
        if excess is None or any(abs(each * excess.times - 1) < 1e-3 for each in view.scalings):
            return
        is_sure = len(windows) > 1 and excess.is_sure and not _may_be_meant(excess, view)
        is_sure = is_sure and _is_counted(excess, windows[-1])
        window = windows[-1]
        yield self.finding(
            f"the loss of step {window.step} {_what(excess, view)}: the weights of its elements "
            f"add up to {excess.times}, not 1",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=evidence_of(window),
        )


def _may_be_meant(excess: Excess, view: LossView) -> bool:
    """Say whether a program of plain data parallelism adds up a loss with a weight of its own."""
    is_summed = len(view.ranks) > excess.divisor
    is_shared = any(len(each.ranks) == excess.factor for each in view.sequences)
    is_plain = is_summed and len(view.ranks) == excess.factor and not is_shared
    return view.is_measured and is_plain


def _is_counted(excess: Excess, window: LossWindow) -> bool:
    """Say whether the program is seen to multiply by a number of ranks, if there is a factor."""
    frames = [frame for event in window.by_rank.values() for frame in event.site.frames]
    return not excess.factor or is_number_of_ranks(dict.fromkeys(frames), excess.factor)


def _what(excess: Excess, view: LossView) -> str:
    combined = f"gradients of {view.ranks.phrase()} are added up"
    if len(view.ranks) == 1:
        combined = f"gradients are those of {view.ranks.phrase()} alone"
    if excess.divisor > 1:
        combined = f"{combined} and divided by {excess.divisor:g}"
    if excess.sharing:
        sharing = RankSet(excess.sharing).phrase()
        own = "is a mean over each rank's own part of a sequence"
        return f"{own} that {sharing} share, but the {combined}"
    if not excess.factor:
        return f"is a mean over each rank's own elements, and the {combined}"
    return f"is multiplied by {excess.factor:g}, the number of {excess.of}, but the {combined}"
