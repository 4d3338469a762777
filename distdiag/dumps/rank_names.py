"""Whose dump a file is, as far as the names of all files of a set tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

_RANK: Final = re.compile(r"([a-z]*)[-_. ]?rank[-_.=]?(\d{1,6})(?!\d)")
# Ranks within something smaller than the job.
_PARTIAL: Final = frozenset(
    """
    cp ddp dp ep fsdp group host inter intra machine mp node pp replicate role shard sp tp
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
_TORCHRUN: Final = re.compile(r"(?:(.*)/)?attempt_\d{1,6}/(\d{1,6})/[^/]+")
_NUMBER: Final = re.compile(r"\d{1,18}")
# Numbers after these words count something else than ranks.
_OTHER_COUNTS: Final = re.compile(
    r"(?:node|host|machine|attempt|restart|try|epoch|step|iter|iteration|run|job|version|part"
    r"|gpu|cuda|device|core|cpu|pid|port|time|v)[-_. ]?$"
)


class NamedRank(NamedTuple):
    """What the name of a file says.

    `local_rank` is a rank within one node; all files below `root` are of one node. `is_said` means
    that the name holds the word; otherwise the numbers of a whole family of files count the ranks.
    """

    rank: int | None = None
    local_rank: int | None = None
    root: str = ""
    is_said: bool = False


def ranks_from_names(paths: Collection[str]) -> dict[str, NamedRank]:
    """Return what the names say; paths whose names say nothing are left out.

    Understood are ``rank3``, ``rank-3``, ``nccl_trace_rank_3`` anywhere in a path, torchrun's
    ``attempt_0/3/stderr.log``, and families whose only varying number counts from 0, without gaps
    of more than half: ``3.log``, ``dump_3.json``, ``trace_3``, ``job-worker-3.txt``.
    """
    said = {path: said for path in paths if (said := _said(path)) is not None}
    counted = _counted([path for path in paths if path not in said])
    return counted | said


def _said(path: str) -> NamedRank | None:
    parts = path.replace("!", "/").split("/")
    for place in range(len(parts) - 1, -1, -1):
        words = _RANK.findall(parts[place].lower())
        ranks = {int(number) for word, number in words if word not in _PARTIAL | {"local"}}
        if len(ranks) == 1:
            return NamedRank(rank=ranks.pop(), is_said=True)
        if len(ranks) > 1:
            return None
        local_ranks = {int(number) for word, number in words if word == "local"}
        if len(local_ranks) == 1:
            root = "/".join(parts[:place])
            return NamedRank(local_rank=local_ranks.pop(), root=root, is_said=True)
    if match := _TORCHRUN.fullmatch("/".join(parts)):
        return NamedRank(local_rank=int(match[2]), root=match[1] or "", is_said=True)
    return None


def _counted(paths: Collection[str]) -> dict[str, NamedRank]:
    families: dict[str, list[str]] = {}
    for path in paths:
        families.setdefault(_NUMBER.sub("#", path), []).append(path)
    return {
        path: NamedRank(rank=rank)
        for family in families.values()
        if len(family) > 1
        for path, rank in zip(family, _count(family), strict=False)
    }


def _count(family: list[str]) -> tuple[int, ...]:
    """Return the rank of each path of a family, or nothing where no number or several could be."""
    candidates = set(_candidates(family))
    return candidates.pop() if len(candidates) == 1 else ()


def _candidates(family: list[str]) -> Iterator[tuple[int, ...]]:
    numbers = [list(_NUMBER.finditer(path)) for path in family]
    for column in zip(*numbers, strict=True):
        first = column[0]
        if _OTHER_COUNTS.search(first.string[: first.start()].lower()):
            continue
        values = tuple(int(match[0]) for match in column)
        if len(set(values)) == len(values) and min(values) == 0 and max(values) < 2 * len(values):
            yield values
