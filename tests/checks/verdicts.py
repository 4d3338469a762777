"""What checks say of a view: one of them, or the whole catalogue."""

from distdiag.checks import load_checks
from distdiag.findings.finding import Severity
from distdiag.views.alignment import OpenCollective, OpenGroup
from distdiag.views.rank_states import JobView, StackView


def findings(check, view):
    """The findings of a check about a view, which must be of a type that it is shown."""
    assert type(view) in check.views, f"{check.code} is not shown a {type(view).__name__}"
    return list(check().check(view))


def all_findings(view):
    """What every check says of a view; where a rank is missing, of the job as a whole as well."""
    shown = [view]
    if isinstance(view, OpenCollective | OpenGroup):
        shown += [JobView(view.states), StackView(view.states)]
    checks = load_checks().values()
    return [f for each in shown for c in checks if type(each) in c.views for f in findings(c, each)]


def serious(view):
    """The findings of warning or above, each once, as the engine keeps them."""
    unique = {finding.identity: finding for finding in all_findings(view)}
    return [f for f in unique.values() if f.severity is not Severity.INFO]


def codes(view):
    """The codes of the findings of warning or above."""
    return [finding.code for finding in serious(view)]
