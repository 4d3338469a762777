"""Builds views of sharding plans as the engine would show them."""

from distdiag.config.placement_rules import rules_of
from distdiag.events.base import CallSite, Frame
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanSource
from distdiag.events.ranks import RankSet
from distdiag.views.models import PatternView, ProgramPlanView, RuledTensor, RuleView

PAIR = RankSet([0, 1])
OWN_SITE = CallSite((Frame("train.py", 7, "main"),))


def rules(table, *plans, world=PAIR, **values):
    """The view of a table beside tensors that all ranks keep alike."""
    tensors = tuple(RuledTensor("Net", plan, world) for plan in plans)
    names = {name for plan in plans if plan.mesh for name in plan.mesh.names}
    values.setdefault("axes", {"Net": frozenset(names)})
    return RuleView(rules_of(table), tensors, world, **values)


def program(*patterns, source=PlanSource.PARALLELIZE_MODULE, site=None):
    """The view of a plan that both ranks applied."""
    return ProgramPlanView(source, "Net", patterns, PAIR, site or OWN_SITE)


def pattern(text, num_matches=1, *, wanted="ColwiseParallel", closest="", faults=()):
    """A pattern that matched so often, with its faults."""
    seen = PatternMatches(text, wanted, num_matches, (), closest, tuple(faults))
    return PatternView(seen, num_matches, PAIR, dict.fromkeys(faults, PAIR))


def fault(kind, name="up", text="but it is not"):
    return NamedFault(PlanFault(kind), name, text)
