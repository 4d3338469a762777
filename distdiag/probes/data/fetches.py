"""Which random numbers are drawn where samples are fetched, in the workers of data loaders, too.

Nothing is drawn for it: the states of the generators before and after a fetch tell how many numbers
it took. A worker that was forked writes them into memory that it shares with its rank.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import random
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import torch
import xxhash
from torch.utils.data import _utils, dataloader, get_worker_info

from distdiag.events.base import CallSite, Frame
from distdiag.events.data import Fetch, GeneratorUse
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guarded
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import attempt
from distdiag.record.recorder import Recorder
from distdiag.record.user_code import is_user_file

# The state of a generator, and how many numbers lie between two of them.

_KEY: Final = 624
"""How many words of 32 bits the Mersenne Twister makes at a time; this and where it is in them."""
_MOST_BLOCKS: Final = 512
"""Of so many times as many words it is found out how many a fetch took, in some milliseconds."""
_FEW_BLOCKS: Final = 8
"""The same of what was drawn in a worker before its first fetch, as to make a data set ready."""
_TORCH_STATE: Final = struct.Struct(f"<Qii{_KEY + 1}Q")
"""How torch lays a state out: the seed, how many words are left, whether it was seeded, the place
of the next one, and the words."""
_PCG_FACTOR: Final = 0x2360ED051FC65DA44385DF649FCCF645
_PCG_RANGE: Final = 1 << 128


class Twister(NamedTuple):
    """The state of a Mersenne Twister, whichever library keeps it."""

    key: bytes
    place: int


class Congruence(NamedTuple):
    """The state of numpy's PCG64, a linear congruential generator."""

    state: int
    increment: int


State = Twister | Congruence


def of_python(generator: random.Random | None = None) -> Twister:
    """Return the state of a generator of Python, of the one that all share by default."""
    words = (random if generator is None else generator).getstate()[1]
    return Twister(array("I", words[:_KEY]).tobytes(), words[_KEY])


def of_numpy(state: Mapping[str, Any]) -> State | None:
    """Return what a state of numpy's says, None of a kind that is not known here."""
    inner = state["state"]
    match state["bit_generator"]:
        case "MT19937":
            return Twister(inner["key"].tobytes(), int(inner["pos"]))
        case "PCG64":
            return Congruence(int(inner["state"]), int(inner["inc"]))
    return None


def of_torch(generator: torch.Generator) -> Twister:
    """Return the state of a generator of torch for the CPU."""
    data = generator.get_state().numpy().tobytes()
    _, left, _, _, *words = _TORCH_STATE.unpack_from(data)
    return Twister(array("I", words).tobytes(), _KEY + 1 - left)


def num_drawn(before: State, after: State, most_blocks: int = _MOST_BLOCKS) -> int:
    """Return how many raw numbers were drawn in between; -1 if it was seeded anew, or too many."""
    if isinstance(before, Congruence) and isinstance(after, Congruence):
        return _steps(before, after)
    if isinstance(before, Twister) and isinstance(after, Twister):
        return _words(before, after, most_blocks)
    return -1


def _words(before: Twister, after: Twister, most_blocks: int) -> int:
    if before.key == after.key and before.place <= after.place:
        return after.place - before.place
    if "numpy" not in sys.modules:
        return -1
    numpy: Untyped = importlib.import_module("numpy.random")  # it is loaded with its first use
    engine, count = numpy.MT19937(0), _KEY - before.place
    key = array("I", before.key)
    engine.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": _KEY}}
    for _ in range(most_blocks):
        engine.random_raw(_KEY, output=False)
        if engine.state["state"]["key"].tobytes() == after.key:
            return count + after.place
        count += _KEY
    return -1


def _steps(before: Congruence, after: Congruence) -> int:
    """Find the distance bit by bit: the lowest n bits repeat themselves after 2 ** n steps."""
    if before.increment != after.increment:
        return -1
    here, factor, increment, bit, count = before.state, _PCG_FACTOR, before.increment, 1, 0
    while here != after.state:
        if (here ^ after.state) & bit:
            here = (here * factor + increment) % _PCG_RANGE
            count |= bit
        increment = (factor + 1) * increment % _PCG_RANGE
        factor = factor * factor % _PCG_RANGE
        bit <<= 1
    return count if count <= _MOST_BLOCKS * _KEY else -1


# The generators that a fetch may draw from.

_MOST_HELD: Final = 64
"""So many attributes are looked at for generators, in each fetch that is looked at."""


