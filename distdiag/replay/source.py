"""Writes the test: one function for each call of the program, and who made which, in order."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from textwrap import fill
from typing import Final, NamedTuple, TypeVar

from distdiag.events.base import Frame
from distdiag.events.collectives import Collective, Signature
from distdiag.events.errors import UsageError
from distdiag.events.ranks import RankSet
from distdiag.record.visible import visible
from distdiag.replay.calls import CallsToReplay

# Finds what repeats in a sequence, so that a loop reads as one.

T = TypeVar("T")

LONGEST_BLOCK: Final = 64


class Repeat(NamedTuple):
    """So many times the same block, one after the other."""

    block: tuple[object, ...]
    times: int


def repeats(sequence: Sequence[T]) -> list[Repeat]:
    """Return blocks that, repeated and joined, are the sequence.

    Example: ``a b a b a b c`` is ``(a b) * 3`` and ``(c) * 1``.
    """
    found: list[Repeat] = []
    start = 0
    while start < len(sequence):
        size, times = _longest(sequence, start)
        block = tuple(sequence[start : start + size])
        if times == 1 and found and found[-1].times == 1:
            found[-1] = Repeat(found[-1].block + block, 1)
        else:
            found.append(Repeat(block, times))
        start += size * times
    return found


def _longest(sequence: Sequence[T], start: int) -> tuple[int, int]:
    """Return size and number of the block at `start` whose repeats reach furthest."""
    best = (1, 1)
    for size in range(1, min(LONGEST_BLOCK, (len(sequence) - start) // 2) + 1):
        block = sequence[start : start + size]
        times, end = 1, start + size
        while sequence[end : end + size] == block:
            times, end = times + 1, end + size
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best


# The statement that makes one recorded collective again, on tensors of zeros.

_SUMMED: frozenset[str | None] = frozenset({None, "AVG", "PREMUL_SUM"})
"""Operators that gloo lacks, or that were not seen."""
_NAME: Final = re.compile(r"[A-Za-z]\w*", re.ASCII)


def statement(signature: Signature, *, is_root: bool) -> str:
    """Return a line of Python; ``dist``, ``torch`` and ``group`` are names in its scope.

    Raises:
        UsageError: there is no public function for the call.

    """
    ins = [_tensor(size, signature) for size in signature.input_sizes]
    outs = [_tensor(size, signature) for size in signature.output_sizes]
    arguments = _arguments(signature, ins, outs, is_root=is_root)
    if arguments is None:
        raise UsageError(f"a call of {signature.op} cannot be replayed")
    return f"dist.{signature.op}({', '.join([*arguments, 'group=group'])})"


_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_reduce": ("in", "op"),
    "broadcast": ("in", "src"),
    "reduce": ("in", "dst", "op"),
    "all_gather": ("outs", "in"),
    "all_gather_into_tensor": ("out", "in"),
    "reduce_scatter_tensor": ("out", "in", "op"),
    "reduce_scatter": ("out", "ins", "op"),
    "gather": ("in", "outs at root", "dst"),
    "scatter": ("out", "ins at root", "src"),
    "all_to_all": ("outs", "ins"),
    "all_to_all_single": ("out", "in", "splits"),
    "barrier": (),
    "monitored_barrier": (),
}
"""What the functions of torch.distributed take, in their order."""


def _arguments(
    signature: Signature, ins: list[str], outs: list[str], *, is_root: bool
) -> list[str] | None:
    if signature.op not in _ARGUMENTS:
        return None
    texts = {
        "in": (ins or outs)[:1],
        "out": (outs or ins)[:1],
        "ins": [_list(ins)],
        "outs": [_list(outs)],
        "ins at root": [_list(ins) if is_root else "None"],
        "outs at root": [_list(outs) if is_root else "None"],
        "op": [f"op=dist.ReduceOp.{_operator(signature.reduce_op)}"],
        "src": [f"src={signature.root}"],
        "dst": [f"dst={signature.root}"],
        "splits": [_splits(signature.output_splits), _splits(signature.input_splits)],
    }
    return [text for part in _ARGUMENTS[signature.op] for text in texts[part]]


def _operator(name: str | None) -> str:
    return "SUM" if name is None or name in _SUMMED else _known(name)


def _known(name: str) -> str:
    """Return a name that becomes code: records may come from a stranger."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"a call with {visible(repr(name))} cannot be replayed: that is no name")
    return name


def _splits(splits: tuple[int, ...]) -> str:
    return str(list(splits)) if splits else "None"


