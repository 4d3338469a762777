"""What a function surely does that needs every rank, itself or through what it calls."""

import ast
import re
from dataclasses import dataclass
from typing import Final

from distdiag.frameworks.rank_names import RANKS
from distdiag.lint.modules import Function
from distdiag.lint.operations import Operation, operation_of
from distdiag.lint.project import Project
from distdiag.lint.rank_values import RankView
from distdiag.lint.reach import EVERY, allowed, reach
from distdiag.lint.sites import Condition, Exit, Site, sites_of

_MAX_DEPTH: Final = 6
# Conditions that hold in a distributed job, or on all ranks alike since they are configuration.
_SETTING: Final = re.compile(
    r"distributed|parallel|deepspeed|fsdp|ddp|zero[_ ]?3|multi_?(gpu|node)|world|shard|initialized"
    r"|num_proc|environ",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Effect:
    """An operation, and the calls that lead to it: the last is the operation itself."""

    operation: Operation
    chain: tuple[Site, ...]


class Effects:
    """The effects of functions, each worked out once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._of_call: dict[ast.Call, tuple[Effect, ...]] = {}
        self._of_function: dict[Function, tuple[Effect, ...]] = {}

    def of_site(self, site: Site, depth: int = 0) -> tuple[Effect, ...]:
        """Return what a call does that needs other ranks."""
        if site.call not in self._of_call or depth:
            self._of_call[site.call] = self._work_out(site, depth)
        return self._of_call[site.call]

    def _work_out(self, site: Site, depth: int) -> tuple[Effect, ...]:
        operation = operation_of(site.call, site.function)
        if operation is not None:
            return (Effect(operation, (site,)),)
        function = self.project.target(site.call, site.function)
        if function is None:
            return ()
        return tuple(
            Effect(operation, (site, *effect.chain))
            for effect in self.of_function(function, depth + 1)
            if (operation := _bound(effect.operation, site.call, function)) is not None
        )

    def of_function(self, function: Function, depth: int = 0) -> tuple[Effect, ...]:
        """Return what a function surely does on every rank that calls it, one of each kind."""
        if function in self._of_function or depth > _MAX_DEPTH:
            return self._of_function.get(function, ())
        self._of_function[function] = ()  # for a function that calls itself
        found: dict[tuple[str, str | None], tuple[Effect, frozenset[int]]] = {}
        if allowed(function) == EVERY:
            for site in sites_of(function):
                if not _is_sure(site):
                    continue
                for effect in self.of_site(site, depth):
                    key = effect.operation.kind, effect.operation.group
                    first, ranks = found.get(key, (effect, frozenset[int]()))
                    found[key] = first, ranks | reach(site)
        self._of_function[function] = tuple(e for e, ranks in found.values() if ranks == EVERY)
        return self._of_function[function]


def _is_sure(site: Site) -> bool:
    """Say whether a call is made whenever its function runs in a distributed job."""
    if site.is_in_handler:
        return False
    return all(_is_met(c, site.function) for c in site.conditions) and not any(
        _may_leave(way, site.function) for way in site.exits
    )


def _is_met(condition: Condition, function: Function) -> bool:
    answers = {RankView(rank, function).truth(condition.test) for rank in RANKS}
    if answers == {None} or "initialized" in ast.unparse(condition.test):
        return bool(_SETTING.search(ast.unparse(condition.test)))
    return answers != {not condition.answer}


def _may_leave(way: Exit, function: Function) -> bool:
    if isinstance(way.statement, ast.Raise):
        return False
    return not any(_SETTING.search(ast.unparse(c.test)) for c in way.conditions) and not any(
        _is_about_ranks(c, function) for c in way.conditions
    )


def _is_about_ranks(condition: Condition, function: Function) -> bool:
    return len({RankView(rank, function).truth(condition.test) for rank in RANKS}) > 1


def _bound(operation: Operation, call: ast.Call, function: Function) -> Operation | None:
    """Return the operation with the group that the call passes, None for a group unknown here."""
    name = operation.parameter
    if name is None:
        return operation if operation.group is None else None
    given = next((k.value for k in call.keywords if k.arg == name), None)
    position = function.parameters.index(name) - (function.owner is not None)
    if given is None and 0 <= position < len(call.args):
        given = call.args[position]
    if given is None or ast.unparse(given) == "None":
        return Operation(operation.kind, operation.family)
    return None
