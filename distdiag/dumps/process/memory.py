"""How much memory the container or job of a process may use, and how much is in use."""

from pathlib import Path, PurePosixPath
from typing import Final

from distdiag.events.base import Value

MOUNT: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""The first version of cgroups says the largest number of pages where there is no limit."""


def read_cgroup_memory(groups: str, mount: Path = MOUNT) -> dict[str, Value]:
    """Return `memory_limit_bytes`, `memory_used_bytes` and `oom_kills`, as far as they are known.

    `groups` is what ``/proc/PID/cgroup`` says, in either version of cgroups. Within a container it
    may name the group's path on the host: then the root of what is mounted is the container's own.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            kills = "memory.oom_control"
        elif not controllers:
            root, names, kills = mount, ("memory.max", "memory.current"), "memory.events"
        else:
            continue
        own = root / PurePosixPath(path).relative_to("/")
        folder = own if (own / names[1]).exists() else root
        used = _number(folder / names[1])
        if used is not None:
            limit = _limit(folder, root, names[0])
            found = {"memory_used_bytes": used, "memory_limit_bytes": limit}
            found["oom_kills"] = _count(folder / kills)
            return {name: value for name, value in found.items() if value is not None}
    return {}


def count_oom_kills() -> int:
    """Return how many processes the out-of-memory killer has ended in this process's cgroup.

    On the whole machine, where there is no cgroup that counts.
    """
    here = read_cgroup_memory(_text(Path("/proc/self/cgroup"))).get("oom_kills")
    return here if isinstance(here, int) else _count(Path("/proc/vmstat")) or 0


def _limit(folder: Path, root: Path, name: str) -> int | None:
    """Return the lowest limit of a group and those around it."""
    folders = [folder, *folder.parents] if folder.is_relative_to(root) else [folder]
    limits = [_number(place / name) for place in folders if place.is_relative_to(root)]
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    return min(known, default=None)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _count(path: Path) -> int | None:
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(line[1]) for line in lines if line[:1] == ["oom_kill"]), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
