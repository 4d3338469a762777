"""What stands before the lines of a log, learned from the log itself, and whom it names.

Launchers, collectors and loggers put a prefix before each line: a time, a rank, a pod, a counter.
Whatever it is, it shows where a line of a known form follows it: the head or a frame of a Python
traceback, a line of C++'s glog, a field of torchrun's summary. What stands before such a line, with
numbers made general, is a template; once it stands before two, it is a prefix everywhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, pairwise
from typing import Final, NamedTuple

MOST_TEMPLATES: Final = 64
"""So many kinds of prefix are told apart in one file, the most frequent ones."""
LONGEST_PREFIX: Final = 256
_LONGEST_GLUED: Final = 128
"""So long is a prefix at most that is looked for behind something else: the search is slow."""
_MOST_GLUED: Final = 1_000
_MOST_ANCHORS: Final = 20_000
_PROBED_BYTES: Final = 1 << 20
_NUM_PROBED: Final = 200
_MOST_CACHED: Final = 4096


class Speaker(NamedTuple):
    """Whose line it is, as far as the line says.

    `label` is what else names the process or its host: ``TrainWorker pid=31, ip=10.0.0.1``.
    """

    rank: int | None = None
    local_rank: int | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """What the process is called if no more of it comes to be known."""
        if self.local_rank is None:
            return self.label
        return f"{self.label} local rank {self.local_rank}".strip()

    @property
    def pid(self) -> int | None:
        """The process number that the label holds."""
        match = _PID.search(self.label)
        return int(match[1]) if match else None


_PID: Final = re.compile(r"\bpid[= ](\d{1,9})\b")
NOBODY: Final = Speaker()

_LINE: Final = re.compile(rb"[^\r\n]+")
_HEAD: Final = b"Traceback (most recent call last)"
_FRAME: Final = b'  File "'
_FRAME_END: Final = re.compile(rb'  File "[^"\r\n]{1,1000}", line \d{1,9}')
# Other lines of a known form. What is no literal is looked for in the first and last part only.
_KNOWN: Final = re.compile(
    rb"\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d{3,9} "
    rb"|  (?:time|host|rank|exitcode)\s{1,6}: \S"
    rb"|Root Cause \(first observed failure\)"
    rb"|[\w.-]{1,64}:\d{1,9}:\d{1,9} \[\d{1,3}\] (?:[\w./-]{1,60}:\d{1,5} )?NCCL "
    # a thread of py-spy
    rb"|Thread (?:0x[0-9A-Fa-f]{1,16}|\d{1,20}) \((?:active|idle)"
    # the box that rich draws around a traceback, in UTF-8
    rb"|\xe2\x95\xad[\xe2\x94\x80]{3,600} Traceback |\xe2\x94\x82 /[^\r\n:]{1,300}:\d{1,9} in "
)

# ``[rank3]: `` comes from torch's own hook and from its log lines, after whatever else was added.
_RANK: Final = re.compile(rb"\[rank(\d{1,6})\]: ?")
_RANK_AT_END: Final = re.compile(rb"\[rank\d{1,6}\]: ?$")
_RANK_WITHIN: Final = 128
# ``[default3]:`` is what torchrun --tee puts before a line: a role and a local rank.
_TEE: Final = re.compile(rb"\[([A-Za-z_][A-Za-z_-]{0,40})(\d{1,6})\]:")
_TEE_AT_END: Final = re.compile(rb"\[([A-Za-z_][A-Za-z_-]{0,40})(\d{1,6})\]:$")
# mpirun --tag-output, that of Open MPI 5, that of SageMaker, and horovodrun
_MPI: Final = re.compile(
    rb"\[(?:(?:[\w.-]{1,80}@)?\d{1,9},)?(?:mpirank:)?(\d{1,6})(?:,[\w.-]{1,80})?\]"
    rb"<std(?:out|err)>: ?"
)
# Ray, and vLLM, name the process before each line.
_RAY: Final = re.compile(
    rb"\([A-Za-z_][\w.:<>-]{0,80}(?: [\w=]{1,20}){0,2} pid=\d{1,9}(?:, ip=[\w.:-]{1,60})?\) "
)
# srun --label, where nearly all lines have it
_SRUN: Final = re.compile(rb" {0,6}(\d{1,6}): ?")
_PARALLEL_AXES: Final = frozenset({"TP", "DP", "PP", "EP", "CP", "SP"})


class Prefixes:
    """What launchers put before the lines of one log."""

    def __init__(self, data: bytes) -> None:
        """Learn the prefixes from lines of a known form."""
        self._data = data
        self._names_ranks = b"[rank" in data
        self._is_labelled = _is_labelled(data)
        templates = _learned(data)
        self._learned = re.compile(b"|".join(templates)) if templates else None
        self._at_end = [re.compile(b"(?:" + template + b")$") for template in templates]
        self._speakers: dict[bytes, Speaker] = {}
        self._counters = _counters(data, self._learned)

    def read(self, start: int, end: int) -> tuple[Speaker, int]:
        """Return who wrote a line and where its own text begins."""
        data, rank, local_rank, label = self._data, None, None, ""
        if self._learned is not None:
            match = self._learned.match(data, start, min(end, start + LONGEST_PREFIX))
            if match is not None and match.end() > start:
                rank, local_rank, label = self._speaker(match[0])
                start = match.end()
        # Most lines have no prefix, and logs have many lines.
        if start < end and (self._is_labelled or data[start] == 0x5B):
            stop = min(end, start + LONGEST_PREFIX)
            if (match := _MPI.match(data, start, stop)) or (
                self._is_labelled and (match := _SRUN.match(data, start, stop))
            ):
                rank, start = int(match[1]), match.end()
            match = _TEE.match(data, start, stop)
            if match and match[1] != b"rank" and match[1].upper().decode() not in _PARALLEL_AXES:
                local_rank, start = int(match[2]), match.end()
        if self._names_ranks:
            place = data.find(b"[rank", start, min(end, start + _RANK_WITHIN))
            if place >= 0 and (match := _RANK.match(data, place, end)):
                if not label and place > start and (ray := _RAY.match(data, start, place)):
                    label = self._speaker(ray[0])[2]
                rank, start = int(match[1]), match.end()
        return _speaker_of(rank, local_rank, label), start

    def glued_heads(self) -> list[int]:
        """Return where the prefix of a traceback's head begins behind something else in its line.

        A bar of progress leaves no line feed behind itself.
        """
        data, found = self._data, []
        place = data.find(_HEAD)
        while place >= 0:
            start = _line_start(data, place)
            if start < place and self.read(start, place)[1] < place:
                text = data[max(start, place - _LONGEST_GLUED) : place]
                cut = place - len(text) + len(self._without_end(text))
                if start < cut < place:
                    found.append(cut)
                if len(found) >= _MOST_GLUED:
                    return found
            place = data.find(_HEAD, place + len(_HEAD))
        return found

    def _without_end(self, text: bytes) -> bytes:
        """Return a text without the prefixes at its end."""
        ends = [*self._at_end, _RANK_AT_END, _TEE_AT_END]
        while match := next((m for end in ends if (m := end.search(text)) and m[0]), None):
            text = text[: match.start()]
        return text

    def _speaker(self, prefix: bytes) -> Speaker:
        found = self._speakers.get(prefix)
        if found is None:
            found = speaker_in(_without(prefix, self._counters))
            if len(self._speakers) < _MOST_CACHED:
                self._speakers[prefix] = found
        return found


@lru_cache(maxsize=_MOST_CACHED)
def _speaker_of(rank: int | None, local_rank: int | None, label: str) -> Speaker:
    return Speaker(rank, local_rank, label)


def _is_labelled(data: bytes) -> bool:
    probed = [
        data[match.start() : min(match.end(), match.start() + LONGEST_PREFIX)]
        for match in islice(_LINE.finditer(data), _NUM_PROBED)
    ]
    num_labelled = sum(_SRUN.match(line) is not None for line in probed)
    return num_labelled >= 2 and num_labelled >= 0.9 * len(probed)


# Learning


def _learned(data: bytes) -> list[bytes]:
    """Return the templates of prefixes, as patterns, the longest first."""
    counts: Counter[bytes] = Counter()
    for prefix in islice(_before_frames(data), _MOST_ANCHORS):
        if template := _template(_outer(prefix)):
            counts[template] += 1
    for prefix in _before_known(data):
        if template := _template(_outer(prefix)):
            counts[template] += 1
    if not counts:
        return []
    heads = list(islice(_before_heads(data), _NUM_PROBED))
    found = []
    for template, count in counts.most_common(MOST_TEMPLATES):
        # A bar of progress without an end may stand before the prefix of a head.
        at_end = re.compile(b"(?:" + template + b")$")
        if count >= 2 or any(at_end.search(_outer(head)) for head in heads):
            found.append(template)
    return sorted(found, key=len, reverse=True)


def _before_frames(data: bytes) -> Iterator[bytes]:
    """Yield what stands before the frames of tracebacks, on their lines."""
    place = data.find(_FRAME)
    while place >= 0:
        start = _line_start(data, place)
        if start < place and place - start <= LONGEST_PREFIX and _FRAME_END.match(data, place):
            yield data[start:place]
        place = data.find(_FRAME, place + len(_FRAME))


def _before_heads(data: bytes) -> Iterator[bytes]:
    place = data.find(_HEAD)
    while place >= 0:
        start = _line_start(data, place)
        if start < place:
            yield data[max(start, place - _LONGEST_GLUED) : place]
        place = data.find(_HEAD, place + len(_HEAD))


def _before_known(data: bytes) -> Iterator[bytes]:
    for start in sorted({0, max(0, len(data) - _PROBED_BYTES)}):
        for match in _KNOWN.finditer(data, start, start + _PROBED_BYTES):
            place = _line_start(data, match.start())
            if place < match.start() <= place + LONGEST_PREFIX:
                yield data[place : match.start()]


def _line_start(data: bytes, place: int) -> int:
    low = max(0, place - 2 * LONGEST_PREFIX)
    return max(low, data.rfind(b"\n", low, place) + 1, data.rfind(b"\r", low, place) + 1)


def _outer(prefix: bytes) -> bytes:
    """Return a prefix without the parts at its end that are read wherever they stand."""
    for pattern in (_RANK_AT_END, _TEE_AT_END):
        if match := pattern.search(prefix):
            prefix = prefix[: match.start()]
    return prefix


_TOKEN: Final = re.compile(rb"[0-9A-Za-z_]+(?:\.py\b)?| +|[^0-9A-Za-z_ ]+")
_LEVEL: Final = re.compile(rb"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)$", re.IGNORECASE)
_NAME_AND_NUMBER: Final = re.compile(rb"([A-Za-z_]+)\d+$")
_LEVELS: Final = rb"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"


def _template(prefix: bytes) -> bytes:
    """Return a pattern of prefixes that differ from this one in numbers, times and levels only."""
    # Margins of groups of exceptions, and indented text, are no prefixes.
    if not prefix.strip(b" \t|+-") or len(prefix) > LONGEST_PREFIX:
        return b""
    tokens = _TOKEN.findall(prefix)
    parts = [_general(token) for token in tokens]
    if tokens[0].isspace():
        parts[0] = b" *"
    if tokens[-1].isspace():
        parts[-1] = b" " * len(tokens[-1])  # more of them is the indentation of the line
    return b"".join(parts)


def _general(token: bytes) -> bytes:
    if token.isspace():
        return b" +"
    if token.endswith(b".py"):
        return rb"\w+\.py"
    if _LEVEL.match(token):
        return _LEVELS
    if token.isdigit():
        return rb"\d+"
    if match := _NAME_AND_NUMBER.match(token):
        return re.escape(match[1]) + rb"\d+"
    if any(0x30 <= byte <= 0x39 for byte in token):
        return rb"\w+"
    return re.escape(token)


# A number that grows with each line counts lines and names nobody.


def _counters(data: bytes, learned: re.Pattern[bytes] | None) -> frozenset[int]:
    """Return which of the numbers in a prefix, counted from its beginning, count lines."""
    if learned is None:
        return frozenset()
    prefixes = [
        match[0]
        for line in islice(_LINE.finditer(data), _NUM_PROBED)
        if (match := learned.match(data, line.start(), line.end())) and match[0]
    ]
    rows = [[int(number) for number in _NUMBER.findall(_untimed(prefix))] for prefix in prefixes]
    rows = [row for row in rows if len(row) == len(rows[0])]
    if len(rows) < 4:  # the head, a frame, its source and the exception of one rank
        return frozenset()
    return frozenset(
        column
        for column, values in enumerate(zip(*rows, strict=True))
        if all(after > before for before, after in pairwise(values))
    )


_NUMBER: Final = re.compile(rb"\d{1,18}")


def _without(prefix: bytes, columns: frozenset[int]) -> str:
    """Return a prefix without its times and the numbers in these columns."""
    untimed = _untimed(prefix)
    if columns:
        numbers = iter(range(len(untimed)))
        untimed = _NUMBER.sub(lambda m: b"" if next(numbers) in columns else m[0], untimed)
    return untimed.decode("utf-8", errors="replace")


# Whom a prefix names

_TIMES: Final = re.compile(
    rb"\d{4}[-/]\d\d[-/]\d\d(?:[T _]|\b)|\d\d[-/]\d\d (?=\d\d:)|\d\d?:\d\d:\d\d(?:[.,]\d{1,9})?"
    rb"|(?:Z|[+-]\d\d:?\d\d)(?=[\s\]|)]|$)|\b1[5-9]\d{8}(?:\.\d{1,9})?\b"
    rb"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2}\b"
)
_NOT_NAMES: Final = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|stderr|stdout|c10d|[IWEF]|[FP]"
    r"|MainThread|MainProcess|None)\b|\[?[\w./-]{1,80}\.(?:py|cc|cpp|cu|go):\d{1,7}(?::\w{0,80})?\]?"
    r"|\b\w{1,40}(?:\.\w{1,40}){1,8}:\w{0,60}:?\d{0,7}",
    re.IGNORECASE,
)
_NAMED_RANK: Final = re.compile(
    r"(?<![A-Za-z])(?:([A-Za-z]{1,20})[-_ ])?rank[-_ =:#]{0,2}(\d{1,6})(?![\d.])", re.IGNORECASE
)
_BARE: Final = re.compile(r"\W{0,3}(\d{1,6})\W{0,3}$")
_AXES: Final = re.compile(r"\b(?:TP|DP|PP|EP|CP|SP)\d{1,5}\b")
_ROLE: Final = re.compile(r"\W{0,3}(?:default|trainer|worker_group|local)(\d{1,6})\W{0,3}$")


def untimed(text: str) -> str:
    """Return a text without dates and times."""
    return _untimed(text.encode(errors="replace")).decode(errors="replace")


def _untimed(prefix: bytes) -> bytes:
    return _TIMES.sub(b"", prefix)


@lru_cache(maxsize=_MOST_CACHED)
def speaker_in(prefix: str) -> Speaker:
    """Return whom a prefix names that holds no time."""
    if mpi := _MPI.search(prefix.encode(errors="replace")):
        return Speaker(int(mpi[1]))
    rank = local_rank = None
    for word, number in _NAMED_RANK.findall(prefix):
        if word.lower() not in _PARTS:
            rank = int(number) if rank is None else rank
        elif word.lower() == "local":
            local_rank = int(number)
    rest = _NOT_NAMES.sub(" ", prefix)
    if rank is None and (axes := _AXES.findall(rest)):
        return Speaker(None, local_rank, " ".join(axes))
    if rank is None and local_rank is None and (match := _ROLE.match(rest)):
        return Speaker(None, int(match[1]))
    if rank is None and local_rank is None and (match := _BARE.match(rest)):
        return Speaker(int(match[1]))
    return Speaker(rank, local_rank, _label(rest))


_PARTS: Final = frozenset(
    {"local", "node", "host", "machine", "group", "role", "tp", "dp", "pp", "ep", "cp", "sp"}
)
_EMPTY: Final = re.compile(r"[\[(<{][\s:|,;.-]{0,8}[\])>}]")
_EDGES: Final = " \t:|,;.-+=>*#~/"


def _label(rest: str) -> str:
    """Return what is left of a prefix to name a process: what holds a number, without brackets."""
    text = _EMPTY.sub(" ", _NAMED_RANK.sub(" ", rest))
    text = " ".join(text.split()).strip(_EDGES)
    while len(text) > 1 and (text[0], text[-1]) in {("[", "]"), ("(", ")"), ("<", ">"), ("{", "}")}:
        text = text[1:-1].strip(_EDGES)
    text = " ".join(text.strip("[](){}<> ").split())
    return text if any(c.isdigit() for c in text) and any(c.isalpha() for c in text) else ""


# Labels that count ranks

_DIGITS: Final = re.compile(r"\d{1,9}")
# Numbers after these words count something else than ranks.
_OTHERS: Final = re.compile(
    r"(?:node|host|machine|pid|ip|gpu|cuda|device|core|cpu|port|thread|attempt|job|step)[-_ =]?$"
    r"|[\d.]$",
    re.IGNORECASE,
)


def ranks_of_processes(speakers: Iterable[Speaker]) -> dict[str, int]:
    """Return the rank of each process whose other lines name it, if no two of them have one rank.

    Several groups of processes, such as engines of a server, may each count theirs from 0.
    """
    ranks: dict[str, set[int]] = {}
    for speaker in speakers:
        if speaker.pid is not None and speaker.rank is not None:
            ranks.setdefault(speaker.label, set()).add(speaker.rank)
    counts = Counter(rank for each in ranks.values() for rank in each)
    return {
        label: min(each)
        for label, each in ranks.items()
        if len(each) == 1 and counts[min(each)] == 1
    }


def ranks_of_labels(speakers: Iterable[Speaker]) -> dict[str, int]:
    """Return the ranks that labels count, where that is the only way to read them.

    All labels of the file are alike but for one number, which counts from 0 without a gap, and no
    line of the file names a rank otherwise.
    """
    all_speakers = list(speakers)
    if any(s.rank is not None or s.local_rank is not None for s in all_speakers):
        return {}
    labels = sorted({s.label for s in all_speakers if s.label})
    if len(labels) < 2 or len({_DIGITS.sub("#", label) for label in labels}) > 1:
        return {}
    columns = list(zip(*(_DIGITS.finditer(label) for label in labels), strict=True))
    counted = []
    for column in columns:
        values = [int(match[0]) for match in column]
        first = column[0]
        if len(set(values)) > 1 and not _OTHERS.search(first.string[: first.start()]):
            counted.append(values)
        elif len(set(values)) > 1 and not re.search(r"(?:pid|ip)[ =]\S*$", _before(first)):
            return {}
    if len(counted) != 1 or sorted(counted[0]) != list(range(len(labels))):
        return {}
    return dict(zip(labels, counted[0], strict=True))


def _before(match: re.Match[str]) -> str:
    return match.string[: match.start()]


# Times

_STAMP: Final = re.compile(
    rb"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?"
)


def time_in(text: bytes) -> int:
    """Return the first date and time in a text, in nanoseconds since 1970, or 0.

    A time without its zone is taken for UTC: times of one file are compared with one another.
    """
    match = _STAMP.search(text)
    if match is None:
        return 0
    try:
        second = datetime(*(int(number) for number in match.groups()[:6]), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        return 0
    zone = (match[8] or b"Z").decode().replace(":", "")
    offset_s = 0 if zone == "Z" else int(zone[0] + "1") * (int(zone[1:3]) * 60 + int(zone[3:])) * 60
    fraction = (match[7] or b"0").ljust(9, b"0")
    return max(0, (int(second.timestamp()) - offset_s) * 1_000_000_000 + int(fraction))
