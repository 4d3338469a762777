"""Wraps functions of C where they are: everybody keeps the same object, and calls come to us first.

A patch would be another object. Programs that pickle the function, find it in a table, ask for
its type or compare it with one that they have kept would notice, and so would torch, whose tables
know functions by identity. So what the object holds (its definition, and what the C function is
given as `self`) is exchanged with what a new one holds, which `PyCFunction_NewEx` makes. The new
one is from then on the function as it was.

The C function of the new definition is `PyObject_Call`: given a callable as `self` it calls it, and
passes on what that returns or raises. The interpreter has no instruction of its own for such
functions, so that a call comes from the same instruction however often it was made.
"""

import contextlib
import ctypes
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, ModuleType
from typing import Any, Final, TypeVar, cast

from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard

_WITH_KEYWORDS: Final = 0x0001 | 0x0002  # METH_VARARGS | METH_KEYWORDS, from methodobject.h

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_Word = ctypes.c_void_p


class _Definition(ctypes.Structure):
    """`PyMethodDef`."""

    _fields_ = (("name", _Word), ("function", _Word), ("flags", ctypes.c_int), ("doc", _Word))


class _Object(ctypes.Structure):
    """`PyCFunctionObject`; `fits` looks whether this Python lays it out so."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("definition", _Word),
        ("self", _Word),
        ("module", _Word),
        ("references", _Word),
        ("vectorcall", _Word),
    )


_new = ctypes.PYFUNCTYPE(ctypes.py_object, _Word, ctypes.py_object, ctypes.py_object)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
_move = ctypes.PYFUNCTYPE(_Word, _Word, _Word, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, _Word).value or 0  # unlike ctypes.memmove it keeps the GIL
)
_CALL: Final = ctypes.cast(ctypes.pythonapi.PyObject_Call, _Word).value
_WORD: Final = ctypes.sizeof(_Word)
_PARTS: Final = ((_Object.definition.offset, 2 * _WORD), (_Object.vectorcall.offset, _WORD))

_KEPT_ALIVE: Final[list[_Definition]] = []
"""Function objects point to these, and one may be running when it is given back."""


class _LikeModule(ModuleType):
    """What a function of a module has for `__self__`: as the module is, and can be called."""

    def __init__(self, owner: ModuleType) -> None:
        super().__init__(owner.__name__, owner.__doc__)
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_owner"], name)

    def __eq__(self, other: object) -> bool:
        return other is self or self.__dict__["_owner"] == other

    def __hash__(self) -> int:
        return hash(self.__dict__["_owner"])

    def __repr__(self) -> str:
        return repr(self.__dict__["_owner"])


class _LikeClass:
    """What a function of a class has for `__self__`; pickled it is the class."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __reduce_ex__(self, protocol: Untyped) -> Untyped:
        if isinstance(self._owner, type):
            return max, ((self._owner,),)  # which of one is that one
        return self._owner.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._owner)


class _Wrapped:
    """A function of C that asks us first, from now on for ever.

    It could be given back what it held. But its hash would change with that, and tables that have
    been filled since would not find it any more.
    """

    def __init__(self, function: BuiltinFunctionType) -> None:
        self.function = function  # kept alive: it is known by its id
        # Until they are exchanged the twin is ours, and afterwards the function as it was.
        self.twin, self._ours = _twin_of(function)
        self.wrappers: list[InPlace] = []
        self.is_exchanged = False
        self.turn()

    def exchange(self) -> None:
        """Let all calls of the function come to ours from now on."""
        _exchange(self.function, self.twin)
        self.is_exchanged = True

    def turn(self) -> None:
        """Let calls come to the newest wrapper that is still there."""
        while self.wrappers and self.wrappers[-1].is_undone:
            self.wrappers.pop()
        type(self._ours).__call__ = staticmethod(
            self.wrappers[-1].call if self.wrappers else self.twin
        )