def states(dataset: object) -> dict[str, State]:
    """Return the states of the generators of this process, and of those that a data set holds."""
    found: dict[str, State | None] = {
        "python": of_python(),
        "torch": of_torch(torch.default_generator),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy"] = _legacy(numpy)
    for name, generator in _held(dataset):
        match generator:
            case random.Random():
                found[name] = of_python(generator)
            case torch.Generator() if generator.device.type == "cpu":
                found[name] = of_torch(generator)
            case _ if numpy is not None and isinstance(generator, numpy.RandomState):
                found[name] = _legacy(generator)
            case _ if numpy is not None and isinstance(generator, numpy.Generator):
                found[name] = of_numpy(generator.bit_generator.state)
    return {name: state for name, state in found.items() if state is not None}


def _held(dataset: object) -> Iterator[tuple[str, object]]:
    """Yield attributes of a data set, and those of its transforms and the data set inside."""
    seen, waiting = 0, [(dataset, 0)]
    while waiting:
        one, depth = waiting.pop(0)
        for name, value in (getattr(one, "__dict__", None) or {}).items():
            seen += 1
            if seen > _MOST_HELD:
                return
            yield f"{type(one).__name__}.{name}", value
            if depth == 0:
                waiting.append((value, 1))


def follows_torch(name: str, state: State) -> bool:
    """Say whether a generator of a worker goes on from the seed that torch gives each worker."""
    worker, numpy = get_worker_info(), sys.modules.get("numpy.random")
    if worker is None or numpy is None:
        return True
    if name == "torch":
        return torch.initial_seed() == worker.seed
    seeding: Untyped = _utils.worker
    low, high = worker.seed % (1 << 32), worker.seed >> 32
    # Python seeds by a list of words, as torch does numpy's.
    due = seeding._generate_state(worker.seed - worker.id, worker.id)
    origins = (numpy.RandomState(seed) for seed in ([low], [low, high], due, low))
    found = [each for one in origins if (each := _legacy(one)) is not None]
    return any(num_drawn(each, state, _FEW_BLOCKS) >= 0 for each in found)


def _legacy(generator: Untyped) -> State | None:
    return of_numpy(generator.get_state(legacy=False))


_GLOBAL: Final = ("python", "torch", "numpy")


def _uses(
    before: Mapping[str, State], after: Mapping[str, State], *, is_for_batch: bool
) -> Iterator[GeneratorUse]:
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield GeneratorUse(
                name,
                _digest(before[name]),
                _digest(after[name]),
                num_drawn(before[name], after[name]),
                is_seeded=name in _GLOBAL and not follows_torch(name, before[name]),
                is_for_batch=is_for_batch,
            )


def _digest(state: State) -> str:
    return str(xxhash.xxh3_64_hexdigest(repr(tuple(state)).encode()))


# What workers write for their rank.

_ROOM: Final = 8192
"""Bytes for each worker: three fetches with ten generators each."""
_MOST_LOADERS: Final = 8
_MOST_FETCHES: Final = 3
"""Those of the first loaders: the first fetch may prepare the data set, the others show its use."""
_SIZE: Final = struct.Struct("<I")


class _Board:
    """Memory that the workers of a loader share with their rank, a part for each of them."""

    def __init__(self, num_workers: int) -> None:
        self._memory = mmap.mmap(-1, num_workers * _ROOM)
        self._num_workers = num_workers
        self._at = 0

    def write(self, worker: int, fetch: Fetch) -> None:
        """Add what a worker saw; a size that is 0 ends what there is."""
        data = msgspec.msgpack.encode(fetch)
        at = worker * _ROOM + self._at
        if self._at + 2 * _SIZE.size + len(data) <= _ROOM:
            self._memory[at + _SIZE.size : at + _SIZE.size + len(data)] = data
            self._memory[at : at + _SIZE.size] = _SIZE.pack(len(data))
            self._at += _SIZE.size + len(data)

    def read(self) -> Iterator[Fetch]:
        """Yield what all workers have written by now."""
        for worker in range(self._num_workers):
            at = worker * _ROOM
            while size := _SIZE.unpack_from(self._memory, at)[0]:
                data = self._memory[at + _SIZE.size : at + _SIZE.size + size]
                yield msgspec.msgpack.decode(data, type=Fetch)
                at += _SIZE.size + size


class Fetches(Probe):
    """Looks at the first fetches of a data loader."""

    name: ClassVar[str] = "fetches"

    def __init__(self, recorder: Recorder) -> None:
        """Know of no loader yet."""
        super().__init__(recorder)
        self._boards: WeakMap[Any, _Board] = WeakMap()
        self._here: WeakMap[Any, list[Fetch]] = WeakMap()
        """What was fetched in this process, by what fetches."""
        self._board: _Board | None = None
        """That of the workers which are being started; in a worker, its own."""
        self._num_loaders = 0
        self._num_fetches = 0

    def _install(self) -> None:
        kind = _utils.fetch._MapDatasetFetcher
        self._patches.wrap(kind, "fetch", self._around)
        self._patches.wrap(dataloader._MultiProcessingDataLoaderIter, "__init__", self._starting)

    def of(self, iterator: Untyped) -> tuple[Fetch, ...]:
        """Return what is known by now of the fetches of an iterator of a data loader."""
        board = self._boards.get(iterator)
        if board is not None:
            return tuple(board.read())
        return tuple(self._here.get(getattr(iterator, "_dataset_fetcher", None), ()))

    def _starting(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init(self_: object, loader: object) -> None:
            self._prepare(loader)
            try:
                original(self_, loader)
            finally:
                self._keep(self_)

        return init

    @guarded
    def _prepare(self, loader: Untyped) -> None:
        if not self.is_off and self._num_loaders < _MOST_LOADERS:
            self._board = _Board(loader.num_workers)

    def _keep(self, iterator: object) -> None:
        if self._board is not None:
            self._num_loaders += 1
            self._boards[iterator], self._board = self._board, None

    def _around(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def fetch(self_: object, index: object) -> object:
            worker = get_worker_info()
            if not self._wants(self_, worker):
                return original(self_, index)
            with _Reading(self_) as seen:
                result = original(self_, index)
            attempt(_ignore, self._note, self_, index, worker, seen.states)
            return result

        return fetch

    def _wants(self, fetcher: object, worker: object) -> bool:
        if worker is not None:
            return self._board is not None and self._num_fetches < _MOST_FETCHES
        if self.is_off:
            return False
        known = self._here.get(fetcher)
        if known is None and len(self._here) >= _MOST_LOADERS:
            return False
        return known is None or len(known) < _MOST_FETCHES

    def _note(
        self, fetcher: Untyped, index: object, worker: Untyped, seen: Sequence[Mapping[str, State]]
    ) -> None:
        before, between, after = seen
        with out_of_sight():
            whole = list(index) if isinstance(index, list | tuple) else [index]
            uses = (
                *_uses(before, between, is_for_batch=False),
                *_uses(between, after, is_for_batch=True),
            )
            batch = xxhash.xxh3_64_hexdigest(repr(whole).encode())
        if worker is None:
            kept = self._here.setdefault(fetcher, [])
            kept.append(Fetch(-1, len(kept), batch, len(whole), uses))
            return
        number, self._num_fetches = self._num_fetches, self._num_fetches + 1
        if self._board is not None:
            self._board.write(worker.id, Fetch(worker.id, number, batch, len(whole), uses))


class _Reading:
    """Looks at generators before samples are read, before a batch is made of them, and after."""

    def __init__(self, fetcher: Untyped) -> None:
        self._fetcher, self._collate = fetcher, fetcher.collate_fn
        self.states: list[Mapping[str, State]] = []

    def __enter__(self) -> _Reading:
        self._look()
        self._fetcher.collate_fn = self._collated
        return self

    def __exit__(self, *_: object) -> None:
        self._fetcher.collate_fn = self._collate
        self._look()

    def _collated(self, samples: object) -> object:
        self._look()
        return self._collate(samples)

    def _look(self) -> None:
        found = attempt(_ignore, _states, self._fetcher.dataset)
        self.states += [] if found is None else [found]


def _states(dataset: object) -> dict[str, State]:
    # The state of a generator of torch is a tensor.
    with out_of_sight():
        return states(dataset)


def _ignore(_: Exception) -> None:
    """Leave out what cannot be read: a data set may be anything."""


def fetch_site(iterator: Untyped, main_script: str | None) -> CallSite | None:
    """Return what seeds the workers of an iterator, else what reads its samples."""
    dataset = getattr(type(iterator._dataset), "__getitem__", None)
    for function in (getattr(iterator, "_worker_init_fn", None), dataset):
        while isinstance(function, functools.partial):
            function = function.func
        code = getattr(function, "__code__", None)
        if code is not None and is_user_file(code.co_filename, main_script):
            return CallSite((Frame(code.co_filename, code.co_firstlineno, code.co_name),))
    return None
