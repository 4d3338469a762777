"""Calls that need every rank and that some ranks surely do not make."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Related, Rule, related
from distdiag.lint.effects import Effect, Effects
from distdiag.lint.mentions import mentions_ranks
from distdiag.lint.modules import Function, Module
from distdiag.lint.operations import Family
from distdiag.lint.reach import EVERY, Ranks, deciding_exit, deciding_test, is_certain, reach
from distdiag.lint.sites import Exit, Site, sites_of, sites_of_definitions


@dataclass(frozen=True, slots=True)
class GuardedSite:
    """A call of a function that leads to an operation, and what keeps ranks from it.

    `test` is None where a decorator does; `way_out` is the exit before it, if that is the reason.
    Not `is_certain`: the exit and the call stand under conditions that may exclude each other.
    """

    site: Site
    effect: Effect
    test: ast.expr | None
    way_out: Exit | None
    is_certain: bool

    @property
    def is_direct(self) -> bool:
        """Whether the call is the operation itself."""
        return len(self.effect.chain) == 1


@dataclass(frozen=True, slots=True)
class _Unit:
    site: Site
    effect: Effect
    ranks: Ranks
    is_own: bool


def guarded_sites(module: Module, effects: Effects, family: Family) -> Iterator[GuardedSite]:
    """Yield the calls of a module that lead to an operation of a family on some ranks only.

    A call is left out where the ranks that do not make it make one of the same kind under another
    condition of the same function: in the other branch, or in one that follows.
    """
    for function in module.functions:
        if not mentions_ranks(function):
            continue
        units = _units(function, effects, family)
        made: dict[tuple[str, str | None], set[Ranks]] = {}
        for unit in units:
            made.setdefault(_kind(unit), set()).add(unit.ranks)
        reported: set[int] = set()
        for unit in units:
            is_whole = unit.ranks in (EVERY, frozenset())
            if is_whole or not unit.is_own or unit.site.order in reported:
                continue
            if _is_made_up_for(unit, made[_kind(unit)]):
                continue
            reported.add(unit.site.order)
            yield _guarded(unit)


def _units(function: Function, effects: Effects, family: Family) -> list[_Unit]:
    """Return the calls that lead to the family, if some ranks leave one of them out."""
    sites = sites_of(function)
    partial = (site for site in sites if reach(site, raises=True) != EVERY)
    if not any(effect.operation.family is family for s in partial for effect in effects.of_site(s)):
        return []
    starts = [reach(site) for site in sites if _starts(site, effects)]
    own = ((site, True) for site in sites)
    inner = ((site, False) for site in sites_of_definitions(function))
    return [
        _Unit(site, effect, _ranks_of(site, effect.operation.group), is_own)
        for site, is_own in (*own, *inner)
        for effect in effects.of_site(site)
        if effect.operation.family is family
        # The world of a job in which only these ranks create the process group are these ranks.
        and not (starts and starts[0] == reach(site) != EVERY)
    ]


def _starts(site: Site, effects: Effects) -> bool:
    return any(effect.operation.family is Family.START for effect in effects.of_site(site))


def _ranks_of(site: Site, group: str | None) -> Ranks:
    ranks = reach(site, group)
    return reach(site, group, raises=True) if ranks == EVERY else ranks


def _guarded(unit: _Unit) -> GuardedSite:
    group = unit.effect.operation.group
    way = deciding_exit(unit.site, group)
    return GuardedSite(
        unit.site,
        unit.effect,
        deciding_test(unit.site, group),
        way,
        is_certain=way is None or is_certain(way, unit.site, group),
    )


def _kind(unit: _Unit) -> tuple[str, str | None]:
    return unit.effect.operation.kind, unit.effect.operation.group


def _is_made_up_for(unit: _Unit, made: set[Ranks]) -> bool:
    """Say whether the other ranks make a call of its kind too; `made` holds who makes each."""
    # A call that all ranks make is another round, and makes up for nothing.
    others = (ranks for ranks in made if not unit.ranks <= ranks)
    return unit.ranks.union(*others) == EVERY


# How guarded calls are reported.

_MAX_TEXT = 80
_LEAVING = {ast.Return: "return", ast.Raise: "raise", ast.Break: "break", ast.Continue: "continue"}


class GuardRule(Rule):
    """What the rules about operations of one family share that some ranks do not make."""

    family: ClassVar[Family]
    problem: ClassVar[str] = "is not called by every rank"

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the calls that some ranks leave out."""
        for found in guarded_sites(module, self.effects, self.family):
            yield self.finding(
                module,
                found.site.call,
                f"{_call_text(found)} {self.problem}: {_guard_text(found)}",
                severity=self.severity_of(found),
                related=_places(found),
            )

    def severity_of(self, found: GuardedSite) -> Severity:
        """Return error for what is seen directly, warning through calls, info if it may not be."""
        if not found.is_certain:
            return Severity.INFO
        return Severity.ERROR if found.is_direct else Severity.WARNING


def _call_text(found: GuardedSite) -> str:
    called = short(found.site.call.func)
    if found.is_direct:
        return called
    last = found.effect.chain[-1]
    where = f"{last.function.module.path.name}:{last.call.lineno}"
    return f"{called}, which calls {short(last.call.func)} ({where}),"


def _guard_text(found: GuardedSite) -> str:
    if found.test is None:
        return "a decorator of the function lets some ranks only into it"
    line = found.test.lineno
    if found.way_out is None:
        return f"it stands under `{short(found.test)}` (line {line})"
    way = _LEAVING.get(type(found.way_out.statement), "an exit")
    return f"it comes after a {way} under `{short(found.test)}` (line {line})".replace("a an", "an")


def _places(found: GuardedSite) -> tuple[Related, ...]:
    """Return the condition and the calls on the way to the operation."""
    module = found.site.function.module
    guard = (related(module, found.test, "the condition"),) if found.test is not None else ()
    calls = (
        related(site.function.module, site.call, f"calls {short(site.call.func)}")
        for site in found.effect.chain[1:]
    )
    return (*guard, *calls)


def short(node: ast.AST) -> str:
    """Return the text of an expression on one line, at most 80 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
