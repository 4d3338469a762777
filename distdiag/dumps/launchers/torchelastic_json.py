"""The error file that torchelastic's ``record`` writes for a rank that raised."""

from collections.abc import Iterator
from typing import Final

import msgspec

from distdiag.dumps.logs.tracebacks import chains, text_of
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.lifecycle import Raised

_HEAD: Final = 4096


class _Extra(msgspec.Struct, frozen=True):
    py_callstack: str = ""
    timestamp: str | int = 0


class _Message(msgspec.Struct, frozen=True):
    message: str = ""
    extra: _Extra = msgspec.field(name="extraInfo", default_factory=_Extra)


class _ErrorFile(msgspec.Struct, frozen=True):
    message: _Message


_decode: Final = msgspec.json.Decoder(_ErrorFile).decode


class TorchelasticJson(DumpReader):
    """Read the exception of one rank, with the time when it was raised."""

    name = "torchelastic-json"

    def recognises(self, dump: Dump) -> bool:
        """Look for the names of the two fields."""
        head = dump.data[:_HEAD].lstrip()
        return head.startswith(b"{") and b'"message"' in head and b'"extraInfo"' in dump.data

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the exception; the file does not say whose it is."""
        try:
            message = _decode(dump.data).message
        except (*UNDECODABLE, ValueError) as error:
            raise DamagedFileError(f"{dump.path}: not a torchelastic error file: {error}") from None
        callstack = message.extra.py_callstack
        found = list(chains(iter(callstack.splitlines()), is_pure=True))
        kind, _, text = message.message.partition(": ")
        block = found[-1].last if found else None
        raised = Raised(
            rank=UNKNOWN_RANK,
            seq=-1,
            time_ns=_seconds(message.extra.timestamp) * 1_000_000_000,
            type=block.type if block and block.type else kind,
            message=block.message if block and block.type else text,
            frames=tuple(block.frames) if block else (),
            traceback=text_of(callstack.splitlines()),
        )
        yield RankDump(rank=None, events=(raised,), path=dump.path, source=self.name)


def _seconds(timestamp: str | int) -> int:
    text = str(timestamp)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0
