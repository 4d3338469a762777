"""What a line of user code stands in: its text, the conditions before it, the loops around it."""

import ast
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final

from distdiag.events.base import Frame
from distdiag.findings.finding import Location

# A script is never this long; a generated or hostile file must not cost seconds or memory.
_MAX_BYTES = 2_000_000

# Terms that tell one rank from another. A name counts by its parts: `dp_rank`, `rank_zero_first`.
_RANK_TERM = re.compile(
    r"(^|_)(rank|rank0|ranks)(_|$)|process_index|main_process|is_master|master_process|is_main$|process_zero"
    r"|global_zero|should_save|is_chief|is_coordinator|is_leader|is_primary|first_stage|last_stage"
    r"|stage_(id|index|idx|num)|get_coordinate|(^|_)coord(s|inates?)?$|is_writer|procid|localid",
    re.IGNORECASE,
)
# The rank of a matrix or an adapter, which is no rank of the job.
_OTHER_RANK = re.compile(r"lora|low_rank|matrix_rank|adapter|max_rank|rank_(ratio|dim|decay)")
_DECORATOR = re.compile(r"rank_?(zero|0)|main_process|on_(local_)?process|master|only_on")

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that decides whether a call is reached. `by_rank`: it tells ranks apart."""

    location: Location
    text: str
    by_rank: bool = True


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop around a line, and how it may end.

    `test` is the condition of a `while` that is not always true, ``""`` for other loops. `exit` is
    the condition of the first `if` in the loop under which it is left, None if there is none.
    `caught` is an `except` in the loop, around the line, that leaves the loop. `under` are the
    conditions in the loop under which the line is reached, `handlers` the `except` clauses in it
    from which the loop goes on without having reached it.
    """

    location: Location
    test: str = ""
    exit: Guard | None = None
    caught: Guard | None = None
    under: tuple[Guard, ...] = ()
    handlers: tuple[Location, ...] = ()

    @property
    def is_decided(self) -> bool:
        """Whether a condition ends it, and not the number of its items."""
        return bool(self.test) or self.exit is not None or self.caught is not None

    @property
    def deciding(self) -> Location:
        """The line that decides how often the line in it is reached, as far as one can tell."""
        if self.under:
            return self.under[-1].location
        if self.exit is not None:
            return self.exit.location
        return self.caught.location if self.caught is not None and not self.test else self.location


@dataclass(frozen=True, slots=True)
class _Source:
    lines: tuple[str, ...] = ()
    tree: ast.Module | None = None


def location_of(frame: Frame) -> Location:
    """Return the frame's place with the text of its line, as far as that can be read."""
    return _location(_read(frame.file), frame, frame.line)


def lines_around(location: Location, most: int) -> list[tuple[int, str]]:
    """Return the line of a place with up to so many before and after it, by their numbers.

    Empty if the file cannot be read, or has changed since: the line is not what it was then.
    """
    lines = _read(location.file).lines
    if not 1 <= location.line <= len(lines) or not location.source:
        return []
    if lines[location.line - 1].strip() != location.source.strip():
        return []
    first = max(1, location.line - most)
    shown = lines[first - 1 : location.line + most]
    filled = [line for line in shown if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in filled)
    return [(first + at, line.rstrip()[indent:]) for at, line in enumerate(shown)]


def is_readable(frame: Frame) -> bool:
    """Say whether the conditions and loops around this frame can be known at all."""
    return _read(frame.file).tree is not None


def module_of(frame: Frame) -> ast.Module | None:
    """Return the whole of the file that the frame is in."""
    return _read(frame.file).tree


def nodes_around(frame: Frame) -> tuple[ast.AST, ...]:
    """Return the nodes around the frame's line, from its function (or module) to the innermost."""
    return tuple(_chain(_read(frame.file), frame.line))


def statement_lines(location: Location) -> tuple[str, ...]:
    """Return the lines of the innermost statement that a place is in; of a compound one its head.

    Where the file cannot be read, or has changed since, they are the line of the place itself.
    """
    source = _read(location.file)
    lines = source.lines
    here = lines[location.line - 1] if 0 < location.line <= len(lines) else ""
    statements = [node for node in _chain(source, location.line) if isinstance(node, ast.stmt)]
    if here.strip() != location.source or not statements:
        return (location.source,)
    innermost = statements[-1]
    body = getattr(innermost, "body", None)
    last = body[0].lineno - 1 if body else innermost.end_lineno or innermost.lineno
    return lines[innermost.lineno - 1 : max(last, location.line)]


def rank_guards(frame: Frame) -> tuple[Guard, ...]:
    """Return the conditions on the rank that the frame's line stands under, outermost first."""
    return tuple(guard for guard in guards(frame) if guard.by_rank)


