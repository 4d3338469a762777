"""What the whole catalogue says about one moment."""

from distdiag.checks import load_checks
from distdiag.findings.finding import Severity


def all_findings(alignment):
    checks = [check() for check in load_checks().values()]
    kinds = {type(event) for event in alignment.by_rank.values()}
    needing = [check for check in checks if all(issubclass(k, check.needs) for k in kinds)]
    if alignment.trigger is None:
        found = [f for check in needing for f in check.check_alignment(alignment)]
    else:
        found = [f for check in needing for f in check.check_missing(alignment)]
        found += [f for check in checks for f in check.check_ranks(alignment.states)]
    return found


def serious(alignment):
    """The findings of warning or above, each once, as the engine keeps them."""
    unique = {finding.identity: finding for finding in all_findings(alignment)}
    return [f for f in unique.values() if f.severity is not Severity.INFO]
