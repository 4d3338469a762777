"""Where gradients do not flow: frozen parameters, detached losses, layers that nobody trains."""

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
    is_optimizer_class,
    origin,
    receiver,
    stripped,
    tail,
)
from distdiag.diagnosis.rules.loss_functions import losses
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes

FROZEN: Final = Issue(
    id="all-parameters-frozen",
    title="all parameters of the model are frozen, and the optimizer trains the same ones",
    severity=Severity.ERROR,
    fix="Freeze the layers that shall stay, not the whole model; new layers are made after it.",
    quick="leave the layers to be trained out of requires_grad = False",
    wants=(("loss_curves", "whether the loss is the same at each step"),),
    explains=("stuck", "plateau", "zero-gradient", "no-gradient-graph"),
)
DETACHED: Final = Issue(
    id="detached-loss",
    title="the loss is cut off the model before backward(): no parameter gets a gradient",
    severity=Severity.ERROR,
    fix="Compute the loss from the model's output itself; detach copies for logging only.",
    quick="remove detach()/.data/.item() before the loss",
    explains=("stuck", "plateau", "zero-gradient", "no-gradient-graph"),
)
FORCED_GRADIENT: Final = Issue(
    id="loss-made-to-require-gradient",
    title="the loss is told to require a gradient: that hides that no parameter leads to it",
    severity=Severity.ERROR,
    fix="Remove requires_grad on the loss, and find where the graph is cut (detach, no_grad, .data,"
    " numpy, argmax).",
    quick="remove loss.requires_grad = True",
    explains=("stuck", "plateau", "zero-gradient"),
)
LATE_LAYER: Final = Issue(
    id="layer-made-after-optimizer",
    title="a layer is replaced after the optimizer was made, which holds the old parameters",
    severity=Severity.ERROR,
    fix="Change the model first, and make the optimizer of its final parameters.",
    quick="make the optimizer after the last change of the model",
    explains=("stuck", "plateau"),
)

_LOSS: Final = re.compile(r"(?:^|_|\.)loss$")
_MAKERS: Final = frozenset({"resize_token_embeddings", "add_adapter"})
_PREDICTORS: Final = re.compile(r"(?:^|\.|_)(?:model|net|network)$")
_CUT: Final = frozenset({"detach", "item", "numpy", "tolist"})


def frozen(facts: Facts) -> Iterator[Clue]:
    """Find a model whose parameters are all frozen, with nothing made or thawed afterwards."""
    program = facts.program
    for code in program.codes:
        for node, name in _freezings(code):
            if _thawed(program, name) or _changed_after(code, node, name):
                continue
            optimizer = _optimizer_of(code, name)
            if optimizer is not None and optimizer.lineno > node.lineno:
                yield Clue(FROZEN, SHOWN, (code.evidence(node), code.evidence(optimizer)))
                return


