"""How the stacks of a job read at a terminal: the odd ranks first, and where their paths part."""

from collections.abc import Iterator
from typing import Final

from distdiag.events.base import Frame
from distdiag.findings.descriptions import user_location
from distdiag.live.job_dump import JobDump
from distdiag.record.visible import visible
from distdiag.reports.base import cut, phrase
from distdiag.views.stack_tree import MAIN, Parting, StackGroup, StackTree, parted

MOST_GROUPS: Final = 12
"""So many groups are shown one by one: the smallest ones, and the largest."""
MOST_PARTINGS: Final = 4
LONGEST_LINE: Final = 300


def job_text(dump: JobDump, *, all_threads: bool = False) -> str:
    """Return some lines about a job; those about other threads only with `all_threads`."""
    tree = dump.tree()
    lines = [_headline(dump, tree), *_missing(dump, tree)]
    lines += _groups(tree, MAIN)
    for parting in parted(tree)[:MOST_PARTINGS]:
        lines += _parting(parting)
    for name in sorted(tree.threads.keys() - {MAIN}) if all_threads else ():
        lines += [f"  threads {name}", *(f"  {line}" for line in _groups(tree, name))]
    return "".join(f"{cut(visible(line), LONGEST_LINE)}\n" for line in lines)


def _headline(dump: JobDump, tree: StackTree) -> str:
    where = dump.hosts[0] if len(dump.hosts) == 1 else f"{len(dump.hosts)} hosts"
    found = f"{len(dump.ranks)} of {_count(dump.world_size, 'rank')}"
    return f"job {dump.job} on {where}: {found}, {_count(len(tree.groups()), 'distinct stack')}"


def _missing(dump: JobDump, tree: StackTree) -> Iterator[str]:
    for reason, ranks in tree.unread.items():
        yield f"  {phrase(ranks)}: no stacks: {reason}"
    if dump.absent:
        yield f"  {phrase(dump.absent)}: no process was found where this command looked"
    if dump.repeated:
        yield f"  {phrase(dump.repeated)}: found more than once; one that could be read is shown"


def _groups(tree: StackTree, thread: str) -> Iterator[str]:
    largest_first = tree.groups(thread)
    groups = sorted(largest_first, key=lambda group: (len(group.ranks), min(group.ranks)))
    num_left_out = len(groups) - MOST_GROUPS
    for group in groups if num_left_out <= 0 else groups[: MOST_GROUPS - 1]:
        yield from _group(group)
    if num_left_out > 0:
        yield f"  and {_count(num_left_out, 'more group')} of ranks, none larger than the last:"
        yield from _group(groups[-1])


def _group(group: StackGroup) -> Iterator[str]:
    location = user_location(group.frames)
    innermost = group.frames[0] if group.frames else None
    if location is not None:
        yield f"  {phrase(group.ranks)}: {location} in {location.function}"
        if location.source:
            yield f"      {location.source}"
        if innermost is not None and not innermost.user:
            yield f"      now in {_place(innermost)}"
    elif innermost is not None:
        yield f"  {phrase(group.ranks)}: no line of the user's code; now in {_place(innermost)}"
    else:
        yield f"  {phrase(group.ranks)}: no Python frame"


def _parting(parting: Parting) -> Iterator[str]:
    if parting.common:
        yield f"  paths part below {_place(parting.common[0])}:"
    else:
        yield "  paths part at the outermost frame:"
    for branch in parting.branches[:MOST_GROUPS]:
        goes = _place(branch.frame) if branch.frame is not None else "goes no deeper"
        yield f"      {phrase(branch.ranks)}: {goes}"
    if len(parting.branches) > MOST_GROUPS:
        yield f"      and {_count(len(parting.branches) - MOST_GROUPS, 'smaller branch', 'es')}"


def _place(frame: Frame) -> str:
    return f"{frame.function} ({frame.file}:{frame.line})"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"
