"""Short-lived processes that carry dumps to one place over a process group of their own.

A carrier has its own CUDA context and its own communicator, so that it gets through where the
training processes are stuck. It exists only while dumps are carried.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from distdiag.events.base import Event
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.record.private_file import make_private_folder
from distdiag.record.run_dir import write_atomically
from distdiag.record.wire import EventDecoder, Interner, encode
from distdiag.transports.frames import Carriage

Backend = Literal["nccl", "gloo"]

_LEFT_OUT: Final = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_COMM_ID",  # the training's own rendezvous
    "NCCL_DEBUG",
    "TORCHELASTIC_",
    "TORCH_DISTRIBUTED_DEBUG",
)
_SMALL: Final = {
    # One channel with small buffers: little memory of a GPU that may be full.
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_BUFFSIZE": "65536",
    # The carriers must neither answer for the training nor overwrite what it left behind.
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "OMP_NUM_THREADS": "1",
}
MOST_BYTES: Final = 256 << 20
"""No payload is larger than this."""


class CarriageError(Exception):
    """The dumps could not be carried this way; the message says why."""


def usable_backend() -> Backend:
    """Return nccl if this machine has GPUs, else gloo. No library is loaded to find out."""
    return "nccl" if any(Path("/dev").glob("nvidia[0-9]*")) else "gloo"


def plan_carriage(
    host: str, groups: Iterable[Sequence[int]], *, backend: Backend, deadline_s: float
) -> tuple[Carriage, socket.socket]:
    """Open a port for carriers to meet at, one for each group of ranks; the first gets all dumps.

    The socket is for the first carrier, which is to be started on this machine.

    Raises:
        OSError: the address is not one of this machine.

    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    meeting = socket.create_server(address[:2], family=family)
    carriage = Carriage(
        host=host,
        port=meeting.getsockname()[1],
        token=secrets.token_hex(16),
        backend=backend,
        groups=tuple(tuple(group) for group in groups),
        deadline_s=deadline_s,
    )
    return carriage, meeting


class Carriers:
    """The carriers of one machine for one carriage."""

    def __init__(
        self,
        folder: Path,
        carriage: Carriage,
        ranks: Iterable[int],
        *,
        meeting: socket.socket | None = None,
    ) -> None:
        """Start the carriers of these ranks, in time for what `load` will bring them.

        With `meeting` the first carrier is among them. Files are kept in `folder`, which is made.

        Raises:
            OSError: they cannot be started.

        """
        here = frozenset(ranks)
        self.folder = folder
        self.carriage = carriage
        self._until_s = time.monotonic() + carriage.deadline_s
        self._numbers = [
            number
            for number, group in enumerate(carriage.groups)
            if (number == 0 and meeting is not None) or (group and here.issuperset(group))
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        make_private_folder(folder)
        try:
            for index, number in enumerate(self._numbers):
                self._processes[number] = self._start(number, index, meeting)
        except OSError:
            self.kill()
            raise
        finally:
            if meeting is not None:
                meeting.close()

    def _start(
        self, number: int, index: int, meeting: socket.socket | None
    ) -> subprocess.Popen[bytes]:
        descriptor = meeting.fileno() if meeting is not None and number == 0 else None
        command = Errand(
            carriage=self.carriage,
            number=number,
            device=index,
            descriptor=descriptor,
            folder=str(self.folder),
        )
        with (self.folder / f"carrier-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "distdiag.transports.nccl_carrier"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
                pass_fds=() if descriptor is None else (descriptor,),
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(command))
        return process

    def load(self, payloads: Mapping[int, bytes]) -> None:
        """Give the carriers what they wait for: of each rank what is to be carried.

        Raises:
            OSError: the disk is full.

        """
        for number in self._numbers:
            group = self.carriage.groups[number]
            parcel = {rank: payloads[rank] for rank in group if rank in payloads}
            path = parcel_path(self.folder, number)
            write_atomically(path, msgspec.msgpack.encode(parcel))

    @property
    def is_over(self) -> bool:
        """Whether all have ended; when the time is up they are made to."""
        running = [p for p in self._processes.values() if p.poll() is None]
        if running and time.monotonic() > self._until_s:
            self.kill()
            return True
        return not running

    def result(self) -> dict[int, bytes]:
        """Return what arrived here by rank, after all have ended: something at the first one only.

        Raises:
            CarriageError: not everything was carried.

        """
        for number, process in self._processes.items():
            if process.returncode != 0:
                raise CarriageError(self._reason(number, process.returncode))
        if 0 not in self._processes:
            return {}
        arrived: dict[int, bytes] = {}
        try:
            for number, group in enumerate(self.carriage.groups):
                data = arrived_path(self.folder, number).read_bytes()
                parcel = msgspec.msgpack.decode(data, type=dict[int, bytes])
                arrived |= {rank: parcel[rank] for rank in parcel if rank in group}
        except (OSError, *UNDECODABLE) as error:
            raise CarriageError(f"what arrived cannot be read: {error}") from None
        return arrived

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _reason(self, number: int, status: int) -> str:
        if status < 0:
            return f"a carrier was not done within {self.carriage.deadline_s:.3g} s"
        log = (self.folder / f"carrier-{number}.log").read_text(errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return f"a carrier ended with {lines[-1][:200] if lines else f'status {status}'}"


def pack(events: Iterable[Event]) -> bytes:
    """Return events as one payload."""
    return msgspec.msgpack.encode([encode(event) for event in events])


def unpack(rank: int, payload: bytes, interner: Interner) -> Iterator[Event]:
    """Yield the events of a payload.

    Raises:
        DamagedFileError: it holds something else than events of this rank.

    """
    decoder = EventDecoder(rank, interner)
    try:
        records = msgspec.msgpack.decode(payload, type=list[bytes])
    except UNDECODABLE as error:
        raise DamagedFileError(f"what was carried for rank {rank} is damaged: {error}") from None
    for record in records:
        event = decoder.decode(record)
        if event is None or event.rank != rank:
            raise DamagedFileError(f"what was carried for rank {rank} is of somebody else")
        yield event


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What one carrier reads from its standard input.

    `descriptor` is a listening socket that it has inherited (the first carrier), `device` the
    number of its GPU on this machine.
    """

    carriage: Carriage
    number: int
    device: int
    descriptor: int | None
    folder: str


def parcel_path(folder: Path, number: int) -> Path:
    """Return where a carrier finds what it is to carry; it waits until that is there."""
    return folder / f"parcel-{number}"


def arrived_path(folder: Path, number: int) -> Path:
    """Return where the first carrier leaves what another one has carried."""
    return folder / f"arrived-{number}"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    return kept | _SMALL
