"""What the checks share that judge accesses to files which nothing orders."""

import ast
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import combinations, pairwise
from typing import ClassVar, Final

from distdiag.checks.base import Check
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective
from distdiag.events.files import FileAction, FileContent
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_phrase, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.findings.source import Guard, nodes_around, rank_guards
from distdiag.views.files import Access, Conflict, Race

# Whether the code around an access copes with a file that is not there, or not any more.

_ABSENCE: Final = {"FileNotFoundError", "OSError", "IOError", "EnvironmentError"}
_ANYTHING: Final = {"Exception", "BaseException"}
_FORGIVING: Final = {"ignore_errors", "missing_ok"}
_NEAR: Final = 2
"""Down to this user frame, a handler of all exceptions is meant for the access."""


def tolerates_absence(site: CallSite) -> bool:
    """Say whether the access made here goes on when the file is missing."""
    near = _near(site)
    return any(_is_forgiving(f) or _handles(f, _ABSENCE | _ANYTHING) for f in near) or any(
        _handles(frame, _ABSENCE) for frame in site.user_frames[_NEAR:]
    )


def tolerates_damage(site: CallSite) -> bool:
    """Say whether the access made here goes on whatever is wrong with the file."""
    return any(_handles(frame, _ANYTHING) for frame in _near(site))


def _near(site: CallSite) -> tuple[Frame, ...]:
    """Return the innermost frames, those of libraries too, to the second one of the user.

    What calls the outermost one of the user, such as pytest, catches all there is to report it.
    """
    own = [number for number, frame in enumerate(site.frames) if frame.user][:_NEAR]
    return site.frames[: own[-1] + 1] if own else site.frames


