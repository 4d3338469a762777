"""Operations that give NaN at the edge of their domain, in a run that became NaN."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import FITS, SAID, SPOKEN, Clue, Issue
from distdiag.diagnosis.facts import Facts, spoken
from distdiag.diagnosis.program import Code, last_value, tail
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes

EDGE: Final = Issue(
    id="operation-outside-its-domain",
    title="an operation gives NaN, in its result or its gradient, at a value that can occur",
    severity=Severity.ERROR,
    fix="Keep its argument away from the edge: log_softmax for log(softmax), clamp(min=eps) below a"
    " logarithm, eps inside of a square root, a denominator plus eps.",
    quick="add an eps",
    wants=(("error_messages", "the operation that torch.autograd.set_detect_anomaly(True) names"),),
    explains=("not-finite", "divergence", "gradient-explosion"),
)
_NODES: Final = {"Log": "log", "Sqrt": "sqrt", "Div": "div", "Norm": "norm", "Pow": "pow"}
_ANOMALY: Final = re.compile(
    r"Function '(\w{1,60}?)Backward\d{0,3}' returned nan values in its (\d{1,3})\w\w output"
)
_SAFE: Final = re.compile(
    r"\beps\b|_eps|epsilon|tiny|1e-|clamp|clip|\.max\(|\bmax\(|maximum|softplus|\bexp\(|\.exp\("
    r"|nan_to_num|\+ ?1\b|log1p"
)
_RISKY: Final = frozenset({"log", "sqrt", "norm", "log2", "log10"})


def edges(facts: Facts) -> Iterator[Clue]:
    """Name the operation that autograd names, else those that are the most likely."""
    for document, number, line in facts.lines():
        if match := _ANOMALY.search(line):
            says = f"the gradient of `{match[1]}` is NaN: {_why(match[1])}"
            yield Clue(EDGE, SPOKEN, (spoken(document, number, line),), says)
            yield from _places(facts, _NODES.get(match[1], match[1].lower()))
            return
    effect = facts.is_nan
    said = facts.said("nan")
    if not effect and not said:
        return
    places = list(_places(facts, ""))
    if not places:
        return
    yield places[0]
    if effect:
        yield Clue(EDGE, FITS, effect)
    if said:
        yield Clue(EDGE, SAID, said)


def _why(operation: str) -> str:
    reasons = {
        "Log": "its argument reaches 0",
        "Sqrt": "its slope is infinite at 0",
        "Norm": "its slope is not defined at 0",
        "LinalgVectorNorm": "its slope is not defined at 0",
        "Div": "its denominator reaches 0",
        "Pow": "its base reaches 0 under an exponent below 1",
    }
    return reasons.get(operation, "look at what it was given")


def _places(facts: Facts, operation: str) -> Iterator[Clue]:
    """Yield the places of an operation, or of all risky ones, that nothing keeps from the edge."""
    for code in facts.program.codes:
        for node in code.nodes:
            says = _risk(code, node, operation)
            if says:
                yield Clue(EDGE, FITS, (code.evidence(node),), "" if operation else says)
                return


def _risk(code: Code, node: ast.AST, operation: str) -> str:
    if isinstance(node, ast.Call):
        name = tail(node)
        if name in _RISKY and (not operation or name.startswith(operation)):
            return _risk_of_call(code, node, name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _risk_of_division(code, node, operation)
    return ""


def _risk_of_call(code: Code, call: ast.Call, name: str) -> str:
    full = code.module.full_name(call.func)
    is_of_torch = full.startswith("torch.") or (
        isinstance(call.func, ast.Attribute) and "." in full
    )
    if full.startswith(("math.", "numpy.", "np.", "wandb", "logg", "self.log")) or not is_of_torch:
        return ""
    given = call.args[0] if full.startswith("torch.") and call.args else None
    argument = given or (call.func.value if isinstance(call.func, ast.Attribute) else None)
    if argument is None or _is_safe(code, argument):
        return ""
    if name.startswith("log"):
        if "softmax" in _source(code, argument) or "sigmoid" in _source(code, argument):
            return "the logarithm of a probability is -inf where the probability rounds to 0"
        return "a logarithm gets values that nothing keeps above 0"
    if name == "sqrt":
        return "a square root gets values that nothing keeps above 0; its slope at 0 is infinite"
    return "the norm of a vector of zeros has no slope" if "-" in ast.unparse(argument) else ""


def _risk_of_division(code: Code, node: ast.BinOp, operation: str) -> str:
    if operation and operation != "div":
        return ""
    below = _source(code, node.right)
    if re.search(r"\.(?:std|norm|sum)\(", below) and not _SAFE.search(below):
        is_count = re.search(r"mask|len|count|numel", below) is not None
        return (
            ""
            if is_count and not operation
            else "a denominator can be 0, and nothing is added to it"
        )
    return ""


def _is_safe(code: Code, expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) or _SAFE.search(_source(code, expr)) is not None


def _source(code: Code, expr: ast.expr) -> str:
    """Return the text of an expression, with that of the names in it."""
    text = ast.unparse(expr)
    for node in (expr, *all_nodes(expr)):
        if isinstance(node, ast.Name) and (value := last_value(code, node)) is not None:
            text += f" {ast.unparse(value)}"
    return text


RULES: Final = (edges,)
