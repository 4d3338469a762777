"""Loss functions: what they are given, and by what the loss is divided."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import SHOWN, Clue, Issue
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.program import (
    Code,
    Program,
    dotted,
    keyword,
    last_value,
    origin,
    positional,
    receiver,
    stripped,
    tail,
)
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes

DOUBLE_SOFTMAX: Final = Issue(
    id="softmax-before-cross-entropy",
    title="cross entropy gets probabilities and takes their softmax again: gradients nearly vanish",
    severity=Severity.ERROR,
    fix="Give the loss the raw scores (logits); apply softmax for predictions only.",
    quick="remove softmax before cross_entropy",
    wants=(("loss_curves", "whether the loss stays near its first value"),),
    explains=("stuck", "plateau"),
)
DOUBLE_SIGMOID: Final = Issue(
    id="sigmoid-before-bce-with-logits",
    title="BCE with logits gets probabilities and takes their sigmoid again",
    severity=Severity.ERROR,
    fix="Give the loss the raw scores (logits), or use BCELoss.",
    quick="remove sigmoid before binary_cross_entropy_with_logits",
    explains=("stuck", "plateau"),
)
NLL_OF_PROBABILITIES: Final = Issue(
    id="nll-of-probabilities",
    title="NLLLoss gets probabilities; it needs their logarithms",
    severity=Severity.ERROR,
    fix="Use log_softmax, or cross_entropy on the raw scores.",
    quick="replace softmax by log_softmax",
    explains=("stuck", "plateau"),
)
SWAPPED: Final = Issue(
    id="swapped-loss-arguments",
    title="the loss gets the targets as predictions and the predictions as targets",
    severity=Severity.ERROR,
    fix="Give the predictions first, the targets second.",
    quick="swap the arguments of the loss",
)
DIVIDED_TWICE: Final = Issue(
    id="loss-divided-twice",
    title="the loss is divided twice by the accumulation steps: the library does it, too",
    severity=Severity.ERROR,
    fix="Leave the division to the library's backward().",
    quick="remove the division before backward()",
    wants=(("loss_curves", "whether gradients are smaller than those without accumulation"),),
    explains=("plateau",),
)
MEAN_DIVIDED: Final = Issue(
    id="mean-divided-by-batch",
    title="a loss that is a mean over the batch is divided by the batch size once more",
    severity=Severity.WARNING,
    fix='Leave the division out, or ask for reduction="sum".',
    quick="remove the division by the batch size",
    explains=("plateau",),
)

_CLASSES: Final = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "BCELoss": "binary_cross_entropy",
    "KLDivLoss": "kl_div",
}
MEAN: Final = frozenset(_CLASSES.values()) - {"kl_div"}
_SOFTMAX: Final = frozenset({"softmax", "Softmax", "Softmax2d"})
_SIGMOID: Final = frozenset({"sigmoid", "Sigmoid"})
_TARGETS: Final = re.compile(r"(?:^|_)(?:labels?|targets?|tgt|gt|y_true)$")
_OUTPUTS: Final = re.compile(r"(?:^|_)(?:logits|outputs?|preds?|predictions?|y_pred|y_hat|scores)$")
_BATCH: Final = re.compile(
    r"^(?:self\.|args\.|config\.|cfg\.)?(?:batch_size|bs|bsz)$|^len\(\w+\)$"
    r"|^\w+\.(?:size\(0\)|shape\[0\])$"
)
_ACCUMULATION: Final = re.compile(r"accum|(?:^|\W)gas(?:$|\W)", re.IGNORECASE)


def loss_kind(program: Program, code: Code, call: ast.Call) -> str:
    """Return which function of torch a call computes, such as ``cross_entropy``, "" for others."""
    full = code.module.full_name(call.func)
    name = full.rpartition(".")[2]
    if name in MEAN and full.startswith(("torch.nn.functional", "F.")):
        return name
    if isinstance(call.func, ast.Call):
        return _CLASSES.get(tail(call.func), "")
    made = made_of(program, dotted(call.func).rpartition(".")[2])
    return _CLASSES.get(tail(made), "") if made is not None else ""


def made_of(program: Program, name: str) -> ast.Call | None:
    """Return the call that makes what a name, or attribute, stands for in the whole program.

    None where several calls of different things do.
    """
    found: list[ast.Call] = []
    for code in program.codes:
        for node in code.nodes:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            if name and dotted(node.targets[0]).rpartition(".")[2] == name:
                value = stripped(node.value)
                if isinstance(value, ast.Call):
                    found.append(value)
                elif not isinstance(value, ast.Name):
                    return None
    kinds = {tail(call) for call in found}
    return found[0] if len(kinds) == 1 else None


def losses(program: Program) -> Iterator[tuple[Code, ast.Call, str]]:
    """Yield the calls of loss functions of torch, with their kinds."""
    for code in program.codes:
        for call in code.calls:
            if len(call.args) >= 2 and (kind := loss_kind(program, code, call)):
                yield code, call, kind


def doubled_activation(facts: Facts) -> Iterator[Clue]:
    """Find activations that a loss applies once more."""
    program = facts.program
    wrong = {
        "cross_entropy": (DOUBLE_SOFTMAX, _SOFTMAX),
        "binary_cross_entropy_with_logits": (DOUBLE_SIGMOID, _SIGMOID),
        "nll_loss": (NLL_OF_PROBABILITIES, _SOFTMAX),
    }
    for code, call, kind in losses(program):
        if kind not in wrong:
            continue
        issue, activations = wrong[kind]
        found = _activation(program, code, call.args[0], activations)
        if found is not None:
            where, node = found
            yield Clue(issue, SHOWN, (where.evidence(node), code.evidence(call)))
            return


def _activation(
    program: Program, code: Code, expr: ast.expr, wanted: frozenset[str], depth: int = 0
) -> tuple[Code, ast.Call] | None:
    """Return the activation that an expression surely comes from."""
    source = origin(code, expr)
    if not isinstance(source, ast.Call) or depth > 4:
        return None
    if _applies(program, code, source, wanted):
        return code, source
    made = made_of(program, dotted(source.func).rpartition(".")[2])
    if made is None:
        return None
    if tail(made) == "Sequential":
        last = made.args[-1] if made.args else None
        return (code, made) if isinstance(last, ast.Call) and tail(last) in wanted else None
    found = [
        _activation(program, owner, value, wanted, depth + 1)
        for owner, value in _returns(program, tail(made))
    ]
    return found[0] if found and None not in found else None


def _applies(program: Program, code: Code, call: ast.Call, wanted: frozenset[str]) -> bool:
    """Whether a call is the activation: ``F.softmax(x)``, ``x.softmax(1)``, ``nn.Softmax()(x)``."""
    if tail(call) in wanted and not isinstance(call.func, ast.Name):
        full = code.module.full_name(call.func)
        held = receiver(call)
        of_self = isinstance(held, ast.Name) and held.id == "self"
        return not of_self or _made_by(program, full.rpartition(".")[2], wanted)
    if isinstance(call.func, ast.Call):
        return tail(call.func) in wanted
    if isinstance(call.func, ast.Name) and tail(call) in wanted:
        return code.module.full_name(call.func).startswith("torch")
    return _made_by(program, dotted(call.func).rpartition(".")[2], wanted)


def _made_by(program: Program, name: str, wanted: frozenset[str]) -> bool:
    made = made_of(program, name)
    return made is not None and tail(made) in wanted


def _returns(program: Program, class_name: str) -> list[tuple[Code, ast.expr]]:
    """Return what the forward method of a class returns."""
    found: list[tuple[Code, ast.expr]] = []
    for code in program.codes:
        owner = code.module.classes.get(class_name)
        method = owner.methods.get("forward") if owner is not None else None
        if method is None:
            continue
        for node in all_nodes(method.node):
            if isinstance(node, ast.Return) and node.value and code.scope(node) is method.node:
                found.append((code, node.value))
    return found


def swapped_arguments(facts: Facts) -> Iterator[Clue]:
    """Find a loss whose arguments have each other's names."""
    for code, call, kind in losses(facts.program):
        first, second = (dotted(stripped(arg)).rpartition(".")[2] for arg in call.args[:2])
        if kind in ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits") and (
            _TARGETS.search(first) and _OUTPUTS.search(second)
        ):
            yield Clue(SWAPPED, SHOWN, (code.evidence(call),))
            return


