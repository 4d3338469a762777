"""COL013: whether a collective is called depends on what a rank has of its own."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Rule, related
from distdiag.lint.bindings import value_of
from distdiag.lint.guarded import short
from distdiag.lint.mentions import mentions
from distdiag.lint.modules import Function, Module, all_nodes
from distdiag.lint.operations import Family, operation_of
from distdiag.lint.reach import EVERY, reach
from distdiag.lint.sites import Site, sites_of

_CLOCK: Final = re.compile(
    r"^(time\.(time|monotonic|perf_counter)|datetime(\.datetime)?\.now|random\.\w+)$"
)
_DATA: Final = frozenset({"item", "isnan", "isinf", "isfinite"})
_COLLECTIVES: Final = ("all_", "barrier", "broadcast", "gather", "reduce", "scatter", "wait_for")
_MAX_NAMES: Final = 4


# A collective of all ranks, called directly, under a test of a tensor's value that no collective
# has made equal before; or of the clock, or of Python's random numbers.
class DataDependentCollective(Rule):
    """Whether a collective is called depends on a rank's own data or clock.

    ## What you see
    The run hangs, once in many runs: ranks have different batches and different clocks, and on the
    day when they decide differently those that called the collective wait for ever.

    ## Example
        # wrong: the clocks of the ranks differ
        if time.time() - start > limit:
            dist.barrier()
        # right: rank 0 decides for all
        decision = [time.time() - start > limit]
        dist.broadcast_object_list(decision)
        if decision[0]:
            dist.barrier()

    ## How to fix
    Let the ranks agree first: reduce the value (`all_reduce` with MAX), or broadcast the decision.

    ## When it is not a defect
    The value is the same on all ranks by other means, such as a seed that all of them share.

    A test of tensor data is a note. To silence a line, end it with
    `# distdiag: ignore[COL013]`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_reduce
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.broadcast_object_list
    """

    code = "COL013"
    name = "data-dependent-collective"
    severity = Severity.WARNING

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the collectives that some ranks may skip because of their own data."""
        for function in module.functions:
            if not mentions(function, _COLLECTIVES):
                continue
            sites = sites_of(function)
            for site in sites:
                operation = operation_of(site.call, function)
                if operation is None or operation.family is not Family.COLLECTIVE:
                    continue
                if operation.group is None and reach(site) == EVERY:
                    yield from self._look_at(site, sites)

    def _look_at(self, site: Site, sites: tuple[Site, ...]) -> Iterator[LintFinding]:
        for condition in site.conditions:
            source = _own_source(condition.test, site.function)
            if source is None or _has_agreed(condition.test, site, sites):
                continue
            is_clock = _CLOCK.match(site.function.module.full_name(source.func)) is not None
            yield self.finding(
                site.function.module,
                site.call,
                f"{short(site.call.func)} is called only if `{short(condition.test)}` (line "
                f"{condition.test.lineno}), which each rank decides by its own "
                f"{'clock' if is_clock else 'data'}",
                severity=Severity.WARNING if is_clock else Severity.INFO,
                related=(related(site.function.module, condition.test, "the condition"),),
            )
            return


def _own_source(test: ast.expr, function: Function, depth: int = 0) -> ast.Call | None:
    """Return the call in a test, or in the values of its names, that differs between ranks."""
    for node in (test, *all_nodes(test)):
        if isinstance(node, ast.Call):
            is_data = isinstance(node.func, ast.Attribute) and node.func.attr in _DATA
            if is_data or _CLOCK.match(function.module.full_name(node.func)):
                return node
        if isinstance(node, ast.Name) and depth < _MAX_NAMES:
            value = value_of(node, function)
            found = _own_source(value, function, depth + 1) if value is not None else None
            if found is not None:
                return found
    return None


def _has_agreed(test: ast.expr, site: Site, sites: tuple[Site, ...]) -> bool:
    """Say whether any collective before may have made the tested value equal on all ranks."""
    return any(
        earlier.call.lineno <= test.lineno and operation_of(earlier.call, site.function) is not None
        for earlier in sites[: site.order]
    )
