"""Which ranks the process groups of recordings have, also where a dump does not say it.

NCCL writes the ranks of a group when it is first used. Gloo writes none: the group has no name yet
when it is made, and later its list is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from distdiag.dumps.recordings.recording import RecordedGroup, Recording
from distdiag.event import ProcessGroup

MOST_RANKS: Final = 1 << 20

_Key = tuple[str, str, str]
_NUMBER: Final = re.compile(r"\d{1,7}")


def resolve_groups(recordings: Mapping[int, Recording]) -> Mapping[int, tuple[ProcessGroup, ...]]:
    """Return for each rank its groups, at the places of `Recording.groups`.

    A group whose ranks nobody wrote down has all ranks if it is the default group, and else those
    that used it.
    """
    known: dict[_Key, list[tuple[int, ...]]] = {}
    users: dict[_Key, list[int]] = {}
    for rank, recording in sorted(recordings.items()):
        for group in recording.groups:
            users.setdefault(group.key, []).append(rank)
            ranks = _ranks_of(group.ranks)
            if rank in ranks and ranks not in known.setdefault(group.key, []):
                known[group.key].append(ranks)
    largest = max((r for lists in known.values() for ranks in lists for r in ranks), default=0)
    world = tuple(range(max(largest, *recordings, 0) + 1))
    share_names = len({key[2] for key in users}) > 1
    made: dict[tuple[_Key, tuple[int, ...]], ProcessGroup] = {}

    def resolved(rank: int) -> Iterator[ProcessGroup]:
        for group in recordings[rank].groups:
            listed = next((ranks for ranks in known.get(group.key, ()) if rank in ranks), None)
            ranks = listed or (world if _is_default(group) else tuple(users[group.key]))
            name = f"{group.name}/{group.backend}" if share_names else group.name
            fresh = ProcessGroup(name, group.desc, ranks, group.backend)
            yield made.setdefault((group.key, ranks), fresh)

    return {rank: tuple(resolved(rank)) for rank in recordings}


def _is_default(group: RecordedGroup) -> bool:
    return group.desc == "default_pg" or (group.name == "0" and group.desc in ("", "undefined"))


@lru_cache(maxsize=4096)
def _ranks_of(text: str) -> tuple[int, ...]:
    """Read ``[0, 1, 2]``; nothing comes of a list that makes no sense."""
    ranks = tuple(int(number) for number in _NUMBER.findall(text))
    return ranks if ranks and max(ranks) < MOST_RANKS and len(set(ranks)) == len(ranks) else ()