@lru_cache(maxsize=512)
def guards(frame: Frame) -> tuple[Guard, ...]:
    """Return every condition that the frame's line stands under in its function, outermost first.

    An earlier ``if …: return`` (or continue, break, raise) counts too: the line is behind it.
    """
    source = _read(frame.file)
    chain = _chain(source, frame.line)
    if not chain:
        return ()
    names = _rank_names(source, chain[0])
    found: list[Guard] = []
    for node, child in zip(chain, [*chain[1:], None], strict=True):
        for test in _tests_before(node, child, frame.line):
            by_rank = _is_decorator_of(node, test) or _depends_on_rank(test, names)
            where = _location(source, frame, test.lineno)
            found.append(Guard(where, where.source or ast.unparse(test), by_rank))
    return tuple(dict.fromkeys(found))


_ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def record_guards(frames: Sequence[Frame]) -> Iterator[Guard]:
    """Yield conditions above a call that ask whether a value is the best one so far.

    `frames` are those of the call, innermost first. Such a condition compares a value with another
    one, which the same function replaces by it. It may have a name of its own, and be handed down
    by that name.
    """
    names: set[str] = set()
    for frame in frames:
        source = _read(frame.file)
        chain = _chain(source, frame.line)
        if not chain:
            continue
        tests = [
            t for n, c in pairwise([*chain, None]) if n for t in _tests_before(n, c, frame.line)
        ]
        names |= {
            node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)
        }
        assigned = [node for node in ast.walk(chain[0]) if isinstance(node, ast.Assign)]
        tests += [node.value for node in assigned if {ast.unparse(t) for t in node.targets} & names]
        for test in tests:
            if any(_asks_for_record(each, chain[0], assigned) for each in ast.walk(test)):
                where = _location(source, frame, test.lineno)
                yield Guard(where, where.source or ast.unparse(test), by_rank=False)


def _asks_for_record(test: ast.AST, function: ast.AST, assigned: Sequence[ast.Assign]) -> bool:
    match test:
        case ast.Compare(left=left, ops=[order], comparators=[right]) if isinstance(order, _ORDERS):
            pairs = [(left, right), (right, left)]
        case _:
            return False
    texts = [(ast.unparse(value), ast.unparse(best)) for value, best in pairs]
    counters = {
        ast.unparse(node.target)
        for node in ast.walk(function)
        if isinstance(node, ast.For | ast.AugAssign)
    }
    return any(
        best in {ast.unparse(target) for target in node.targets}
        and value not in counters
        and value in _kept(node.value)
        for value, best in texts
        for node in assigned
    )


def _kept(value: ast.expr) -> set[str]:
    """Return what a value may be, as text: itself, or what the greater or smaller of is taken."""
    match value:
        case ast.Call(func=ast.Name(id="min" | "max"), args=args):
            return {ast.unparse(each) for each in args}
        case ast.Call(func=ast.Name(id="float"), args=[inner]):
            return {ast.unparse(value), ast.unparse(inner)}
        case _:
            return {ast.unparse(value)}


@lru_cache(maxsize=512)
def loop_lines(frame: Frame, *, with_head: bool = False) -> frozenset[tuple[str, int]]:
    """Return the file and first line of every loop that holds the frame's line in its function.

    `with_head`: also where the line is the loop's first, which fetches the next item.
    """
    chain = _chain(_read(frame.file), frame.line)
    return frozenset(
        (frame.file, node.lineno)
        for node in chain
        if isinstance(node, _LOOPS) and (with_head or _is_inside_loop(node, frame.line))
    )


def loops_around(frame: Frame, outside: frozenset[tuple[str, int]]) -> Iterator[Loop]:
    """Yield the loops that hold the frame's line, the innermost first, but for those `outside`."""
    source = _read(frame.file)
    around = loop_lines(frame) - outside
    for node in reversed(_chain(source, frame.line)):
        if not isinstance(node, _LOOPS) or (frame.file, node.lineno) not in around:
            continue
        last = node.end_lineno or node.lineno
        test = node.test if isinstance(node, ast.While) else None
        under = tuple(
            guard
            for guard in guards(frame)
            if node.lineno < guard.location.line <= last and not _is_left_under(node, guard)
        )
        yield Loop(
            _location(source, frame, node.lineno),
            test="" if test is None or isinstance(test, ast.Constant) else ast.unparse(test),
            exit=next((_guard(source, frame, each) for each in _exits(node)), None),
            caught=next(_caught(source, frame, node), None),
            under=under,
            handlers=tuple(
                _location(source, frame, each.lineno) for each in _handlers_past(node, frame.line)
            ),
        )


