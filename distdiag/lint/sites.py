"""The calls of a function in order, each with what decides whether it is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from distdiag.lint.modules import Function, children

_ENDING_CALLS: Final = frozenset({"exit", "sys.exit", "os._exit", "quit"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Condition:
    """A test, and the answer that leads on."""

    test: ast.expr
    answer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Exit:
    """A return, raise, continue, break or end of the process, and the tests that lead there."""

    statement: ast.stmt
    conditions: tuple[Condition, ...]

    @property
    def tests(self) -> Iterator[ast.expr]:
        """The tests that lead there: a site under one of them stands in a branch of the exit's."""
        return (condition.test for condition in self.conditions)

    @property
    def leaves_loop_only(self) -> bool:
        """Whether the code behind the loop is still reached."""
        return isinstance(self.statement, ast.Break | ast.Continue)


@dataclass(frozen=True, slots=True)
class Site:
    """A call and what decides whether it is made.

    `conditions` are the tests around it, outermost first; `exits` are the ways by which the
    function may leave before it. `order` counts the calls of the function as they are made.
    """

    call: ast.Call
    function: Function
    statement: ast.stmt
    order: int
    conditions: tuple[Condition, ...] = ()
    exits: tuple[Exit, ...] = ()
    loops: tuple[ast.stmt, ...] = ()
    is_in_handler: bool = False
    is_tried: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    statement: ast.stmt
    conditions: tuple[Condition, ...] = ()
    exits: tuple[Exit, ...] = ()
    loops: tuple[ast.stmt, ...] = ()
    is_in_handler: bool = False
    is_tried: bool = False

    def at(self, statement: ast.stmt, further_exits: tuple[Exit, ...]) -> _Place:
        return _Place(
            statement,
            self.conditions,
            self.exits + further_exits if further_exits else self.exits,
            self.loops,
            self.is_in_handler,
            self.is_tried,
        )

    def under(self, test: ast.expr, answer: bool) -> _Place:
        return replace(self, conditions=(*self.conditions, Condition(test, answer)))


def sites_of(function: Function) -> tuple[Site, ...]:
    """Return the calls of a function in order, without those of functions that it defines."""
    return tuple(_walk(function).sites)


def sites_of_definitions(function: Function) -> tuple[Site, ...]:
    """Return the calls of functions that a function defines, as if they were made right there.

    There are none for the code of a module.
    """
    return tuple(_walk(function).inner_sites)


@lru_cache(maxsize=100_000)
def _walk(function: Function) -> _Walk:
    walk = _Walk(function)
    if function.node.body:
        walk.block(function.node.body, _Place(function.node.body[0]))
    return walk


class _Walk:
    def __init__(self, function: Function) -> None:
        self._function = function
        self.sites: list[Site] = []
        self.inner_sites: list[Site] = []

    def block(self, statements: Sequence[ast.stmt], place: _Place) -> tuple[Exit, ...]:
        """Walk through statements and return the exits that what follows them must survive."""
        exits: tuple[Exit, ...] = ()
        for statement in statements:
            here = place.at(statement, exits)
            exits += self._statement(statement, here)
        return exits

    def _statement(self, node: ast.stmt, place: _Place) -> tuple[Exit, ...]:
        match node:
            case ast.If():
                return self._if(node, place)
            case ast.While() | ast.For() | ast.AsyncFor():
                return self._loop(node, place)
            case ast.Try() | ast.TryStar():
                return self._try(node, place)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, place)
                return self.block(node.body, place)
            case ast.Match():
                self._expression(node.subject, place)
                for case in node.cases:
                    self.block(case.body, place)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if self._function.outer is not None:
                inner = _Walk(self._function)
                inner.block(node.body, place)
                self.inner_sites += inner.sites + inner.inner_sites
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _:
                self._expression(node, place)
        return ()

    def _if(self, node: ast.If, place: _Place) -> tuple[Exit, ...]:
        self._expression(node.test, place)
        ways: list[tuple[Exit, ...]] = []
        for answer, block in ((True, node.body), (False, node.orelse)):
            inner = self.block(block, place.under(node.test, answer))
            last = _leaving(block)
            ways.append((Exit(last, ()),) if last is not None else inner)
        if _leaving(node.body) is not None and _leaving(node.orelse) is not None:
            return ()
        return tuple(
            replace(way, conditions=(Condition(node.test, answer), *way.conditions))
            for answer, found in zip((True, False), ways, strict=True)
            for way in found
        )

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor, place: _Place) -> tuple[Exit, ...]:
        inside = replace(place, loops=(*place.loops, node))
        if isinstance(node, ast.While):
            self._expression(node.test, inside)
            inside = inside.under(node.test, True)
        else:
            self._expression(node.iter, place)
        first = len(self.sites)
        exits = self.block(node.body, inside)
        ending = tuple(e for e in exits if not isinstance(e.statement, ast.Continue))
        for index in range(first, len(self.sites)):
            # In the next round, what stands before the exit is behind it.
            site = self.sites[index]
            known = {*site.exits}
            around = {condition.test for condition in site.conditions}
            later = tuple(e for e in ending if e not in known and around.isdisjoint(e.tests))
            self.sites[index] = replace(site, exits=site.exits + later)
        self.block(node.orelse, place)
        return tuple(e for e in exits if not e.leaves_loop_only)

    def _try(self, node: ast.Try | ast.TryStar, place: _Place) -> tuple[Exit, ...]:
        exits = self.block(
            node.body, replace(place, is_tried=place.is_tried or bool(node.handlers))
        )
        behind = replace(place, exits=place.exits + exits)
        for handler in node.handlers:
            self.block(handler.body, replace(place, is_in_handler=True))
        exits += self.block(node.orelse, behind)
        self.block(node.finalbody, place)
        return exits

    def _expression(self, node: ast.AST, place: _Place) -> None:
        match node:
            case ast.BoolOp(op=op, values=values):
                for value in values:
                    self._expression(value, place)
                    place = place.under(value, isinstance(op, ast.And))
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._expression(test, place)
                self._expression(body, place.under(test, True))
                self._expression(orelse, place.under(test, False))
                return
            case _ if isinstance(node, _SCOPES):
                return
            case _:
                pass
        for child in children(node):
            self._expression(child, place)
        if isinstance(node, ast.Call):
            self._add(node, place)

    def _add(self, call: ast.Call, place: _Place) -> None:
        self.sites.append(
            Site(
                call,
                self._function,
                place.statement,
                len(self.sites),
                place.conditions,
                place.exits,
                place.loops,
                place.is_in_handler,
                place.is_tried,
            )
        )


def _leaving(block: Sequence[ast.stmt]) -> ast.stmt | None:
    if not block:
        return None
    last = block[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return last
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return last if ast.unparse(last.value.func) in _ENDING_CALLS else None
    if isinstance(last, ast.If):
        ways = _leaving(last.body), _leaving(last.orelse)
        return last if None not in ways else None
    return None
