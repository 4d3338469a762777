"""The calls that create and destroy process groups, made by members and non-members alike."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from distdiag.events.collectives import GroupCreated
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import api_of, site_here
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard
from distdiag.record.recorder import Recorder


class _Asked(NamedTuple):
    """What a call that creates groups asks for."""

    scope: tuple[int, ...]
    ranks: tuple[int, ...]
    desc: str = ""
    timeout_s: float | None = None
    backend: str = ""


def _backend(given: object) -> str:
    """Return the backends by device that torch makes of a name, such as ``cpu:gloo,cuda:nccl``."""
    name = distributed_c10d.Backend(str(given) if given else "undefined")
    return str(distributed_c10d.BackendConfig(name))


def _inherited_backend(group: Untyped) -> str:
    return str(distributed_c10d._world.pg_backend_config.get(group, ""))


def _seconds(timeout: object) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else None


def _world() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else ()


def _members(group: Untyped) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else ()


def _ask_init(given: dict[str, Any]) -> _Asked:
    size = given["world_size"] or -1
    size = int(os.environ.get("WORLD_SIZE", "1")) if size < 0 else size
    world = tuple(range(size))
    backend = _backend(given.get("backend"))
    return _Asked(world, world, "default_pg", _seconds(given.get("timeout")), backend)


def _ask_new(given: dict[str, Any]) -> _Asked:
    ranks = _world() if given["ranks"] is None else tuple(map(int, given["ranks"]))
    scope = tuple(sorted(ranks)) if given.get("use_local_synchronization") else _world()
    backend = _inherited_backend(dist.group.WORLD)
    if given.get("backend"):
        backend = _backend(given["backend"])
    desc, timeout_s = given.get("group_desc") or "", _seconds(given.get("timeout"))
    return _Asked(scope, ranks, desc, timeout_s, backend)


def _ask_split(given: dict[str, Any]) -> _Asked:
    # The ranks of all parts one after the other: every caller passes the same.
    parent = _members(given["parent_pg"])
    ranks = tuple(parent[int(rank)] for part in given["split_ranks"] or () for rank in part)
    backend = _inherited_backend(given["parent_pg"] or dist.group.WORLD)
    desc, timeout_s = given.get("group_desc") or "", _seconds(given.get("timeout"))
    return _Asked(parent, ranks, desc, timeout_s, backend)


def _ask_destroy(given: dict[str, Any]) -> _Asked:
    group = given["group"]
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    ranks = _members(group)
    return _Asked(ranks, ranks, getattr(group, "group_desc", ""))


_CALLS = {
    "init_process_group": _ask_init,
    "new_group": _ask_new,
    "split_group": _ask_split,
    "destroy_process_group": _ask_destroy,
}


class ProcessGroups(Probe):
    """Records each call before and after, numbered within the ranks that must all make it.

    Functions that create several groups (`new_subgroups`, device meshes) call these in turn; the
    one that the user called is the `api`.
    """

    name: ClassVar[str] = "process-groups"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._ordinals: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._inside_of: set[int] = set()

    def _install(self) -> None:
        for name in _CALLS:
            if name in vars(distributed_c10d):
                self._patches.wrap_everywhere(distributed_c10d, name, self._wrapper)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        name = original.__name__
        signature = inspect.signature(original)

        @wrap_like(original)
        def function(*args: object, **kwargs: object) -> object:
            if self.is_off or threading.get_ident() in self._inside_of:
                return original(*args, **kwargs)
            fields = None
            with Guard(self._tolerate):
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                fields = self._before(name, given.arguments, sys._getframe())
            try:
                with self._inside():
                    result = original(*args, **kwargs)
            except BaseException:
                if fields is not None and name == "init_process_group":
                    self.recorder.generation -= 1
                raise
            if fields is not None:
                self._after(fields, result)
            return result

        return function

    def _tolerate(self, error: Exception) -> None:
        # Arguments that torch itself will refuse are no failure of the probe.
        if not isinstance(error, TypeError | ValueError):
            self.fail(error)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        # new_group may be made of split_group: one call of the program, one event.
        thread = threading.get_ident()
        self._inside_of.add(thread)
        try:
            yield
        finally:
            self._inside_of.discard(thread)

    def _before(self, name: str, given: dict[str, Any], frame: Untyped) -> dict[str, Any]:
        asked = _CALLS[name](given)
        if name == "init_process_group":
            self.recorder.generation += 1
        generation = self.recorder.generation
        key = (generation, asked.scope)
        ordinal = self._ordinals[key]
        if name != "destroy_process_group":
            self._ordinals[key] += 1
        site = site_here(self.recorder, frame)
        api, _ = api_of(site.frames)
        fields = {
            "api": api or name,
            "ordinal": ordinal,
            "scope": asked.scope,
            "ranks": asked.ranks,
            "desc": asked.desc,
            "generation": generation,
            "site": site,
            "timeout_s": asked.timeout_s,
            "backend": asked.backend,
            "thread": self.recorder.here.context.name or "MainThread",
        }
        self.recorder.event(GroupCreated, **fields, done=False)
        return fields

    def _after(self, fields: dict[str, Any], result: object) -> None:
        if not self.is_off:
            with self.guard:
                name = result.group_name if isinstance(result, dist.ProcessGroup) else ""
                self.recorder.event(GroupCreated, **fields, done=True, name=name)