def _freezings(code: Code) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements that freeze a whole model, with its name."""
    for node in code.nodes:
        match node:
            case ast.For(
                target=ast.Name(id=item),
                iter=ast.Call(func=ast.Attribute(attr="parameters", value=held)),
                body=[ast.Assign(targets=[ast.Attribute(value=ast.Name(id=of), attr=attr)]) as a],
            ) if of == item and attr == "requires_grad":
                if isinstance(a.value, ast.Constant) and a.value.value is False:
                    yield node, dotted(held)
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(attr="requires_grad_", value=held),
                    args=[ast.Constant(value=False)],
                )
            ):
                yield node, dotted(held)
            case _:
                pass


def _thawed(program: Program, name: str) -> bool:
    """Whether anything requires a gradient again, or is added by a library."""
    if re.search(r"requires_grad\s?=(?!\s?false)|requires_grad_\((?!false)", program.text):
        return True
    libraries = ("get_peft_model", "inject_adapter", "lora", "add_adapter", "prepare_model_for")
    return not name or any(word in program.text for word in libraries)


def _changed_after(code: Code, freezing: ast.stmt, name: str) -> bool:
    """Whether an attribute of the model is set behind the freezing, such as a new head."""
    return any(
        isinstance(node, ast.Assign | ast.AugAssign)
        and node.lineno > freezing.lineno
        and any(
            dotted(stripped(target)).startswith(f"{name}.") or dotted(target) == name
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
        for node in code.nodes
    )


def _optimizer_of(code: Code, name: str) -> ast.Call | None:
    """Return the call that makes an optimizer of ``name.parameters()`` and nothing else."""
    for call in code.calls:
        if is_optimizer_class(code, call) and call.args:
            given = call.args[0]
            if (
                isinstance(given, ast.Call)
                and tail(given) == "parameters"
                and dotted(receiver(given)) == name
            ):
                return call
    return None


def detached(facts: Facts) -> Iterator[Clue]:
    """Find a loss of which both arguments are cut off, or that is itself."""
    program = facts.program
    for code, call in program.calls("backward"):
        held = receiver(call)
        cut = (
            _cut(code, held) if held is not None and _LOSS.search(dotted(stripped(held))) else None
        )
        if cut is not None:
            yield Clue(DETACHED, SHOWN, (code.evidence(cut), code.evidence(call)))
            return
    if "backward" not in program.tails:
        return
    for code, call, _ in losses(program):
        first = _cut_prediction(code, call.args[0])
        is_alone = _is_backwarded(code, call)
        if first is not None and is_alone and not _uses_model(code, call.args[1]):
            yield Clue(DETACHED, SHOWN, (code.evidence(first), code.evidence(call)))
            return


def _cut(code: Code, expr: ast.expr) -> ast.expr | None:
    """Return where a loss is cut: ``loss = x.detach()``, ``torch.tensor(loss.item())``."""
    source = origin(code, expr)
    if not isinstance(source, ast.Call):
        return source if isinstance(source, ast.Attribute) and source.attr == "data" else None
    if tail(source) in _CUT and not source.args:
        return source
    full = code.module.full_name(source.func)
    if full in ("torch.tensor", "torch.Tensor", "torch.FloatTensor") and source.args:
        return source
    return None


def _cut_prediction(code: Code, expr: ast.expr) -> ast.expr | None:
    source = origin(code, expr)
    match source:
        case ast.Call(func=ast.Attribute(attr="detach", value=inner)):
            return source if _uses_model(code, inner) else None
        case ast.Attribute(attr="data", value=inner):
            return source if _uses_model(code, inner) else None
        case _:
            return None


def _uses_model(code: Code, expr: ast.expr) -> bool:
    source = origin(code, expr)
    return any(
        isinstance(node, ast.Call) and _PREDICTORS.search(dotted(node.func)) is not None
        for node in (source, *all_nodes(source))
    )


def _is_backwarded(code: Code, loss: ast.Call) -> bool:
    """Whether this loss alone, and no sum with others, is what backward() begins with."""
    statement = code.parents.get(loss)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    name = dotted(statement.targets[0])
    scope = code.scope(loss)
    uses = [
        node
        for node in all_nodes(scope)
        if isinstance(node, ast.Name | ast.Attribute)
        and dotted(node) == name
        and isinstance(node.ctx, ast.Store)
    ]
    is_begun = any(
        isinstance(node, ast.Call) and tail(node) == "backward" and dotted(receiver(node)) == name
        for node in all_nodes(scope)
    )
    return is_begun and len(uses) == 1


def forced_gradient(facts: Facts) -> Iterator[Clue]:
    """Find ``loss.requires_grad = True`` and ``loss.requires_grad_()``."""
    for code in facts.program.codes:
        for node in code.nodes:
            match node:
                case ast.Assign(
                    targets=[ast.Attribute(attr="requires_grad", value=held)],
                    value=ast.Constant(value=True),
                ) if _is_begun(code, held):
                    yield Clue(FORCED_GRADIENT, SHOWN, (code.evidence(node),))
                    return
                case ast.Call(func=ast.Attribute(attr="requires_grad_", value=held)) if _is_begun(
                    code, held
                ):
                    yield Clue(FORCED_GRADIENT, SHOWN, (code.evidence(node),))
                    return
                case _:
                    pass


def _is_begun(code: Code, held: ast.expr) -> bool:
    """Whether an expression is a loss that backward() begins with, in the same function.

    What torch.autograd.grad gets may lead to an input, which requires a gradient by itself.
    """
    name = dotted(held)
    return _LOSS.search(name) is not None and any(
        isinstance(node, ast.Call) and tail(node) == "backward" and dotted(receiver(node)) == name
        for node in all_nodes(code.scope(held))
    )


def late_layer(facts: Facts) -> Iterator[Clue]:
    """Find a layer that is set behind the only optimizer of its model, in the same function."""
    for code in facts.program.codes:
        made = [call for call in code.calls if is_optimizer_class(code, call) and call.args]
        for call in made:
            given = call.args[0]
            if not isinstance(given, ast.Call) or tail(given) != "parameters":
                continue
            name = dotted(receiver(given))
            later = [other for other in made if other.lineno > call.lineno]
            change = _layer_set_after(code, call, name) if name and not later else None
            if change is not None and "add_param_group" not in facts.program.tails:
                yield Clue(LATE_LAYER, SHOWN, (code.evidence(change), code.evidence(call)))
                return


def _layer_set_after(code: Code, optimizer: ast.Call, name: str) -> ast.stmt | None:
    scope = code.scope(optimizer)
    for node in code.nodes:
        if getattr(node, "lineno", 0) <= optimizer.lineno or code.scope(node) is not scope:
            continue
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as value) if dotted(
                stripped(target)
            ).startswith(f"{name}.") and _is_layer(code, value):
                return node
            case ast.Expr(value=ast.Call() as value) if (
                tail(value) in _MAKERS and dotted(receiver(value)) == name
            ):
                return node
            case _:
                pass
    return None


def _is_layer(code: Code, call: ast.Call) -> bool:
    made = stripped(call)
    full = code.module.full_name(made.func) if isinstance(made, ast.Call) else ""
    return full.startswith(("torch.nn.", "nn.")) and not full.startswith("torch.nn.functional")


RULES: Final = (frozen, detached, forced_gradient, late_layer)