def divided_twice(facts: Facts) -> Iterator[Clue]:
    """Find a division by the accumulation steps before a backward that divides itself."""
    program = facts.program
    for code, call in program.calls("backward"):
        library = _dividing_library(program, code, call)
        division = _division(code, call.args[0]) if call.args else None
        if library and division and _ACCUMULATION.search(ast.unparse(division.right)):
            says = (
                f"the loss is divided by the accumulation steps before {library} divides it again"
            )
            yield Clue(DIVIDED_TWICE, SHOWN, (code.evidence(division), code.evidence(call)), says)
            return


def _dividing_library(program: Program, code: Code, call: ast.Call) -> str:
    """Return whose backward() divides by the accumulation steps that it was told."""
    held = dotted(receiver(call))
    made = made_of(program, held.rpartition(".")[2])
    if made is not None and tail(made) == "Accelerator":
        steps = keyword(made, "gradient_accumulation_steps")
        is_one = isinstance(steps, ast.Constant) and steps.value == 1
        return "" if steps is None or is_one else "accelerator.backward"
    # DeepSpeed's engine scales by gradient_accumulation_steps of its configuration.
    if "deepspeed.initialize" in program.text and "engine" in held.lower():
        return "DeepSpeed's backward"
    return ""


def _division(code: Code, expr: ast.expr) -> ast.BinOp | None:
    if isinstance(expr, ast.Name):
        value = last_value(code, expr) or _rebound(code, expr)
        expr = value if value is not None else expr
    is_division = isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Div)
    return expr if is_division else None  # type: ignore[return-value]


