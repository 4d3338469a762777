"""Writes accesses to files down: each once between two events that could order it."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any, Final, NamedTuple

from distdiag.events.base import Frame
from distdiag.events.files import FileAction, FileClosed, FileContent
from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.files.open_files import IsOpen, OpenFile, OpenFiles
from distdiag.probes.files.paths import NO_NAMES, FilePaths, Place
from distdiag.probes.files.sites import USER, FileSites, Stack
from distdiag.probes.patching.in_place import as_it_was
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal, Unsubscribe

# An access to a file on its way into the event file.

RELEASES: Final = frozenset(
    {
        FileAction.WRITE,
        FileAction.APPEND,
        FileAction.RENAME,
        FileAction.LINK,
        FileAction.REMOVE,
        FileAction.REMOVE_TREE,
        FileAction.MAKE_DIR,
        FileAction.UNLOCK,
    }
)
"""What another rank can notice: for both of them, all that this rank did came before it."""

MOVES: Final = frozenset(
    {FileAction.RENAME, FileAction.LINK, FileAction.REMOVE, FileAction.REMOVE_TREE}
)


class Attempt(NamedTuple):
    """What is done with a path, as the program wrote it, and by which function.

    The rest is as in `FileAccess`; `state` is what else makes it another attempt, such as the time
    when a folder changed. Questions are no attempts: they have been answered when they are known.
    """

    action: FileAction
    path: str
    api: str
    origin: str = ""
    is_exclusive: bool = False
    has_end: bool = False
    state: Hashable = None


Key = tuple[Attempt, Stack]


class Access:
    """An attempt that is worth a record.

    `seq` is its event number. While that is None it waits for its success, and `frame` says where
    it is made; afterwards `frames` do.
    """

    __slots__ = ("frame", "frames", "key", "moved", "origin", "place", "seq")

    def __init__(self, key: Key, place: Place, frame: FrameType) -> None:
        self.key = key
        self.place = place
        self.frame: FrameType | None = frame
        self.frames: tuple[Frame, ...] = ()
        self.origin = ""
        self.moved: str | None = None
        self.seq: int | None = None


# What small files hold, so that writing the same again is no race.

LARGEST_CONTENT: Final = 1 << 16
LARGEST_MOVED: Final = 1 << 22
BLOCK: Final = 1 << 12
_CHUNK: Final = 1 << 20


def content_of(path: str) -> FileContent | None:
    """Return what a small regular file holds now, None if it is anything else."""
    descriptor = _open_to_read(path)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_CONTENT:
            return None
        data = os.read(descriptor, status.st_size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    blocks = (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))
    return FileContent(len(data), tuple(zlib.crc32(block) for block in blocks))


def digest_of(path: str) -> str | None:
    """Return a digest of a regular file of moderate size, None if it is anything else."""
    descriptor = _open_to_read(path, os.O_NOFOLLOW)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_MOVED:
            return None
        digest = hashlib.blake2b(digest_size=16)
        while chunk := os.read(descriptor, _CHUNK):
            digest.update(chunk)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _open_to_read(path: str, flags: int = 0) -> int | None:
    try:
        # Never waits, should somebody have made a pipe of it.
        return as_it_was(os.open)(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError:
        return None


# The way of what programs do most: a file is opened for reading, or asked for.
#
# What stands here could be said in half the lines. It is written so that as little as possible
# happens for each file: no object but the record, no call that can be avoided.

MOST_LOOKUPS: Final = 1_000
"""After so many lookups from one place of the program those into folders that have not changed
since the start of the run are left out: a data set, not what ranks pass to one another."""

MOST_SEEN: Final = 100_000
_CLOCK_SKEW_S: Final = 60.0

Lookup = Callable[[str, FrameType, str, bool | None], int | None]


class SyncWait:
    """Listens for events that order accesses, while there are accesses that they could order."""

    __slots__ = ("_before_sync", "_callback", "_unsubscribe", "is_on")

    def __init__(self, before_sync: Signal[[bool]], callback: Callable[[bool], None]) -> None:
        """Listen to nothing yet; `callback` is called when such an event is about to be written."""
        self._before_sync = before_sync
        self._callback = callback
        self._unsubscribe: Unsubscribe | None = None
        self.is_on = False

    def begin(self) -> None:
        """Listen from now on."""
        self._unsubscribe = self._before_sync.subscribe(self._callback)
        self.is_on = True

    def end(self) -> None:
        """Listen no longer."""
        self.is_on = False
        if self._unsubscribe is not None:
            self._unsubscribe()


class FileLookups:
    """Writes each lookup down once between two events that could order it."""

    def __init__(
        self,
        recorder: Recorder,
        paths: FilePaths,
        sites: FileSites,
        sync: SyncWait,
        begins: Signal[[]],
    ) -> None:
        """Say on `begins` that an access comes."""
        self._recorder = recorder
        self._begins = begins
        self._paths = paths
        self._sync = sync
        self._new_since_s = time.time() - _CLOCK_SKEW_S
        self._num_lookups: Counter[Stack] = Counter()
        self._old_folders: dict[str, bool] = {}
        self.seen: set[tuple[object, ...]] = set()
        self.lookup: Lookup = self._make_lookup(sites)
        """Write down that a file is looked at, from this frame, by this function; the last argument
        is the answer to a question, None if the file is opened. Returns the event number, None if
        it says nothing new."""

    def _make_lookup(self, sites: FileSites) -> Lookup:
        # Looked up here once: each attribute costs in a place where microseconds count.
        recorder, here, paths = self._recorder, self._recorder.here, self._paths
        kinds, seen, access = sites.kinds, self.seen, recorder.access
        find, stack_of, find_site = paths.find, sites.stack, sites.find
        num_lookups, is_old, begin_anew = self._num_lookups, self._is_old, self._begin_anew
        read, test, sync, begins = FileAction.READ, FileAction.TEST, self._sync, self._begins

        def lookup(path: str, frame: FrameType, api: str, found: bool | None) -> int | None:
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
            num_lookups[stack] = number = num_lookups[stack] + 1
            if number > MOST_LOOKUPS and is_old(full):
                return None
            begins.emit()
            site = recorder.tables.sites.get(stack) if context.name is None else None
            site = site or find_site(stack, frame, context)
            if found is None and not is_shared and context.name is None:
                seq = access(read, full, written, site.number)  # all else is as usual
            else:
                more = (api, "", is_shared, False, found, False, None, context.name)
                seq = access(read if found is None else test, full, written, site.number, *more)
            if not sync.is_on or len(seen) > MOST_SEEN:
                begin_anew()
            seen.add(key)
            return seq

        return lookup

    def _begin_anew(self) -> None:
        self.seen.clear()
        self._sync.begin()

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


# The log that all probes of files write to.

_LONGEST_ERROR: Final = 200


class FileLog:
    """The accesses of one rank.

    What is attempted again from the same place of the program, before the next event that could
    order it, says nothing new. An attempt that failed is not written again before it succeeds.
    """

    def __init__(self, probe: Probe, before_sync: Signal[[bool]], begins: Signal[[]]) -> None:
        """Write for this probe, and switch it off at the first failure.

        `before_sync` says that an event comes which can order accesses, `begins` is to say that an
        access comes.
        """
        self.probe = probe
        self.guard = probe.guard
        self.recorder = recorder = probe.recorder
        self.paths = FilePaths(str(recorder.folder), recorder.main_script)
        self.sites = FileSites(recorder)
        self.open_files = OpenFiles()
        self.sync = SyncWait(before_sync, self._before_sync)
        self.lookups = FileLookups(recorder, self.paths, self.sites, self.sync, begins)
        self._begins = begins
        self.reads_content = True
        self._here = recorder.here
        self.has_failed = False
        self._seen: set[Key] = set()
        self._failed: set[Key] = set()

    def begin(self, attempt: Attempt, frame: FrameType) -> Access | None:
        """Write an access down before it happens; return None if it says nothing new."""
        stack = self.sites.stack(frame)
        if stack is None:
            return None
        key = (attempt, stack)
        if key in self._seen:
            return None
        context = self._here.context
        if context.in_file_call:
            return None
        place = self.paths.find(attempt.path)
        if place is None:
            return None
        access = Access(key, place, frame)
        context.in_file_call = True
        try:
            self._prepare(access, attempt)
        finally:
            context.in_file_call = False
        if not self.has_failed or key not in self._failed:
            self._write(access)
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
        self._seen.add(key)
        if not self.sync.is_on:
            self.sync.begin()
        return access

    def lookup_failed(self, seq: int, path: str, frame: FrameType, error: BaseException) -> None:
        """Say that opening a file for reading raised."""
        stack, place = self.sites.stack(frame), self.paths.find(path)
        if stack is not None and place is not None:
            access = Access((Attempt(FileAction.READ, path, "open"), stack), place, frame)
            access.seq = seq
            self.lookups.forget(path, stack)
            self._raised(access, error)

    def _prepare(self, access: Access, attempt: Attempt) -> None:
        """Do what must be done before others can notice what is done now."""
        if attempt.action in RELEASES:
            self.open_files.settle()
        if attempt.action not in MOVES:
            return
        path = access.place.path
        if attempt.origin:
            found = self.paths.find(attempt.origin)
            access.origin = "" if found is None else found.path
        self.paths.forget(path)
        self.paths.forget(access.origin)
        if attempt.action is FileAction.RENAME and self.reads_content:
            access.moved = digest_of(access.origin)

    def _write(self, access: Access) -> int:
        self._begins.emit()
        attempt, stack = access.key
        context = self._here.context
        assert access.frame is not None
        site = self.sites.find(stack, access.frame, context)
        # A frame holds all that its function has.
        access.frames, access.frame = site.frames, None
        access.seq = seq = self._record(attempt, access, site.number, context.name)
        return seq

    def _record(self, attempt: Attempt, access: Access, site: int, thread: str | None) -> int:
        action, _, api, _, is_exclusive, has_end, _ = attempt
        path, written, is_shared = access.place
        return self.recorder.access(
            action,
            path,
            written,
            site,
            api,
            access.origin,
            is_shared,
            is_exclusive,
            None,
            has_end,
            access.moved,
            thread,
        )

    def give_back(self, access: Access, action: FileAction) -> None:
        """Write down that what was taken there is given back."""
        site = self.sites.find_again(access.frames)
        attempt = access.key[0]._replace(action=action)
        self._record(attempt, access, site.number, self._here.context.name)
        self.see_anew()

    # How it went

    def carry_out(
        self,
        access: Access,
        function: AnyCallable,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        then: Callable[[Access, Any], None] | None = None,
    ) -> object:
        """Do what an access is about, and say how it went.

        `given` are the arguments. `then` gets what the function returned; without it a success is
        all there is to say.
        """
        args, kwargs = given
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self._raised(access, error)
            raise
        with self.guard:
            if then is not None:
                then(access, result)
            elif access.seq is None:
                self.succeeded(access)
        return result

    def succeeded(self, access: Access) -> int:
        """Say that an access went well; return its event number."""
        if access.seq is not None:
            return access.seq
        self._failed.discard(access.key)
        self.has_failed = bool(self._failed)
        return self._write(access)

    def opened(self, access: Access, is_open: IsOpen, *, has_content: bool) -> None:
        """Say that a write has begun, and how to see that it goes on."""
        self.succeeded(access)
        end = functools.partial(self.ended, access, has_content=has_content)
        self.open_files.add(OpenFile(is_open, end))

    def ended(self, access: Access, *, has_content: bool = False) -> None:
        """Say that an access with an end is over."""
        path = access.place.path if has_content else ""
        self._end(self.succeeded(access), content_path=path)
        self._seen.discard(access.key)

    def _raised(self, access: Access, error: BaseException) -> None:
        with self.guard:
            if access.seq is not None:
                self._end(access.seq, error=_said(error))
            access.frame = None
            if len(self._failed) > MOST_SEEN:
                self._failed.clear()
            self._failed.add(access.key)
            self.has_failed = True
            self._seen.discard(access.key)

    def _end(self, seq: int, *, error: str = "", content_path: str = "") -> None:
        content = content_of(content_path) if content_path and self.reads_content else None
        self.recorder.event(FileClosed, access=seq, error=error, content=content)

    # What the rest of the probe needs

    def hiding(self, function: AnyCallable) -> AnyCallable:
        """Return the function such that what it calls in turn is not written down."""

        def run(*args: object, **kwargs: object) -> object:
            context = self._here.context
            before, context.in_file_call = context.in_file_call, True
            try:
                return function(*args, **kwargs)
            finally:
                context.in_file_call = before

        return run

    def see_anew(self) -> None:
        """Let what comes now be written again: something ordered it."""
        self._seen.clear()
        self.lookups.see_anew()

    def _before_sync(self, _: bool) -> None:
        with self.guard:
            self.see_anew()
            self.open_files.settle()
            if not self.open_files:
                self.sync.end()


def _said(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return text.encode("utf-8", "backslashreplace").decode()
