"""The contract of a rule of ``distdiag lint``."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from distdiag.findings.finding import Severity
from distdiag.lint.effects import Effects
from distdiag.lint.modules import Module

# What a rule says about a place in a file.


class Related(msgspec.Struct, frozen=True):
    """Another place that belongs to a finding, with what is there. Lines count from 1."""

    path: str
    line: int
    message: str


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One place that is wrong. Lines and columns count from 1.

    Example: ``LintFinding(code="COL009", name="rank-guarded-collective", path="train.py", line=12,
    column=9, …)``.
    """

    code: str
    name: str
    severity: Severity
    message: str
    path: str
    line: int
    column: int
    end_line: int
    source: str = ""
    related: tuple[Related, ...] = ()


# The rule.


class Rule(ABC):
    """One kind of defect that can be seen in the source.

    The docstring is a page of ``distdiag explain``, with the same sections as that of a check. A
    rule that looks for what a check finds at run time has that check's code and name. `effects`
    tells what calls lead to, through all files that were given.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]

    def __init__(self, effects: Effects) -> None:
        self.effects = effects

    @abstractmethod
    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield what is wrong in a module."""

    def finding(
        self,
        module: Module,
        node: ast.expr | ast.stmt,
        message: str,
        *,
        severity: Severity | None = None,
        related: tuple[Related, ...] = (),
    ) -> LintFinding:
        """Build a finding at a node of the module."""
        return LintFinding(
            code=self.code,
            name=self.name,
            severity=severity or self.severity,
            message=message,
            path=str(module.path),
            line=node.lineno,
            column=node.col_offset + 1,
            end_line=node.end_lineno or node.lineno,
            source=module.lines[node.lineno - 1].strip(),
            related=related,
        )


def related(module: Module, node: ast.expr | ast.stmt, message: str) -> Related:
    """Return a node as a further place of a finding."""
    return Related(str(module.path), node.lineno, message)