def _tensor(size: tuple[int, ...], signature: Signature) -> str:
    dtype = signature.dtypes[0] if signature.dtypes else "float32"
    return f"torch.zeros({size}, dtype=torch.{_known(dtype.removeprefix('torch.'))})"


def _list(tensors: list[str]) -> str:
    if len(set(tensors)) == 1 and len(tensors) > 2:
        return f"[{tensors[0]} for _ in range({len(tensors)})]"
    return f"[{', '.join(tensors)}]"


# Writes the test.

WIDTH: Final = 88
TIMEOUT_S: Final = 30

_NO_WORD: Final = re.compile(r"\W+", re.ASCII)


class _Function(NamedTuple):
    """A function of the test. Calls from the same line with the same arguments share one."""

    place: Frame | None
    line: str


def test_source(replayed: CallsToReplay) -> str:
    """Return the text of a test file."""
    made = {
        rank: [_function_of(call, rank) for call in calls]
        for rank, calls in sorted(replayed.calls.items())
    }
    names = _names(made)
    group = replayed.group
    ranks = sorted(group.ranks)
    is_world = len(ranks) == replayed.world_size
    opening = "dist.group.WORLD" if is_world else f"dist.new_group({ranks})"
    label = visible(group.label)
    return "\n".join(
        [
            f'"""{_docstring(replayed)}\n"""',
            "\nimport pytest\nimport torch\nimport torch.distributed as dist\n",
            *(line for function in names for line in _define(function, names[function])),
            f"\nCALLS = {{  # in process group {label}, by rank",
            *(line for rank in ranks for line in _program(rank, made.get(rank, ()), names)),
            "}\n\n",
            f'@pytest.mark.distdiag(world_size={replayed.world_size}, backend="gloo", '
            f"timeout={TIMEOUT_S})",
            f"def test_collectives_of_{_word(label)}():",
            f"    group = {opening}",
            "    for call in CALLS.get(dist.get_rank(), []):",
            "        call(group)\n",
        ]
    )


def _docstring(replayed: CallsToReplay) -> str:
    finding = replayed.finding
    ranks = RankSet(replayed.group.ranks).phrase()
    paragraphs = (
        f"What {ranks} of run {replayed.run_id} called, up to {finding.code} {finding.name}.",
        finding.message,
        "Each function makes one call of the program again, on zeros. CALLS tells which of them "
        "each rank made, in order. Correct CALLS or a function as you mean to correct the program: "
        "the test passes when the calls of all ranks fit together.",
    )
    safe = [visible(" ".join(p.split())).replace("\\", "\\\\") for p in paragraphs]
    return "\n\n".join(fill(p.replace('"', "'"), WIDTH, break_long_words=False) for p in safe)


def _function_of(call: Collective, rank: int) -> _Function:
    line = statement(call.signature, is_root=call.signature.root == rank)
    return _Function(call.site.location, line)


def _names(made: Mapping[int, Sequence[_Function]]) -> dict[_Function, str]:
    """Name the functions after the lines they stand for, in the order of their first calls."""
    names: dict[_Function, str] = {}
    taken: dict[str, int] = {}
    for function in (each for functions in made.values() for each in functions):
        if function in names:
            continue
        place = function.place
        stem = f"{_word(PurePath(place.file).stem)}_{place.line}" if place else "call"
        taken[stem] = taken.get(stem, 0) + 1
        suffix = f"_{taken[stem]}" if taken[stem] > 1 else ""
        names[function] = f"line_of_{stem}{suffix}"
    return names


def _word(text: str) -> str:
    return _NO_WORD.sub("_", text).strip("_").lower() or "group"


def _define(function: _Function, name: str) -> Iterator[str]:
    place = function.place
    yield f"\ndef {name}(group):"
    if place is not None:
        yield f"    # {visible(place.file)}:{place.line} in {visible(place.function)}"
    yield f"    {function.line}\n"


def _program(
    rank: int, functions: Sequence[_Function], names: Mapping[_Function, str]
) -> Iterator[str]:
    yield f"    {rank}: ["
    for repeat in repeats([names[function] for function in functions]):
        yield from _entries(repeat)
    yield "    ],"


def _entries(repeat: Repeat) -> Iterator[str]:
    words = [str(word) for word in repeat.block]
    if repeat.times == 1:
        yield from (f"        {word}," for word in words)
    else:
        yield f"        *({repeat.times} * [{', '.join(words)}]),"