def _handlers_past(loop: ast.AST, line: int) -> Iterator[ast.ExceptHandler]:
    """Yield each `except` in a loop's own body after which the loop goes on past a line.

    The line is in its `try`, or behind that, and the clause goes on with the next pass.
    """
    for node in _own_body(loop):
        if not isinstance(node, ast.Try):
            continue
        is_in = any(_holds(each, line) for each in node.body)
        is_behind = line > (node.end_lineno or node.lineno)
        for handler in node.handlers:
            ends = handler.body[-1]
            is_kept = not isinstance(ends, ast.Raise | ast.Break | ast.Return)
            if (is_in and is_kept) or (is_behind and isinstance(ends, ast.Continue)):
                yield handler


def is_cleanup(inside: Frame, after: Frame) -> bool:
    """Say whether one line is in a `try`, and the other in its `finally` or an `except` of it."""
    if inside.file != after.file:
        return False
    source = _read(inside.file)
    tries = [node for node in _chain(source, inside.line) if isinstance(node, ast.Try)]
    return any(
        any(_holds(each, inside.line) for each in node.body)
        and any(_holds(each, after.line) for each in (*node.finalbody, *node.handlers))
        for node in tries
    )


def _exits(loop: ast.AST) -> Iterator[ast.If]:
    """Yield each `if` of a loop's own body under which the loop is left."""
    ends = (ast.Break, ast.Return)
    for node in _own_body(loop):
        if isinstance(node, ast.If) and node.body and isinstance(node.body[-1], ends):
            yield node