def _is_forgiving(frame: Frame) -> bool:
    return any(
        keyword.arg in _FORGIVING
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for node in nodes_around(frame)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def _handles(frame: Frame, names: set[str]) -> bool:
    around = nodes_around(frame)
    return any(
        _suppresses(node, names) or _catches(node, child, names) for node, child in pairwise(around)
    )


def _suppresses(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(
        _name(call.func) == "suppress" and any(_name(kind) in names for kind in call.args)
        for call in calls
    )


def _catches(node: ast.AST, child: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Try) or child not in node.body:
        return False
    return any(
        _is_of(handler.type, names) and not _raises(handler.body) for handler in node.handlers
    )


def _is_of(kind: ast.expr | None, names: set[str]) -> bool:
    if kind is None:
        return "Exception" in names
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(_name(each) in names for each in kinds)


def _raises(body: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise) for statement in body for node in ast.walk(statement))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


# What an unordered pair of file accesses amounts to, and how it reads in a sentence.
MOST_FRAMES: Final = 6

_AT_ONCE: Final = frozenset({FileAction.RENAME, FileAction.LINK, FileAction.MAKE_DIR})

_VERBS: Final = {
    FileAction.READ: "reads",
    FileAction.WRITE: "writes",
    FileAction.APPEND: "appends to",
    FileAction.RENAME: "renames",
    FileAction.LINK: "links",
    FileAction.REMOVE: "removes",
    FileAction.REMOVE_TREE: "removes the tree",
    FileAction.MAKE_DIR: "creates the folder",
    FileAction.LIST: "lists",
    FileAction.CONNECT: "connects to",
}


class RaceKind(StrEnum):
    """What a race amounts to; each has a check of its own, but the first."""

    HARMLESS = "harmless"
    UNWAITED = "an asynchronous collective taken for a barrier"
    GUARD_BEFORE_INIT = "a rank guard before there are ranks"
    UNORDERED = "a file that is read while it is written"
    WRITERS = "a file with several writers"
    REMOVED = "a file that is removed while it is used"
    LISTED = "a folder that is listed while it changes"


_KINDS: Final = {
    Conflict.READ_OF_WRITE: RaceKind.UNORDERED,
    Conflict.TWO_WRITES: RaceKind.WRITERS,
    Conflict.USE_OF_REMOVED: RaceKind.REMOVED,
    Conflict.LIST_OF_CHANGED: RaceKind.LISTED,
}


def kind_of(race: Race) -> RaceKind:
    """Return which check judges this race."""
    if _is_harmless(race):
        return RaceKind.HARMLESS
    if bypassed(race) is not None:
        return RaceKind.UNWAITED
    if common_guard(race) is not None and all(a.is_before_init for a in race.changes.values()):
        return RaceKind.GUARD_BEFORE_INIT
    return _KINDS[race.conflict]


def bypassed(race: Race) -> Collective | None:
    """Return the asynchronous collective that would have ordered them, had it been waited for."""
    for access in race.uses.values():
        for call in access.unwaited:
            changes = [a for rank, a in race.changes.items() if rank in call.group.ranks]
            if not all(_had_made(change, call) for change in changes):
                return call
    return None


def _had_made(access: Access, call: Collective) -> bool:
    """Whether a rank had made its part of a collective when it accessed the file."""
    return any(
        isinstance(point, Collective)
        and point.group.name == call.group.name
        and point.collective_seq_id >= call.collective_seq_id
        for point in (*access.unwaited, access.last_sync)
    )


def common_guard(race: Race) -> Guard | None:
    """Return the condition on the rank that lets several ranks through to the same change."""
    if len(race.changes) < 2:
        return None
    by_rank = [
        {guard for frame in access.event.site.user_frames for guard in rank_guards(frame)}
        for access in race.changes.values()
    ]
    return min(set.intersection(*by_rank), key=lambda guard: str(guard.location), default=None)


def is_idempotent(race: Race) -> bool:
    """Say whether all who write the file write the same into it."""
    if race.conflict is not Conflict.TWO_WRITES:
        return False
    accesses = list(race.changes.values())
    if all(access.event.action is FileAction.RENAME for access in accesses):
        moved = {access.event.moved for access in accesses}
        return len(moved) == 1 and None not in moved
    contents = [access.closed.content if access.closed else None for access in accesses]
    return all(
        one is not None and other is not None and _agree(one, other)
        for one, other in combinations(contents, 2)
    )


def _agree(one: FileContent, other: FileContent) -> bool:
    # One may have been read while the other was being written: then it is the beginning of it.
    if one.size == other.size:
        return one.blocks == other.blocks
    shorter, longer = sorted((one, other), key=lambda content: content.size)
    full = shorter.size // 4096
    return shorter.blocks[:full] == longer.blocks[:full]


def _is_harmless(race: Race) -> bool:
    changes, uses = race.changes.values(), race.uses.values()
    match race.conflict:
        case Conflict.READ_OF_WRITE if all(a.event.action in _AT_ONCE for a in changes):
            is_tolerated = all(tolerates_absence(a.event.site) for a in uses)
        case Conflict.READ_OF_WRITE:
            is_tolerated = all(tolerates_damage(a.event.site) for a in uses)
        case Conflict.USE_OF_REMOVED:
            is_tolerated = all(tolerates_absence(a.event.site) for a in uses)
        case Conflict.LIST_OF_CHANGED:
            is_tolerated = not any(access.is_followed for access in uses)
        case Conflict.TWO_WRITES:
            is_tolerated = False
    return is_tolerated and not race.raised


def location_of_access(access: Access) -> Location | None:
    """Return the user's line that made the access."""
    return user_location(access.event.site.frames)


def first_of(accesses: Mapping[int, Access]) -> Access:
    """Return the access of the lowest rank."""
    return accesses[min(accesses)]


def phrase(accesses: Mapping[int, Access]) -> str:
    """Return ``rank 0 writes cache.pt at prepare.py:12``."""
    access = first_of(accesses)
    verb = _VERBS[access.event.action]
    ranks = RankSet(accesses)
    verb = verb if len(ranks) == 1 else _plural(verb)
    name = access.event.written
    if access.event.action is FileAction.RENAME and access.event.origin:
        name = f"{access.event.origin} to {name}"
    return f"{ranks.phrase()} {verb} {name}{at(location_of_access(access))}"


def _plural(verb: str) -> str:
    head, _, rest = verb.partition(" ")
    return f"{head.removesuffix('s')} {rest}".strip()


def subjects_of(race: Race) -> tuple[str, ...]:
    """Return the names of the files, as the program has them and resolved."""
    written = [access.event.written for access in (*race.changes.values(), *race.uses.values())]
    return tuple(dict.fromkeys([*race.paths, *written]))


def evidence_of(race: Race) -> tuple[Evidence, ...]:
    """Return both sides with their stacks, what has ordered them last, and what became of it."""
    sides = [race.changes] if race.conflict is Conflict.TWO_WRITES else [race.changes, race.uses]
    return (
        *(line for side in sides for line in _side(side)),
        _last_common(race),
        *(
            Evidence(ranks=RankSet([rank]), summary=f"raised {raised.type}: {raised.message}"[:300])
            for rank, raised in race.raised.items()
        ),
    )


def _side(accesses: Mapping[int, Access]) -> Iterator[Evidence]:
    by_place: dict[str, dict[int, Access]] = {}
    for rank, access in accesses.items():
        by_place.setdefault(_stack(access), {})[rank] = access
    for stack, same in by_place.items():
        access = first_of(same)
        yield Evidence(
            ranks=RankSet(same),
            summary=f"{_VERBS[access.event.action]} {access.event.written} by {access.event.api}",
            location=location_of_access(access),
            values={"stack": stack, "path": access.event.path, "step": access.event.step},
        )


def _stack(access: Access) -> str:
    frames = access.event.site.user_frames[:MOST_FRAMES]
    return " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in frames)


def _last_common(race: Race) -> Evidence:
    point = race.common_sync
    if point is None:
        summary = "no synchronisation before that makes one of them wait for the other"
        return Evidence(ranks=race.ranks, summary=summary)
    name = call_phrase(point) if isinstance(point, Collective) else point.api
    return Evidence(
        ranks=race.ranks,
        summary=f"the last synchronisation before that is {name}",
        location=user_location(point.site.frames),
    )


def barrier_advice(race: Race) -> str:
    """Return where a barrier belongs, and who must reach it."""
    change, use = first_of(race.changes), first_of(race.uses)
    guards = [guard for f in change.event.site.user_frames for guard in rank_guards(f)]
    where = location_of_access(change)
    after = f"the line at {where}" if where is not None else "the write"
    if guards:
        after = f"the block under `{guards[-1].text}` at {guards[-1].location}"
    before = location_of_access(use)
    return (
        f"Let {race.ranks.phrase()} call a barrier after {after} and before "
        f"{before if before is not None else 'the other access'}, outside of any condition on the "
        "rank; or let one rank do the work and broadcast the result."
    )


class FileRace(Check[Race]):
    """A check of one kind of race: `culprits` are the accesses to blame, `describe` the message."""

    kind: ClassVar[RaceKind]

    def check(self, race: Race) -> Iterator[Finding]:
        """Judge accesses that nothing orders."""
        if kind_of(race) is not self.kind:
            return
        culprits = self.culprits(race)
        access = first_of(culprits)
        has_struck = bool(race.raised) or race.has_struck
        yield self.finding(
            self.describe(race),
            ranks=RankSet(culprits),
            step=access.event.step,
            location=location_of_access(access),
            subjects=subjects_of(race),
            severity=Severity.ERROR if has_struck else Severity.WARNING,
            grade=Grade.PROVEN if has_struck else Grade.LIKELY,
            confidence=0.95 if has_struck else 0.85,
            evidence=evidence_of(race),
            fix=self.advise(race),
        )

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return the accesses that go ahead without having waited."""
        return race.uses

    def describe(self, race: Race) -> str:
        """Return the message of the finding."""
        raise NotImplementedError

    def advise(self, race: Race) -> str:
        """Return what to change: what the page says, unless the lines are known."""
        return self.fix


def unordered(first: Mapping[int, Access], second: Mapping[int, Access], race: Race) -> str:
    """Return ``rank 1 reads …, rank 0 writes …, and nothing orders the two``."""
    return f"{phrase(first)}, {phrase(second)}{several(race)}, and nothing orders the two"


def several(race: Race) -> str:
    """Return `` and 4 more files``, or nothing."""
    num_more = len(race.paths) - 1
    return f" (and {num_more} more file{'s' * (num_more > 1)})" if num_more else ""


def name_of(race: Race) -> str:
    """Return the file as the program calls it."""
    return first_of(race.changes).event.written
