"""The MessagePack form of events, with repeated values written once.

A stream of records belongs to one rank. Process groups, signatures, frames and call sites are
defined under a number the first time they occur; a collective then is a handful of integers.
Numbers rise and are not used again. Once there are very many definitions, all are forgotten and
come again, under other numbers, when they are needed.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import reduce
from importlib import import_module
from operator import or_
from pkgutil import iter_modules
from typing import Any, Final, TypeVar

import msgspec

from distdiag.events.base import CallSite, Event, Frame
from distdiag.events.collectives import Collective, CollectiveState, ProcessGroup, Signature
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.files import FileAccess, FileAction
from distdiag.events.lifecycle import EventsLost
from distdiag.events.ranks import RankSet

T = TypeVar("T", bound=Hashable)

MAX_RECORD: Final = 1 << 20
"""No record is longer than this, in bytes; a longer one means a damaged file."""


class _Record(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class DefineGroup(_Record, frozen=True, tag="G"):
    """Give a process group a number."""

    id: int
    group: ProcessGroup


class DefineSignature(_Record, frozen=True, tag="S"):
    """Give a signature a number."""

    id: int
    signature: Signature


class DefineFrame(_Record, frozen=True, tag="F"):
    """Give a frame a number."""

    id: int
    frame: Frame


class DefineSite(_Record, frozen=True, tag="L"):
    """Give a call site a number; `frames` are numbers of frames, innermost first."""

    id: int
    frames: tuple[int, ...]
    module: str | None


class DefinitionsForgotten(_Record, frozen=True, tag="Z"):
    """From now on numbers are those of later definitions.

    A thread that was just looking one up may still use one of those between this record and the
    one before.
    """


class CallRecord(_Record, frozen=True, tag="C"):
    """A `Collective` whose group, signature and site are numbers."""

    seq: int
    time_ns: int
    step: int
    group: int
    collective_seq_id: int
    signature: int
    site: int
    is_async: bool
    thread: str | None
    api: str | None


class StateRecord(_Record, frozen=True, tag="T"):
    """A `CollectiveState`; `state` is an index into `STATES`."""

    seq: int
    time_ns: int
    step: int
    call: int
    state: int


class AccessRecord(_Record, frozen=True, tag="A"):
    """A `FileAccess` whose site is a number; the fields behind it are often left out."""

    seq: int
    time_ns: int
    step: int
    action: FileAction
    path: str
    written: str
    site: int
    api: str = "open"
    origin: str = ""
    is_shared: bool = False
    is_exclusive: bool = False
    found: bool | None = None
    has_end: bool = False
    moved: str | None = None
    thread: str | None = None


STATES: Final = ("issued", "waited", "completed", "failed", "dropped")


def _defined_events() -> Iterator[type[Event]]:
    package = import_module("distdiag.events")
    for module in iter_modules(package.__path__, "distdiag.events."):
        for value in vars(import_module(module.name)).values():
            is_event = isinstance(value, type) and issubclass(value, Event)
            if is_event and value is not Event and value.__module__ == module.name:
                yield value


EVENTS: Final[tuple[type[Event], ...]] = tuple(_defined_events())
"""All that the modules of `events` define: a new event needs no entry anywhere."""

_RECORDS: Final = (
    DefineGroup,
    DefineSignature,
    DefineFrame,
    DefineSite,
    DefinitionsForgotten,
    CallRecord,
    StateRecord,
    AccessRecord,
    *EVENTS,
)


def plain(value: object) -> list[int] | str:
    """Return what stands for a value on the wire; libraries make subclasses of text."""
    if isinstance(value, RankSet):
        return list(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def decode_rank_set(kind: type, value: object) -> object:
    """Return a set of ranks from its form on the wire."""
    return kind(msgspec.convert(value, tuple[int, ...]))


encode: Final[Callable[[object], bytes]] = msgspec.msgpack.Encoder(enc_hook=plain).encode
_decode_record: Final = msgspec.msgpack.Decoder(reduce(or_, _RECORDS)).decode


FORGOTTEN: Final = encode(DefinitionsForgotten())


class Interner:
    """One object for each value, over all ranks, so that equal values are identical.

    A value is known for as long as anybody holds it.
    """

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, value: T) -> T:
        """Return the first object that was equal to this one."""
        known = self._values.get(value)
        first: T | None = known() if known is not None else None
        if first is None:
            self._values[value] = weakref.ref(value)
            return value
        return first


class EventDecoder:
    """Turn the records of one rank back into events."""

    def __init__(self, rank: int, interner: Interner) -> None:
        """Decode for this rank; equal values of ranks that share `interner` become identical."""
        self._rank = rank
        self._interner = interner
        self._groups: dict[int, ProcessGroup] = {}
        self._signatures: dict[int, Signature] = {}
        self._frames: dict[int, Frame] = {}
        self._sites: dict[int, CallSite] = {}
        self._newest = self._newest_forgotten = -1
        self._has_lost = False

    def decode(self, payload: bytes | memoryview) -> Event | None:
        """Return the event of one record, or None for a definition.

        There is none either where records were lost that define something.

        Raises:
            DamagedFileError: the record is not one of ours, or refers to what was never defined.

        """
        try:
            record = _decode_record(payload)
        except UNDECODABLE as error:
            raise DamagedFileError(f"a record of rank {self._rank} is damaged: {error}") from None
        match record:
            case CallRecord():
                return self._collective(record)
            case StateRecord():
                return self._state(record)
            case AccessRecord():
                return self._access(record)
            case DefineGroup() | DefineSignature() | DefineFrame() | DefineSite():
                self._define(record)
            case DefinitionsForgotten():
                self._forget()
            case _:
                event: Event = record
                self._has_lost |= isinstance(event, EventsLost)
                return event
        return None

    def _define(self, record: DefineGroup | DefineSignature | DefineFrame | DefineSite) -> None:
        self._newest = max(self._newest, record.id)
        match record:
            case DefineGroup():
                self._groups[record.id] = self._interner(record.group)
            case DefineSignature():
                self._signatures[record.id] = self._interner(record.signature)
            case DefineFrame():
                self._frames[record.id] = self._interner(record.frame)
            case DefineSite():
                self._sites[record.id] = self._site(record)

    def _forget(self) -> None:
        """Forget the definitions of the time before the one that has just come to its end."""
        tables: tuple[dict[int, Any], ...]
        tables = (self._groups, self._signatures, self._frames, self._sites)
        for table in tables:
            for number in [number for number in table if number <= self._newest_forgotten]:
                del table[number]
        self._newest_forgotten = self._newest

    def _site(self, record: DefineSite) -> CallSite:
        frames = tuple(self._frames[number] for number in record.frames if number in self._frames)
        return self._interner(CallSite(frames, record.module))

    def _collective(self, record: CallRecord) -> Collective | None:
        try:
            group = self._groups[record.group]
            signature = self._signatures[record.signature]
            site = self._sites[record.site]
        except KeyError as error:
            self._undefined(record.seq, error)
            return None
        return Collective(
            rank=self._rank,
            seq=record.seq,
            time_ns=record.time_ns,
            step=record.step,
            group=group,
            collective_seq_id=record.collective_seq_id,
            signature=signature,
            site=site,
            is_async=record.is_async,
            thread=record.thread or "MainThread",
            api=record.api,
        )

    def _access(self, record: AccessRecord) -> FileAccess | None:
        fields = msgspec.structs.asdict(record)
        del fields["site"]
        try:
            site = self._sites[record.site]
        except KeyError as error:
            self._undefined(record.seq, error)
            return None
        fields["thread"] = record.thread or "MainThread"
        return FileAccess(rank=self._rank, site=site, **fields)

    def _undefined(self, seq: int, number: KeyError) -> None:
        if not self._has_lost:
            raise DamagedFileError(
                f"event {seq} of rank {self._rank} refers to number {number}, "
                "which was not defined before it"
            ) from None

    def _state(self, record: StateRecord) -> CollectiveState:
        if not 0 <= record.state < len(STATES):
            raise DamagedFileError(f"event {record.seq} of rank {self._rank} has no known state")
        return CollectiveState(
            rank=self._rank,
            seq=record.seq,
            time_ns=record.time_ns,
            step=record.step,
            call=record.call,
            state=STATES[record.state],
        )