def _own_body(loop: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a loop, but for loops and functions in it."""
    pending = list(getattr(loop, "body", []))
    while pending:
        node = pending.pop(0)
        if not isinstance(node, (*_LOOPS, *_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield node
            pending[:0] = ast.iter_child_nodes(node)


def _caught(source: _Source, frame: Frame, loop: ast.AST) -> Iterator[Guard]:
    """Yield each `except` around the frame's line that leaves the loop, the innermost first."""
    chain = _chain(source, frame.line)
    for node in reversed(chain[chain.index(loop) + 1 :]):
        if isinstance(node, ast.Try) and any(_holds(each, frame.line) for each in node.body):
            for handler in node.handlers:
                if isinstance(handler.body[-1], (ast.Break, ast.Return)):
                    where = _location(source, frame, handler.lineno)
                    yield Guard(where, where.source or "except", by_rank=False)


def _is_left_under(loop: ast.AST, guard: Guard) -> bool:
    return any(each.test.lineno == guard.location.line for each in _exits(loop))


def _guard(source: _Source, frame: Frame, node: ast.If) -> Guard:
    return Guard(_location(source, frame, node.lineno), ast.unparse(node.test), by_rank=False)


def are_exclusive(first: Frame, second: Frame) -> bool:
    """Say whether two lines stand in the two branches of one condition: neither skips the other."""
    if first.file != second.file:
        return False
    source = _read(first.file)
    around = _chain(source, first.line), _chain(source, second.line)
    shared = [n for n in around[0] if isinstance(n, ast.If) and n in around[1] and n.orelse]
    if not shared:
        return False
    body = shared[-1].body
    last = body[-1].end_lineno or body[-1].lineno
    in_body = [body[0].lineno <= frame.line <= last for frame in (first, second)]
    return in_body[0] != in_body[1]


@contextmanager
def source_only_below(folders: Iterable[Path]) -> Iterator[None]:
    """Read no source meanwhile but what lies below these folders, links followed.

    A dump of a stranger may name any file of this machine; no line of it gets into a report.
    """
    before = _BELOW.set(tuple(sorted({os.path.realpath(folder) for folder in folders})))
    _forget_source()
    try:
        yield
    finally:
        _BELOW.reset(before)
        _forget_source()


_BELOW: Final[ContextVar[tuple[str, ...] | None]] = ContextVar("source_only_below", default=None)


def _forget_source() -> None:
    guards.cache_clear()
    loop_lines.cache_clear()
    _read_file.cache_clear()


def _read(path: str) -> _Source:
    return _read_file(path, _BELOW.get())


@lru_cache(maxsize=64)
def _read_file(path: str, below: tuple[str, ...] | None) -> _Source:
    # Only Python files, whoever names them.
    file = Path(path)
    try:
        if below is not None:
            file = Path(os.path.realpath(path))
            if not any(file.is_relative_to(folder) for folder in below):
                return _Source()
        if file.suffix != ".py" or not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return _Source()
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError):
        return _Source()
    lines = tuple(text.splitlines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's invalid escapes are not our subject
            return _Source(lines, ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Source(lines)


def _location(source: _Source, frame: Frame, line: int) -> Location:
    text = source.lines[line - 1].strip() if 0 < line <= len(source.lines) else ""
    return Location(file=frame.file, line=line, function=frame.function, source=text)


def _chain(source: _Source, line: int) -> list[ast.AST]:
    """Return the nodes around a line, from its function (or the module) to the innermost."""
    node: ast.AST | None = source.tree
    chain: list[ast.AST] = []
    while node is not None:
        chain = [node] if isinstance(node, _FUNCTIONS) else [*chain, node]
        node = _child_at(node, line)
    return chain


def _child_at(node: ast.AST, line: int) -> ast.AST | None:
    # Where several stand on one line, the last one is the body behind its condition.
    holding = [child for child in ast.iter_child_nodes(node) if _holds(child, line)]
    with_call = [child for child in holding if any(_calls(child, line))]
    return next(reversed(with_call or holding), None)


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        # Groups without a place of their own: the cases of a match, the parts of a comprehension.
        return any(_holds(child, line) for child in ast.iter_child_nodes(node))
    return bool(first <= line <= last)


def _calls(node: ast.AST, line: int) -> Iterator[ast.Call]:
    """Yield the calls on a line that may lead to a collective: all but those that ask the rank."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _holds(part, line) and not _is_term(part.func):
            yield part


def _tests_before(node: ast.AST, child: ast.AST | None, line: int) -> Iterator[ast.expr]:
    if isinstance(node, _FUNCTIONS):
        yield from (d for d in node.decorator_list if _DECORATOR.search(ast.unparse(d)))
    yield from _exits_before(node, child)
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if child is not test:
            if child is not None and (isinstance(node, ast.stmt) or _holds_all(node, child, line)):
                yield test
        case ast.BoolOp(values=values) if child in values and child is not values[0]:
            if _holds_all(node, child, line):
                yield from takewhile(lambda value: value is not child, values)
        case ast.Match(subject=subject) if child is not subject:
            yield subject
        case _:
            pass


def _holds_all(node: ast.AST, child: ast.AST | None, line: int) -> bool:
    # A frame has no column: where a line calls something outside the branch too, nothing is sure.
    inside = len(list(_calls(child, line))) if child is not None else 0
    return 0 < inside == len(list(_calls(node, line)))


def _exits_before(node: ast.AST, child: ast.AST | None) -> Iterator[ast.expr]:
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if not isinstance(block, list) or child not in block:
            continue
        for statement in block[: block.index(child)]:
            if isinstance(statement, ast.If) and _leaves(statement.body) != _leaves(
                statement.orelse
            ):
                yield statement.test


def _leaves(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)


def _is_inside_loop(loop: ast.AST, line: int) -> bool:
    if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
        return any(_holds(statement, line) for statement in loop.body)
    return True


def _is_decorator_of(node: ast.AST, test: ast.expr) -> bool:
    return isinstance(node, _FUNCTIONS) and test in node.decorator_list


def _rank_names(source: _Source, function: ast.AST) -> frozenset[str]:
    """Return the names that were given a value which only says which rank this is."""
    names: set[str] = set()
    for _ in range(2):  # a name may stand for a name that stands for the rank
        for target, value in _assignments(source, function):
            if _is_rank_value(value, frozenset(names)):
                names.add(ast.unparse(target))
    return frozenset(names)


def _assignments(source: _Source, function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value: those of the function and the module, and of attributes anywhere."""
    near = set(ast.walk(function)) | set(source.tree.body if source.tree else ())
    for node in ast.walk(source.tree or function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if node in near or isinstance(target, ast.Attribute):
                    yield target, node.value


def _is_rank_value(value: ast.expr, names: frozenset[str]) -> bool:
    match value:
        case ast.Name() | ast.Attribute():
            return _is_term(value) or ast.unparse(value) in names
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.BinOp():
            parts = [part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)]
            return any(_is_rank_value(part, names) for part in parts)
        case ast.Call(func=ast.Name(id="int" | "bool"), args=[inner]):
            return _is_rank_value(inner, names)
        case ast.Call(func=func):
            return _is_term(func) or (
                "environ" in ast.unparse(func) and _depends_on_rank(value, names)
            )
        case ast.Subscript():
            return _depends_on_rank(value, names)
        case _:
            return False


def _depends_on_rank(test: ast.expr, names: frozenset[str]) -> bool:
    for node in ast.walk(test):
        if isinstance(node, ast.Name | ast.Attribute) and (
            _is_term(node) or ast.unparse(node) in names
        ):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_variable = node.value.isupper()  # RANK, LOCAL_RANK and their like in os.environ
            if is_variable and _RANK_TERM.search(node.value):
                return True
    return False


def _is_term(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return bool(_RANK_TERM.search(name)) and not _OTHER_RANK.search(name)
