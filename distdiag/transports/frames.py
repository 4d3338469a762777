"""The frames that monitors exchange over TCP: a length and a MessagePack value.

A connection begins with the `Challenge` of the reporter's monitor, the `Hello` of a node's, which
must answer it, and the `Welcome` of the reporter's, which answers the node's (see `handshake`).
Then the node sends `Batch` and `Ping`, the reporter `Ack`, `Pong` and
`Orders`. A `Bye` says that all ranks of the node are gone and everything was sent.
"""

import struct
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from distdiag.events.errors import UNDECODABLE
from distdiag.transports.handshake import Key

MAX_FRAME: Final = 4 << 20
"""No frame is longer than this, in bytes; a longer one means that the peer is not ours."""
MAX_HELLO: Final = 64 << 10
_LENGTH: Final = struct.Struct(">I")


class LinkError(Exception):
    """The peer does not speak as it should."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, tag_field="kind"):
    pass


class Challenge(_Frame, frozen=True):
    """Asks who has connected to show that it holds the key."""

    nonce: bytes


class Hello(_Frame, frozen=True):
    """Who connects. `session` tells a monitor from another one that watches the same ranks.

    `proof` answers the challenge, and `nonce` asks the reporter for the same.
    """

    session: str
    hostname: str
    ranks: tuple[int, ...]
    nonce: bytes
    proof: bytes = b""

    def prove(self, key: Key, challenge: bytes) -> bytes:
        """Return what `proof` is to be, from one who holds the key."""
        said = (self.session, self.hostname, self.ranks, self.nonce)
        return key.proof("node", challenge, *said)


class Welcome(_Frame, frozen=True):
    """Its key is right; batches up to this number have been received from the session."""

    received: int
    proof: bytes = b""

    def prove(self, key: Key, challenge: bytes, nonce: bytes) -> bytes:
        """Return what `proof` is to be, from one who holds the key."""
        return key.proof("reporter", challenge, nonce, self.received)


class Ping(_Frame, frozen=True):
    """Ask for the time; `sent_ns` is the sender's own monotonic clock."""

    sent_ns: int


class Pong(_Frame, frozen=True):
    """Answer a `Ping` at once with the time of this monotonic clock."""

    sent_ns: int
    here_ns: int


class Batch(_Frame, frozen=True):
    """Records of some ranks, as they stand in the event files; numbered from 1 without gaps.

    `offset_ns` is to be added to the node's clock to have the reporter's. `is_all` says that
    nothing more was there to be sent when the batch was made.
    """

    number: int
    offset_ns: int
    is_all: bool
    records: tuple[tuple[int, bytes], ...]


class Ack(_Frame, frozen=True):
    """Batches up to this number have been received."""

    number: int


class Carriage(msgspec.Struct, frozen=True, kw_only=True):
    """Carriers, one for each group of ranks, meet at this address to bring dumps to the first."""

    host: str
    port: int
    token: str
    backend: Literal["nccl", "gloo"]
    groups: tuple[tuple[int, ...], ...]
    deadline_s: float


class Orders(_Frame, frozen=True):
    """What the reporter wants of a node now; a later frame takes the place of an earlier one.

    `stacks` are ranks whose stacks are wanted: by a `carriage` if there is one, else with the other
    events, or not at all but on the node's own disk (`keep`). `abort` asks to kill the ranks,
    `done` says that the report is finished and nobody listens any more.
    """

    stacks: tuple[int, ...] = ()
    keep: bool = False
    carriage: Carriage | None = None
    abort: bool = False
    done: bool = False


class Bye(_Frame, frozen=True):
    """All ranks of the node are gone and everything was sent."""


AnyFrame = Challenge | Hello | Welcome | Ping | Pong | Batch | Ack | Orders | Bye

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(AnyFrame).decode


def to_bytes(frame: AnyFrame) -> bytes:
    """Return a frame with its length in front."""
    payload = _encode(frame)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        """Refuse frames longer than `limit` bytes."""
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnyFrame]:
        """Take in what was received; yield the frames that are whole now.

        Raises:
            LinkError: it is no frame, or one longer than the limit.

        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self.limit:
                raise LinkError(f"a frame claims {size} bytes")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _frame(payload)


def _frame(payload: bytes) -> AnyFrame:
    try:
        frame: AnyFrame = _decode(payload)
    except UNDECODABLE as error:
        raise LinkError(f"not a frame: {error}") from None
    return frame
