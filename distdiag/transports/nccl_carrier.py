"""One carrier: ``python -m distdiag.transports.nccl_carrier < errand``.

It waits for its parcel, brings it to the first carrier, and ends. It never outlives its time.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec

from distdiag.record.run_dir import write_atomically
from distdiag.transports.carriers import MOST_BYTES, Errand, arrived_path, parcel_path


def main() -> None:
    """Run the errand that stands on standard input."""
    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    # The default action ends the process, in whatever library it is stuck.
    signal.setitimer(signal.ITIMER_REAL, errand.carriage.deadline_s)
    sys.excepthook = _fail
    _run(errand)
    # Taking the communicator down could block, and nobody needs it any more.
    os._exit(0)


def _fail(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """End with what was raised as the last line of the log, which is what the monitor reads."""
    message = str(error).partition("\n")[0]
    sys.stderr.write(f"\n{kind.__name__}: {message}\n")
    sys.stderr.flush()
    os._exit(1)


def _run(errand: Errand) -> None:
    from distdiag.transports.nccl import Gathering

    folder = Path(errand.folder)
    gathering = Gathering(errand)
    gathering.gather(
        _parcel(folder, errand.number),
        lambda number, data: write_atomically(arrived_path(folder, number), data),
    )


def _parcel(folder: Path, number: int) -> bytes:
    path = parcel_path(folder, number)
    while not path.exists():
        time.sleep(0.01)
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes are too many to carry")
    return data


if __name__ == "__main__":
    main()
