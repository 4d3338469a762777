"""The configurations that parity compares: their arguments, and which one brings a divergence in.

A configuration is named by its parts, joined by ``x``: ``fsdp2xtp2`` stands above ``fsdp2`` and
``tp2``. It brings a divergence in if it differs from the reference and none below it does.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from distdiag.events.errors import UsageError


class Configuration(NamedTuple):
    """One way to run the script: on so many ranks, with these arguments more."""

    label: str
    num_ranks: int
    arguments: tuple[str, ...] = ()


# Arguments that depend on the configuration: templates with arithmetic of whole numbers.


def filled_in(template: str, **names: int) -> tuple[str, ...]:
    """Return the arguments of a template such as ``--batch-size {global_batch//world_size}``.

    Raises:
        UsageError: it names something unknown or is no arithmetic of whole numbers.

    """
    pieces: list[str] = []
    rest = template
    while "{" in rest:
        before, _, after = rest.partition("{")
        expression, brace, rest = after.partition("}")
        if not brace:
            raise UsageError(f"--per-rank {template!r}: a brace is not closed")
        pieces += [before, str(evaluate(expression, names))]
    return tuple("".join([*pieces, rest]).split())


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Return the value of an expression of whole numbers, names, and ``+ - * // %``.

    Raises:
        UsageError: it is something else, or divides by zero.

    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names)
    except (SyntaxError, ZeroDivisionError, _ForbiddenError) as error:
        known = ", ".join(sorted(names))
        raise UsageError(
            f"{{{expression}}} cannot be computed: {error} (there are: {known}; and + - * // %)"
        ) from None


class _ForbiddenError(Exception):
    pass


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise _ForbiddenError(f"{node.id!r} is unknown")
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise _ForbiddenError(f"{ast.unparse(node)!r} is not allowed")


# Which configuration brings a divergence in.


class Origin(NamedTuple):
    """A configuration that differs while everything below it agrees with the reference."""

    label: str
    below: tuple[str, ...]

    def phrase(self) -> str:
        """Say what brings the divergence in."""
        if not self.below:
            return f"{self.label} brings the divergence in"
        agreeing = " and ".join(self.below)
        return f"{self.label} brings the divergence in: {agreeing} by themselves agree"


def parts_of(label: str) -> frozenset[str]:
    """Return the parts of a configuration's name."""
    return frozenset(part for part in label.split("x") if part)


def in_order(labels: Sequence[str]) -> list[str]:
    """Return labels with fewer parts before those with more, else as they were."""
    return sorted(labels, key=lambda label: len(parts_of(label)))


def origins(differs: Mapping[str, bool]) -> list[Origin]:
    """Return what brings a divergence in, by whether each configuration differs."""
    found = []
    for label in in_order(list(differs)):
        below = [each for each in differs if parts_of(each) < parts_of(label)]
        if differs[label] and not any(differs[each] for each in below):
            found.append(Origin(label, tuple(below)))
    return found
