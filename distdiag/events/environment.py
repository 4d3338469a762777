"""What is observed of the surroundings of a rank: variables, versions, devices, the source."""

from enum import StrEnum

import msgspec

from distdiag.events.base import Event


class FactKind(StrEnum):
    """What a fact is about."""

    VARIABLE = "variable"  # of the environment
    VERSION = "version"  # of Python, a package, a driver, the system
    DEVICE = "device"  # what the rank computes on
    SETTING = "setting"  # of torch: TF32, threads, determinism
    SEED = "seed"
    CODE = "code"  # the commit of the program, and what was changed since
    LAUNCH = "launch"  # the command, the number of ranks


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """One thing that may differ between ranks or runs; secrets are hidden in `value`."""

    kind: FactKind
    name: str
    value: str


class Surroundings(Event, frozen=True, kw_only=True):
    """What a rank runs in, as it was at its first collective, or else at its end."""

    facts: tuple[Fact, ...]


class NodeClock(Event, frozen=True, kw_only=True):
    """The wall clock of a node at `time_ns`, which the clocks of the job's nodes are compared by.

    Its monitor reads it, and `rank` is the lowest of its ranks. On the way to another node
    `time_ns` becomes the time of the clock there, which is known within `error_ns`.
    """

    hostname: str
    unix_ns: int
    error_ns: int = 0

    @property
    def ahead_ns(self) -> int:
        """How far the wall clock is ahead of the one clock by which all events are ordered."""
        return self.unix_ns - self.time_ns


class SourceSeen(Event, frozen=True, kw_only=True):
    """The source of a program when it was started: the script, and what git tells of the folder.

    `script` is its text, `changes` what differs from the `commit` as a diff: at most 64 KiB of
    each, with secrets hidden; the digests are of all. `commit` is empty where git knows nothing.
    """

    script: str
    script_digest: str
    commit: str = ""
    branch: str = ""
    changes: str = ""
    changes_digest: str = ""
