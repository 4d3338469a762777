"""Frames survive any way of being cut, and what is no frame is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.transports.frames import (
    MAX_FRAME,
    MAX_HELLO,
    Ack,
    Batch,
    Bye,
    Carriage,
    Challenge,
    FrameReader,
    Hello,
    LinkError,
    Orders,
    Ping,
    Pong,
    Welcome,
    to_bytes,
)

CARRIAGE = Carriage(
    host="10.0.0.1", port=1, token="t", backend="gloo", groups=((0,), ()), deadline_s=8.0
)
FRAMES = [
    Challenge(b"nonce"),
    Hello("session", "host", (2, 3), b"nonce", b"proof"),
    Welcome(7, b"proof"),
    Batch(8, -5, True, ((2, b"record"), (3, b""))),
    Ping(1 << 62),
    Pong(1, 2),
    Ack(8),
    Orders((2,), carriage=CARRIAGE, abort=True),
    Bye(),
]


@given(st.lists(st.integers(1, 60)))
def test_frames_arrive_whole_however_the_stream_is_cut(sizes):
    stream = b"".join(map(to_bytes, FRAMES))
    reader = FrameReader()
    arrived = []
    for size in [*sizes, len(stream)]:
        arrived += reader.feed(stream[:size])
        stream = stream[size:]
    assert arrived == FRAMES


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4),
        b"GET / HTTP/1.1\r\n\r\n",
        (1).to_bytes(4) + b"\xc1",
        (2).to_bytes(4) + msgspec.msgpack.encode([]) + b"\x00",
        (len(deep := b"\x91" * 3000)).to_bytes(4) + deep,
        (len(other := msgspec.msgpack.encode(["Batch", "one", 0, True, []]))).to_bytes(4) + other,
    ],
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(LinkError):
        list(FrameReader().feed(data))


def test_a_reader_may_be_told_to_expect_small_frames_only():
    reader = FrameReader(MAX_HELLO)
    with pytest.raises(LinkError, match="claims"):
        list(reader.feed(to_bytes(Batch(1, 0, True, ((0, bytes(MAX_HELLO)),)))))
