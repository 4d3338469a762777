"""The way of what programs do most: a file is opened for reading, or asked for.

What stands here could be said in half the lines. It is written so that as little as possible
happens for each file: no object but the record, no call that can be avoided.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Final

from distdiag.event import FileAction
from distdiag.probes.file_paths import NO_NAMES, FilePaths
from distdiag.probes.file_sites import USER, FileSites, Stack
from distdiag.recorder import Recorder

MOST_LOOKS: Final = 1_000
"""After so many looks from one place of the program those into folders that have not changed since
the start of the run are left out: a data set, not what ranks pass to one another."""

MOST_SEEN: Final = 100_000
_CLOCK_SKEW_S: Final = 60.0

Look = Callable[[str, FrameType, str, bool | None], int | None]


class FileLooks:
    """Writes each look down once between two events that could order it."""

    def __init__(
        self,
        recorder: Recorder,
        paths: FilePaths,
        sites: FileSites,
        before_sync: Callable[[], None],
    ) -> None:
        """Write looks with this recorder, and have `before_sync` called when they are over."""
        self._recorder = recorder
        self._paths = paths
        self._before_sync = before_sync
        self._new_since_s = time.time() - _CLOCK_SKEW_S
        self._num_looks: Counter[Stack] = Counter()
        self._old_folders: dict[str, bool] = {}
        self.seen: set[tuple[object, ...]] = set()
        self.look: Look = self._looking(sites)
        """Write down that a file is looked at, from this frame, by this function; the last argument
        is the answer to a question, None if the file is opened. Returns the event number, None if
        it says nothing new."""

    def _looking(self, sites: FileSites) -> Look:
        # Looked up here once: each attribute costs in a place where microseconds count.
        recorder, here, paths = self._recorder, self._recorder.here, self._paths
        kinds, seen, access = sites.kinds, self.seen, recorder.access
        find, stack_of, find_site = paths.find, sites.stack, sites.find
        num_looks, is_old = self._num_looks, self._is_old
        read, test, before_sync = FileAction.READ, FileAction.TEST, self._before_sync

        def look(path: str, frame: FrameType, api: str, found: bool | None) -> int | None:
            code = id(frame.f_code)
            if kinds.get(code) == USER:
                stack: Stack | None = (code + frame.f_lasti,)
            else:
                stack = stack_of(frame)
            key = (path, api, found, stack)
            if stack is None or key in seen:
                return None
            context = here.context
            if context.in_file_call:
                return None
            cut = path.rfind("/") + 1
            folder, name, is_shared = paths.plain.get(path[:cut]), path[cut:], False
            if folder is not None and name not in NO_NAMES and name.isascii():
                full, written = folder + name, path
            else:
                place = find(path)
                if place is None:
                    return None
                full, written, is_shared = place
            num_looks[stack] = number = num_looks[stack] + 1
            if number > MOST_LOOKS and is_old(full):
                return None
            site = recorder.tables.sites.get(stack) if context.name is None else None
            site = site or find_site(stack, frame, context)
            if found is None and not is_shared and context.name is None:
                seq = access(read, full, written, site.number)  # all else is as usual
            else:
                more = (api, "", is_shared, False, found, False, None, context.name)
                seq = access(read if found is None else test, full, written, site.number, *more)
            if len(seen) > MOST_SEEN:
                seen.clear()
            seen.add(key)
            recorder.before_sync = before_sync
            return seq

        return look

    def forget(self, path: str, stack: Stack) -> None:
        """Let an attempt to open be written again."""
        self.seen.discard((path, "open", None, stack))

    def see_anew(self) -> None:
        """Let what comes now be written again: something ordered it."""
        self.seen.clear()
        self._old_folders.clear()

    def _is_old(self, path: str) -> bool:
        folder = path[: path.rfind("/") + 1]
        known = self._old_folders.get(folder)
        if known is None:
            try:
                known = os.stat(folder).st_mtime < self._new_since_s
            except OSError:
                known = True
            self._old_folders[folder] = known
        return known