class InPlace:
    """What a function of C calls first."""

    def __init__(
        self, function: BuiltinFunctionType, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """Let calls of `function` come to what `make` returns, given the function as it is now."""
        open_up([function])
        self._wrapped = _WRAPPED[id(function)]
        wrappers = self._wrapped.wrappers
        self.is_undone = False
        self.call: Callable[..., Any] = make(wrappers[-1].call if wrappers else self._wrapped.twin)
        wrappers.append(self)
        self._wrapped.turn()

    def undo(self) -> None:
        """Be called no longer; what was put before this one in the meantime still calls it."""
        self.is_undone = True
        self._wrapped.turn()


_WRAPPED: Final[dict[int, _Wrapped]] = {}


class _Later:
    """What is ready to be exchanged, and how many wait for each other to do so."""

    def __init__(self) -> None:
        self.depth = 0
        self.ready: list[_Wrapped] = []

    def exchange(self) -> None:
        """Exchange it, unless somebody has more to come."""
        if self.depth or not self.ready:
            return
        ready, self.ready = self.ready, []
        functions = [wrapped.function for wrapped in ready]
        try:
            referrers = gc.get_referrers(*functions)
            tables = [each for each in referrers if type(each) in (set, frozenset, dict)]
            with _found_again(functions, tables):
                for wrapped in ready:
                    wrapped.exchange()
        finally:
            for wrapped in ready:
                if not wrapped.is_exchanged:
                    del _WRAPPED[id(wrapped.function)]


_LATER: Final = _Later()


@contextlib.contextmanager
def all_at_once(guard: Guard) -> Iterator[None]:
    """Let calls come to what is wrapped within from the end on: one walk over all objects for all.

    A walk takes 25 ms once torch is imported, and the probes wrap functions of C in 17 places.
    `guard` is around the walk, and not around what is done within.
    """
    _LATER.depth += 1
    try:
        yield
    finally:
        _LATER.depth -= 1
        with guard:
            _LATER.exchange()


def open_up(functions: Iterable[BuiltinFunctionType]) -> None:
    """Make functions ready to be wrapped: several at once, since that walks over all objects.

    Raises:
        NotImplementedError: this Python keeps functions of C in another way.

    """
    new = {id(each): each for each in functions if id(each) not in _WRAPPED}
    if not new:
        return
    if not fits():
        raise NotImplementedError("this Python lays out functions of C in another way")
    for key, function in new.items():
        _WRAPPED[key] = _Wrapped(function)
        _LATER.ready.append(_WRAPPED[key])
    _LATER.exchange()


@contextlib.contextmanager
def _found_again(functions: Iterable[object], tables: Iterable[Any]) -> Iterator[None]:
    """Let tables find functions whose hash changes; they keep their order."""
    held = []
    for table in tables:
        inside = [function for function in functions if function in table]
        items = list(table.items() if type(table) is dict else table) if inside else []
        held.append((table, inside, items))
        if type(table) is set:
            table.difference_update(inside)
    yield
    for table, inside, items in held:
        if type(table) is set:
            table.update(inside)
        elif type(table) is dict and inside:
            table.clear()
            table.update(items)
        elif inside:
            for names in [each for each in gc.get_referrers(table) if type(each) is dict]:
                for name in [name for name, value in names.items() if value is table]:
                    names[name] = frozenset(items)  # where else it is held cannot be helped


def as_it_was(function: AnyFunction) -> AnyFunction:
    """Return what is called where a call is not to come to us: our own."""
    wrapped = _WRAPPED.get(id(function))
    if wrapped is None or not wrapped.is_exchanged:
        return function
    return cast("AnyFunction", wrapped.twin)


def built_in_of(value: object) -> BuiltinFunctionType | None:
    """Return the function of C behind an attribute of a module or a class, if there is one."""
    while type(value).__name__ == "instancemethod":  # the methods of classes that pybind11 makes
        value = value.__func__  # type: ignore[attr-defined]
    return value if type(value) is BuiltinFunctionType else None


def _twin_of(function: BuiltinFunctionType) -> tuple[BuiltinFunctionType, Any]:
    """Return a function that looks like this one, and the callable that it calls."""
    how = function.__reduce__()
    # A static method does not tell its class by `__self__`.
    owner: Any = function.__self__ if isinstance(how, str) else how[1][0]
    if owner is None:  # so are functions of Rust
        owner = sys.modules[str(function.__module__)]
    like: Any = _LikeModule if isinstance(owner, ModuleType) else _LikeClass
    kind = owner if isinstance(owner, type) else type(owner)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    shown = "type" if kind is owner else f"{kind.__module__}.{kind.__name__}"
    ours = type(shown, (like,), names)(owner)
    address = _Object.from_address(id(function)).definition
    definition = _Definition.from_buffer_copy(_Definition.from_address(address))
    definition.function, definition.flags = _CALL, _WITH_KEYWORDS
    _KEPT_ALIVE.append(definition)
    return _new(ctypes.addressof(definition), ours, function.__module__), ours


def _exchange(one: BuiltinFunctionType, other: BuiltinFunctionType) -> None:
    """Let two functions change their roles; no other thread sees them half changed."""
    moves = []
    for target, source in ((one, other), (other, one)):
        for offset, size in _PARTS:
            held = ctypes.create_string_buffer(ctypes.string_at(id(source) + offset, size), size)
            moves.append((id(target) + offset, held, size))
    targets, buffers, sizes = zip(*moves, strict=True)
    sources = [ctypes.addressof(each) for each in buffers]
    # From the first to the last in C: nowhere would the interpreter give up the GIL.
    deque(map(_move, targets, sources, sizes), maxlen=0)


@functools.cache
def fits() -> bool:
    """Say whether functions of C are what this module takes them for, by one of our own."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    if ctypes.sizeof(_Object) != BuiltinFunctionType.__basicsize__:
        return False
    twin, ours = _twin_of(sys.intern)  # type: ignore[arg-type]
    found, model = _Object.from_address(id(twin)), _Object.from_address(id(sys.intern))
    return (
        found.self == id(ours)
        and found.definition == ctypes.addressof(_KEPT_ALIVE[-1])
        and found.module == model.module == id(twin.__module__)
        and found.vectorcall is None
    )
