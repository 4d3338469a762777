"""Writes accesses to files down: each once between two events that could order it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from distdiag.event import FileAction, FileClosed
from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.file_access import MOVES, RELEASES, Access, Attempt, Key
from distdiag.probes.file_contents import content_of, digest_of
from distdiag.probes.file_looks import MOST_SEEN, FileLooks
from distdiag.probes.file_paths import FilePaths
from distdiag.probes.file_sites import FileSites
from distdiag.probes.open_files import IsOpen, OpenFile, OpenFiles

_LONGEST_ERROR: Final = 200


class FileLog:
    """The accesses of one rank.

    What is attempted again from the same place of the program, before the next event that could
    order it, says nothing new. An attempt that failed is not written again before it succeeds.
    """

    def __init__(self, probe: Probe) -> None:
        """Write for this probe, and switch it off at the first failure."""
        self.probe = probe
        self.recorder = recorder = probe.recorder
        self.paths = FilePaths(str(recorder.folder), recorder.main_script)
        self.sites = FileSites(recorder)
        self.open_files = OpenFiles()
        self.looks = FileLooks(recorder, self.paths, self.sites, self._before_sync)
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
        self.recorder.before_sync = self._before_sync
        return access

    def look_failed(self, seq: int, path: str, frame: FrameType, error: BaseException) -> None:
        """Say that opening a file for reading raised."""
        stack, place = self.sites.stack(frame), self.paths.find(path)
        if stack is not None and place is not None:
            access = Access((Attempt(FileAction.READ, path, "open"), stack), place, frame)
            access.seq = seq
            self.looks.forget(path, stack)
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
    ) -> Any:  # noqa: ANN401
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
        try:
            if then is not None:
                then(access, result)
            elif access.seq is None:
                self.succeeded(access)
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.probe.fail(error)
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
        try:
            if access.seq is not None:
                self._end(access.seq, error=_said(error))
            access.frame = None
            if len(self._failed) > MOST_SEEN:
                self._failed.clear()
            self._failed.add(access.key)
            self.has_failed = True
            self._seen.discard(access.key)
        except Exception as problem:  # noqa: BLE001 (our part must not break the user's)
            self.probe.fail(problem)

    def _end(self, seq: int, *, error: str = "", content_path: str = "") -> None:
        content = content_of(content_path) if content_path and self.reads_content else None
        self.recorder.event(FileClosed, access=seq, error=error, content=content)

    # What the rest of the probe needs

    def guarded(self, action: Callable[[], object]) -> None:
        """Do a part of ours that must not break the user's."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 (the probe is switched off, and says so)
            self.probe.fail(error)

    def hiding(self, function: AnyCallable) -> AnyCallable:
        """Return the function such that what it calls in turn is not written down."""

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
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
        self.looks.see_anew()

    def _before_sync(self) -> None:
        try:
            self.see_anew()
            self.open_files.settle()
            if not self.open_files:
                self.recorder.before_sync = None
        except Exception as error:  # noqa: BLE001 (it must not switch off the probe that called)
            self.probe.fail(error)


def _said(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return text.encode("utf-8", "backslashreplace").decode()
