"""Calls of the job's key-value store: what one rank sets and another reads orders the two."""

from __future__ import annotations

import sys
import weakref
import zlib
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

from torch._C import _distributed_c10d as c10d

from distdiag.events.base import Frame
from distdiag.events.files import StoreAsked, StoreCall
from distdiag.probes.base import AnyCallable, Probe, Wrap, wrap_like
from distdiag.probes.call_sites import caller, is_own_file
from distdiag.record.recorder import Recorder
from distdiag.record.user_code import is_user_file


class Method(NamedTuple):
    """A method of stores. `publishes`: written before; `learns`: written after it returned."""

    publishes: bool
    learns: bool


METHODS: Final = {
    "set": Method(publishes=True, learns=False),
    "multi_set": Method(publishes=True, learns=False),
    "append": Method(publishes=True, learns=False),
    "queue_push": Method(publishes=True, learns=False),
    "delete_key": Method(publishes=True, learns=False),
    "add": Method(publishes=True, learns=True),
    "compare_set": Method(publishes=True, learns=True),
    "get": Method(publishes=False, learns=True),
    "multi_get": Method(publishes=False, learns=True),
    "queue_pop": Method(publishes=False, learns=True),
    "wait": Method(publishes=False, learns=True),
    "check": Method(publishes=False, learns=True),
}
"""A `check` that found nothing has learnt nothing: it is not written."""

WAITING: Final = frozenset({"get", "multi_get", "queue_pop", "wait"})
"""What waits until somebody sets the key: written before it waits, too."""

MOST_FRAMES: Final = 3
"""The line that waits or sets, and who called it: a store call is written with its names."""

_PLURAL: Final = {"multi_set": "set", "multi_get": "get"}


class StoreCalls(Probe):
    """Records the calls that Python makes of a store, those of torch itself included.

    Where they are made in C++ (by the backends of process groups) they are not seen.
    """

    name: ClassVar[str] = "store-calls"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._places: dict[int, tuple[weakref.ref[object], _Place]] = {}
        self._users_files: dict[str, bool] = {}

    def _install(self) -> None:
        kind = c10d.Store
        makes: dict[str, Wrap] = {
            name: partial(self._wrapper, name=name, method=method)
            for name, method in METHODS.items()
            if name in vars(kind)
        }
        if "clone" in vars(kind):
            makes["clone"] = self._call_after(self._cloned)
        self._patches.wrap_all(kind, makes)
        self._patches.wrap(c10d.PrefixStore, "__init__", self._call_after(self._follow))

    def _wrapper(self, original: AnyCallable, name: str, method: Method) -> AnyCallable:
        action = _PLURAL.get(name, name)

        @wrap_like(original)
        def wrapper(self_: object, *args: object, **kwargs: object) -> object:
            if self.is_off or is_own_file(caller().f_code.co_filename):
                return original(self_, *args, **kwargs)
            given = (*args, *kwargs.values())
            if method.publishes:
                self._write(action, self_, given, _published(action, given), done=False)
            if name in WAITING:
                self._ask(action, self_, given)
            result = original(self_, *args, **kwargs)
            if method.learns and (name != "check" or result):
                self._write(action, self_, given, _digest(result), done=True)
            return result

        return wrapper

    def _write(
        self, action: str, store: object, given: tuple[Any, ...], value: str, *, done: bool
    ) -> None:
        with self.guard:
            place = self._place_of(store)
            if place is None or not given:
                return
            self.recorder.event(
                StoreCall,
                action=action,
                store=place.store,
                keys=_keys(place, given),
                value=value,
                done=done,
                frames=() if done else self._user_frames(),
            )

    def _ask(self, action: str, store: object, given: tuple[Any, ...]) -> None:
        with self.guard:
            place = self._place_of(store)
            if place is None or not given:
                return
            self.recorder.event(
                StoreAsked,
                action=action,
                store=place.store,
                keys=_keys(place, given),
                frames=self._user_frames(),
                thread=self.recorder.here.context.name or "MainThread",
            )

    def _user_frames(self) -> tuple[Frame, ...]:
        """Return the innermost frames of the user's code: a store call costs some 25 us itself."""
        found: list[Frame] = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and len(found) < MOST_FRAMES:
            code = frame.f_code
            is_users = self._users_files.get(code.co_filename)
            if is_users is None:
                is_users = is_user_file(code.co_filename, self.recorder.main_script)
                self._users_files[code.co_filename] = is_users
            if is_users:
                found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return tuple(found)

    # Which store it is

    def _place_of(self, store: object) -> _Place | None:
        """Return where the keys of a store lie; None if no other process sees them."""
        known = self._places.get(id(store))
        if known is not None and known[0]() is store:
            return known[1]
        if isinstance(store, c10d.TCPStore):
            return self._remember(store, _Place(f"{store.host}:{store.port}", ""))
        if isinstance(store, c10d.FileStore):
            path: str = vars(c10d.FileStore)["path"].__get__(store)
            return self._remember(store, _Place(path, ""))
        return None  # in memory, or a prefix that was put before it out of our sight

    def _remember(self, store: object, place: _Place) -> _Place:
        number = id(store)
        self._places[number] = (weakref.ref(store, lambda _: self._forget(number)), place)
        return place

    def _forget(self, number: int) -> None:
        known = self._places.get(number)
        if known is not None and known[0]() is None:
            del self._places[number]

    def _follow(self, _: object, made: object, *args: object, **kwargs: object) -> None:
        with self.guard:
            given = (*args, *kwargs.values())
            prefix = next(each for each in given if isinstance(each, str))
            base = next(each for each in given if isinstance(each, c10d.Store))
            place = self._place_of(base)
            if place is not None:
                self._remember(made, _Place(place.store, f"{place.prefix}{prefix}/"))

    def _cloned(self, clone: object, store: object) -> None:
        place = self._place_of(store)
        if place is not None:
            self._remember(clone, place)


class _Place(NamedTuple):
    """The store below all prefixes, and what these make of a key."""

    store: str
    prefix: str


def _keys(place: _Place, given: tuple[Any, ...]) -> tuple[str, ...]:
    keys = [given[0]] if isinstance(given[0], str) else given[0]
    return tuple(_printable(place.prefix + key) for key in keys)


def _published(action: str, given: tuple[Any, ...]) -> str:
    """Return the digest of what a call is about to put into the store."""
    return "" if action in ("add", "delete_key") else _digest(given[-1])


def _digest(value: object) -> str:
    """Return a number as it is, and of anything longer what tells it from other values."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{zlib.crc32(value):08x}:{len(value)}"
    if isinstance(value, list | tuple):
        return ",".join(_digest(each) for each in value)
    return ""


def _printable(key: str) -> str:
    return key.encode("utf-8", "backslashreplace").decode()
