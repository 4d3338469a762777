"""Look at files: which rules run on which, and what comes of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distdiag.config.selection import Selection
from distdiag.events.errors import DamagedFileError
from distdiag.findings.finding import Severity
from distdiag.findings.ignores import ignore_comment
from distdiag.lint.base import LintFinding, Rule
from distdiag.lint.effects import Effects
from distdiag.lint.modules import Module
from distdiag.lint.project import Project
from distdiag.lint.rules import load_rules
from distdiag.lint.sources import is_worth_parsing, python_files

# Comments that silence rules: ``# distdiag: ignore``, ``# distdiag: ignore[COL009, BAR001]``.


def is_ignored(module: Module, finding: LintFinding) -> bool:
    """Say whether a comment on a line of the finding's call or statement silences it."""
    return any(
        _silences(line, finding) for line in module.lines[finding.line - 1 : finding.end_line]
    )


def _silences(line: str, finding: LintFinding) -> bool:
    comment = ignore_comment(line)
    return comment is not None and (
        comment.names(finding.code, finding.name) or not comment.has_codes
    )


# Runs the rules on the files.


@dataclass(frozen=True, slots=True)
class LintResult:
    """What was found, how many files were looked at, and which could not be and why."""

    findings: tuple[LintFinding, ...]
    num_files: int
    not_checked: dict[str, str]

    @property
    def worst(self) -> Severity | None:
        """The worst severity of all findings."""
        severities = [finding.severity for finding in self.findings]
        return max(severities, key=lambda severity: severity.weight, default=None)


def lint_files(given: Sequence[Path], selection: Selection, stdin: str = "") -> LintResult:
    """Look at files and at all ``*.py`` files of folders; `stdin` is what ``-`` stands for.

    Raises:
        UsageError: a path does not exist, or a code is unknown.

    """
    rules = load_rules()
    selection.validate(rules)
    files = tuple(python_files(given))
    project = Project(files, stdin)
    effects = Effects(project)
    chosen = [rule(effects) for code, rule in rules.items() if selection.selects(code)]
    findings: list[LintFinding] = []
    not_checked: dict[str, str] = {}
    for file in files:
        try:
            if is_worth_parsing(project.text(file)):
                findings += _look(project.module(file), chosen)
        except DamagedFileError as error:
            not_checked[str(file)] = str(error)
        except RecursionError:
            not_checked[str(file)] = f"{file}: nested too deeply"
    findings.sort(key=lambda f: (f.path, f.line, f.column, f.code))
    return LintResult(tuple(findings), len(files), not_checked)


def _look(module: Module, rules: Sequence[Rule]) -> Iterator[LintFinding]:
    for rule in rules:
        for finding in rule.look(module):
            if not is_ignored(module, finding):
                yield finding
