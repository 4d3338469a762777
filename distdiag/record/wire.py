"""The MessagePack form of events, with repeated values written once.

A stream of records belongs to one rank. Process groups, signatures, frames and call sites are
defined under a number the first time they occur; a collective then is a handful of integers.
"""

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


class Interner:
    """One object for each value, over all ranks, so that equal values are identical."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def __call__(self, value: T) -> T:
        """Return the first object that was equal to this one."""
        first: T = self._values.setdefault(value, value)
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

    def decode(self, payload: bytes | memoryview) -> Event | None:
        """Return the event of one record, or None for a definition.

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
            case DefineGroup():
                self._groups[record.id] = self._interner(record.group)
            case DefineSignature():
                self._signatures[record.id] = self._interner(record.signature)
            case DefineFrame():
                self._frames[record.id] = self._interner(record.frame)
            case DefineSite():
                self._sites[record.id] = self._site(record)
            case _:
                event: Event = record
                return event
        return None

    def _site(self, record: DefineSite) -> CallSite:
        frames = tuple(self._frames[number] for number in record.frames if number in self._frames)
        return self._interner(CallSite(frames, record.module))

    def _collective(self, record: CallRecord) -> Collective:
        try:
            group = self._groups[record.group]
            signature = self._signatures[record.signature]
            site = self._sites[record.site]
        except KeyError as error:
            raise self._undefined(record.seq, error) from None
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

    def _access(self, record: AccessRecord) -> FileAccess:
        fields = msgspec.structs.asdict(record)
        del fields["site"]
        try:
            site = self._sites[record.site]
        except KeyError as error:
            raise self._undefined(record.seq, error) from None
        fields["thread"] = record.thread or "MainThread"
        return FileAccess(rank=self._rank, site=site, **fields)

    def _undefined(self, seq: int, number: KeyError) -> DamagedFileError:
        return DamagedFileError(
            f"event {seq} of rank {self._rank} refers to number {number}, "
            "which was not defined before it"
        )

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
