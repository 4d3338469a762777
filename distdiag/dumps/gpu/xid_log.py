"""The errors that the GPU driver writes to the kernel log: ``NVRM: Xid (PCI:0000:3b:00): 79``."""

import os
import re
from collections.abc import Iterable
from typing import Final

import msgspec

LOG: Final = "/dev/kmsg"
MOST_RECORDS: Final = 50_000
LONGEST: Final = 300

MEANINGS: Final = {
    13: "an exception of a kernel, such as an address out of bounds",
    31: "a memory access that faulted",
    43: "the GPU stopped processing because of the program",
    45: "the work of the process was cancelled",
    48: "a memory error that could not be corrected",
    61: "an internal breakpoint or warning of the GPU",
    62: "an internal halt of the GPU",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
}
"""What the driver's documentation says of the common ones."""

# priority,number,microseconds since the boot,flags;text
_RECORD: Final = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)(?:\.\d)?\): (\d+)(.*)"
)

BusId = tuple[int, int, int]
"""Domain, bus and device."""


class Xid(msgspec.Struct, frozen=True):
    """One error. `time_s` is since the boot."""

    time_s: float
    bus_id: BusId
    number: int
    text: str

    def __str__(self) -> str:
        """Return number and meaning."""
        meaning = MEANINGS.get(self.number)
        return f"Xid {self.number} ({meaning})" if meaning else f"Xid {self.number}"


def parse_bus_id(text: str) -> BusId:
    """Parse ``00000000:3B:00.0``.

    Raises:
        ValueError: it is something else.

    """
    domain, bus, device = text.partition(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)


def parse_xids(records: Iterable[str]) -> list[Xid]:
    """Find the errors in records of the kernel's log, oldest first."""
    found = []
    for record in records:
        match = _RECORD.match(record)
        xid = _XID.search(match[2]) if match else None
        if match and xid:
            place = (int(xid[1], 16), int(xid[2], 16), int(xid[3], 16))
            text = match[2][:LONGEST]
            found.append(Xid(int(match[1]) / 1e6, place, int(xid[4]), text))
    return found


def read_kernel_log(path: str = LOG) -> list[str]:
    """Read the records that the kernel still has; none where that is forbidden."""
    records: list[str] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return records
    try:
        while len(records) < MOST_RECORDS:
            try:
                data = os.read(descriptor, 8192)
            except BrokenPipeError:  # overwritten before it was read: go on with the oldest left
                continue
            if not data:
                break
            records.append(data.decode("utf-8", errors="replace"))
    except OSError:  # the end, or not permitted
        pass
    finally:
        os.close(descriptor)
    return records
