"""Give every dump its rank: from its content, from what else is known of its node, from names."""

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from distdiag.dumps.ends import has_end, of_whole_job, settled
from distdiag.dumps.reading import RankDump

# Whose dump a file is, as far as the names of all files of a set tell.

_RANK: Final = re.compile(r"([a-z]*)[-_. ]?rank[-_.=]?(\d{1,6})(?!\d)")
# Ranks within something smaller than the job.
_PARTIAL: Final = frozenset(
    {
        "cp",
        "ddp",
        "dp",
        "ep",
        "fsdp",
        "group",
        "host",
        "inter",
        "intra",
        "machine",
        "mp",
        "node",
        "pp",
        "replicate",
        "role",
        "shard",
        "sp",
        "tp",
    }
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


# Gives each dump its rank, from the surest source to the least sure.


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Dumps that all have a rank, and one line for each reason why others were left out.

    `labels` are the names of processes whose ranks nothing tells, by the numbers that they have in
    the place of ranks, which come after the known ones.
    """

    dumps: tuple[RankDump, ...]
    problems: tuple[str, ...] = ()
    labels: dict[int, str] = {}


def resolve_ranks(
    dumps: Sequence[RankDump],
    told: Mapping[str, int] | None = None,
    *,
    siblings: Collection[str] = (),
) -> Resolved:
    """Find the rank of every dump, or say in one line what the user must tell.

    `told` are ranks that the user gave, by path or by the end of a path; they come first for what
    the content leaves open. A dump whose rank is a guess that another file contradicts is left out.
    `siblings` are files that hold no dump: their names help to tell what numbers in names count.
    """
    places = _Places(dumps, told or {}, siblings)
    ranks = [places.rank(dump) for dump in dumps]
    ranks, problems = _without_contradictions(dumps, ranks, places)
    dumps, ranks = settled(dumps, ranks)
    labels, numbered = _numbered(dumps, ranks)
    dumps, numbered = of_whole_job(dumps, numbered)
    known = (
        _with_rank(d, rank) for d, rank in zip(dumps, numbered, strict=True) if rank is not None
    )
    return Resolved(
        dumps=tuple(known),
        problems=(*problems, *_questions(dumps, numbered, places, problems)),
        labels=labels,
    )


def _numbered(
    dumps: Sequence[RankDump], ranks: Sequence[int | None]
) -> tuple[dict[int, str], list[int | None]]:
    """Give numbers to the processes that have a name but no rank, after the known ranks."""
    known = (rank for rank in ranks if rank is not None)
    first = max([-1, *known, *(dump.last_rank for dump in dumps)]) + 1
    is_anybody = any(not dump.is_whole_job for dump in dumps)
    job = next((dump.label for dump in dumps if dump.is_whole_job and dump.label), "")
    numbers: dict[str, int] = {}
    numbered = list(ranks)
    for place, (dump, rank) in enumerate(zip(dumps, ranks, strict=True)):
        name = job if dump.is_whole_job and job else _name(dump)
        if rank is None and name and not (dump.is_whole_job and is_anybody):
            numbered[place] = numbers.setdefault(name, first + len(numbers))
    return {number: label for label, number in numbers.items()}, numbered


def _name(dump: RankDump) -> str:
    """Return what a process is called without a rank: of one that ended its file is enough."""
    if dump.label or not has_end(dump):
        return dump.label
    return f"a process in {posixpath.basename(dump.path.replace('!', '/'))}"


class _Root(NamedTuple):
    kind: str
    path: str
    node: str = ""


_MOST_ON_NODE: Final = 16
"""No node of the usual systems has more GPUs: 16 are those of an NVIDIA DGX-2."""


def _offsets(known: Mapping[_Root, set[int]], said: Mapping[str, set[int]]) -> dict[_Root, int]:
    """Return what is to be added to the local ranks of each node, where that is certain.

    Where nothing is known of a node and it is the only one, its local ranks are the ranks. It is
    not the only one if the ranks that its file names are all beyond those of a first node.
    """
    offsets = {root: min(values) for root, values in known.items() if len(values) == 1}
    is_one_node = all(values <= {0} for values in known.values()) and not any(
        ranks and min(ranks) >= _MOST_ON_NODE for ranks in said.values()
    )
    kinds = Counter(root.kind for root in known)
    for root, values in known.items():
        # Whoever names a node does it because there are others.
        if not values and is_one_node and kinds[root.kind] == 1 and not root.node:
            offsets[root] = 0
    return offsets


class _Places:
    """What is known of the files as a set."""

    def __init__(
        self, dumps: Sequence[RankDump], told: Mapping[str, int], siblings: Collection[str]
    ) -> None:
        self._told = {_normal(path): rank for path, rank in told.items()}
        self._names = ranks_from_names(
            list(dict.fromkeys([*(dump.path for dump in dumps), *siblings]))
        )
        self._said: dict[str, set[int]] = {}
        self._labels: dict[str, set[str]] = {}
        pids: dict[int, set[int]] = {}
        offsets: dict[_Root, set[int]] = {}
        for dump in dumps:
            if dump.rank is not None:
                self._said.setdefault(dump.path, set()).add(dump.rank)
            self._labels.setdefault(dump.path, set()).add(dump.label)
            root, local_rank = self._local(dump)
            if dump.rank is not None and dump.pid is not None:
                pids.setdefault(dump.pid, set()).add(dump.rank)
            if local_rank is not None:
                known = {dump.rank - local_rank} if dump.rank is not None else set()
                offsets.setdefault(root, set()).update(known)
        self._pids = {pid: ranks.pop() for pid, ranks in pids.items() if len(ranks) == 1}
        self._offsets = _offsets(offsets, self._said)

    def rank(self, dump: RankDump) -> int | None:
        """Return the rank of a dump, or None where nothing tells it."""
        if dump.rank is not None:
            return dump.rank
        told = self.told(dump.path)
        if told is not None:
            return told
        if dump.pid in self._pids:
            return self._pids[dump.pid]
        root, local_rank = self._local(dump)
        if local_rank is not None:
            return local_rank + self._offsets[root] if root in self._offsets else None
        if dump.is_whole_job:
            return None
        if dump.label and len(self._labels[dump.path]) > 1:
            return None  # the file holds lines of several processes
        named = self._named(dump.path).rank
        # A log that names other ranks as well holds more than one rank's lines.
        return named if self._said.get(dump.path, {named}) == {named} else None

    def told(self, path: str) -> int | None:
        """Return what the user said of a file, or None."""
        normal = _normal(path)
        fits = {r for end, r in self._told.items() if normal == end or normal.endswith("/" + end)}
        return fits.pop() if len(fits) == 1 else None

    def is_guess(self, dump: RankDump) -> bool:
        """Say whether the rank comes from the name of the file only."""
        is_open = dump.rank is None and self.told(dump.path) is None
        return is_open and dump.pid not in self._pids and self._local(dump)[1] is None

    def is_mixed(self, path: str) -> bool:
        """Say whether the content of a file names ranks, so that one answer does not fit it all."""
        return path in self._said

    def _local(self, dump: RankDump) -> tuple[_Root, int | None]:
        """Return the local rank, and the place below which local ranks are those of one node."""
        named = self._named(dump.path)
        if named.local_rank is not None:
            return _Root("folder", named.root), named.local_rank
        return _Root("file", dump.path, dump.node), dump.local_rank

    def _named(self, path: str) -> NamedRank:
        return self._names.get(path, NamedRank())


def _without_contradictions(
    dumps: Sequence[RankDump], ranks: Sequence[int | None], places: _Places
) -> tuple[list[int | None], list[str]]:
    """Take guesses back where files of different folders have the same name for a rank.

    ``a/rank0.txt`` and ``b/rank0.txt``, made by the same tool, may be local ranks of two nodes.
    """
    folders: dict[tuple[str, int], dict[str, str]] = {}
    for dump, rank in zip(dumps, ranks, strict=True):
        if rank is not None and places.is_guess(dump):
            folder = posixpath.dirname(_normal(dump.path))
            folders.setdefault((dump.source, rank), {}).setdefault(folder, dump.path)
    clashes = {key: list(paths.values()) for key, paths in folders.items() if len(paths) > 1}
    if not clashes:
        return list(ranks), []
    (_, rank), (first, second, *_) = next(iter(clashes.items()))
    problem = (
        f"{first} and {second} both bear the name of rank {rank}"
        + (f" ({len(clashes) - 1} more such)" if len(clashes) > 1 else "")
        + ": say --rank FILE=RANK, or analyze the folders one at a time"
    )
    left = [
        None if places.is_guess(dump) and (dump.source, rank) in clashes else rank
        for dump, rank in zip(dumps, ranks, strict=True)
    ]
    return left, [problem]


def _questions(
    dumps: Sequence[RankDump],
    ranks: Iterable[int | None],
    places: _Places,
    problems: Sequence[str],
) -> Iterator[str]:
    left = list(dict.fromkeys(d.path for d, r in zip(dumps, ranks, strict=True) if r is None))
    mixed = [path for path in left if places.is_mixed(path)]
    unknown = [path for path in left if path not in mixed]
    if unknown and not problems:
        yield f"{_some(unknown)}: neither content nor name tells the rank; say --rank FILE=RANK"
    if mixed:
        yield f"{_some(mixed)}: some of it does not say its rank and is left out"


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:3])
    return f"{shown} and {len(paths) - 3} more" if len(paths) > 3 else shown


def _with_rank(dump: RankDump, rank: int) -> RankDump:
    if dump.rank == rank:
        return dump
    events = tuple(msgspec.structs.replace(event, rank=rank) for event in dump.events)
    return msgspec.structs.replace(dump, rank=rank, events=events)


def _normal(path: str) -> str:
    return posixpath.normpath(path.replace("!", "/"))