def _rebound(code: Code, name: ast.Name) -> ast.expr | None:
    """Return the value of ``loss = loss / n``, which stands on its own in the same block."""
    outer = [code.module.tree, *code.around(name)]
    last: ast.Assign | None = None
    for node in all_nodes(code.scope(name)):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name.id
            and node.lineno < name.lineno
            and (last is None or node.lineno > last.lineno)
        ):
            last = node
    return last.value if last is not None and code.parents.get(last) in outer else None


def mean_divided(facts: Facts) -> Iterator[Clue]:
    """Find ``criterion(...) / batch_size`` with backward() on it."""
    program = facts.program
    for code, call in program.calls("backward"):
        held = receiver(call)
        division = _division(code, held) if isinstance(held, ast.Name) else None
        if division is None or not _BATCH.match(ast.unparse(division.right)):
            continue
        left = division.left
        value = _before(code, left) if isinstance(left, ast.Name) else left
        if (
            isinstance(value, ast.Call)
            and loss_kind(program, code, value) in MEAN
            and _reduction(program, value) is None
        ):
            yield Clue(MEAN_DIVIDED, SHOWN, (code.evidence(division), code.evidence(value)))
            return


def _before(code: Code, name: ast.Name) -> ast.expr | None:
    """Return what a name held before the statement that it stands in."""
    return last_value(code, name) or _rebound(code, name)


def _reduction(program: Program, call: ast.Call) -> ast.expr | None:
    given = keyword(call, "reduction")
    if given is not None:
        return given
    made = made_of(program, dotted(call.func).rpartition(".")[2])
    maker = call.func if isinstance(call.func, ast.Call) else made
    return positional(maker, 99, "reduction") if maker is not None else None


RULES: Final = (doubled_activation, swapped_arguments, divided_twice, mean_divided)
