"""Which ranks get to a call, of those that get to its function."""

import ast
import re
from functools import lru_cache
from typing import Final

from distdiag.frameworks.rank_names import RANKS
from distdiag.lint.modules import Function
from distdiag.lint.rank_values import RankView
from distdiag.lint.sites import Condition, Exit, Site

Ranks = frozenset[int]
EVERY: Final[Ranks] = frozenset(RANKS)

_DECORATOR: Final = re.compile(
    r"(^|[._])(rank_?(zero|0)(_only)?|on_(main_|last_)?process|main_process_only|master_only|only_on_\w+)$"
)
_LOCAL_DECORATOR: Final = re.compile(r"(^|[._])on_local_(main_)?process$")


def reach(site: Site, group: str | None = None, *, raises: bool = False) -> Ranks:
    """Return the ranks that may make the call: all but those that a condition surely keeps away.

    `group` is the text of the call's process group: then only tests of the rank in it count. With
    `raises` a rank that may raise before the call does not make it; else it ends the job anyway.
    """
    ranks = allowed(site.function) if group is None else EVERY
    for condition in site.conditions:
        ranks &= _passing(condition, site.function, group)
    for way in site.exits:
        if raises or not isinstance(way.statement, ast.Raise):
            ranks -= leaving(way, site.function, group)
    return ranks


@lru_cache(maxsize=200_000)
def leaving(way: Exit, function: Function, group: str | None = None) -> Ranks:
    """Return the ranks that leave by an exit when all that is not known of its tests is so.

    Where all would leave the exit tells no ranks apart, and none is returned.
    """
    ranks = EVERY
    for condition in way.conditions:
        ranks &= _passing(condition, function, group)
    return frozenset() if ranks == EVERY else ranks


def allowed(function: Function) -> Ranks:
    """Return the ranks on which the decorators of a function run it."""
    ranks = EVERY
    for decorator in function.decorators:
        text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if _DECORATOR.search(text):
            ranks &= {RANKS[0]}
        elif _LOCAL_DECORATOR.search(text):
            ranks &= {0, 2}
    return ranks


def deciding_test(site: Site, group: str | None = None) -> ast.expr | None:
    """Return the first test that keeps some ranks from the call, None if a decorator does."""
    way = deciding_exit(site, group)
    conditions = way.conditions if way is not None else site.conditions
    tests = [c.test for c in conditions if _passing(c, site.function, group) != EVERY]
    return tests[0] if tests else None


def deciding_exit(site: Site, group: str | None = None) -> Exit | None:
    """Return the exit that keeps ranks from the call, if no test around the call does."""
    if any(_passing(c, site.function, group) != EVERY for c in site.conditions):
        return None
    ways = [way for way in site.exits if leaving(way, site.function, group)]
    return min(ways, key=lambda way: isinstance(way.statement, ast.Raise), default=None)


def is_certain(way: Exit, site: Site, group: str | None = None) -> bool:
    """Say whether a rank that took the exit would surely have come to the call otherwise.

    A rank that raises ends the job, and tests of the exit and of the call that say nothing about
    the ranks may never hold together.
    """
    if isinstance(way.statement, ast.Raise):
        return False
    function = site.function
    tells_nothing = [
        {RankView(rank, function, group).truth(condition.test) for rank in RANKS} == {None}
        for condition in (*way.conditions, *site.conditions)
    ]
    num_of_exit = sum(tells_nothing[: len(way.conditions)])
    return num_of_exit == 0 or num_of_exit == sum(tells_nothing)


@lru_cache(maxsize=200_000)
def _passing(condition: Condition, function: Function, group: str | None) -> Ranks:
    views = (RankView(rank, function, group) for rank in RANKS)
    return frozenset(
        view.rank for view in views if view.truth(condition.test) in (None, condition.answer)
    )
