"""The contract of a probe, and the guard that keeps its failures away from the training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    MethodDescriptorType,
    MethodType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, ClassVar, Final, ParamSpec

from distdiag.events.base import Phase
from distdiag.events.errors import CollectiveMismatchError
from distdiag.events.lifecycle import ProbeDisabled, Unobserved
from distdiag.probes.patching.in_place import InPlace, built_in_of, open_up
from distdiag.record.exception_text import message_of, traceback_of
from distdiag.record.guard import Guard
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_P = ParamSpec("_P")

AnyCallable = Callable[..., Any]
Wrap = Callable[[Any], Any]
"""Makes of a function, or of another attribute, what is to be called first."""

SIGNAL_FRAME: Final = "run_users_signal_handler"
"""The name of the function through which signal handlers of the script are called."""

_LONGEST_TRACEBACK: Final = 20_000


class Probe(ABC):
    """Observes one kind of thing.

    The first failure switches it off for good: what it would write afterwards could no longer be
    compared with what the other ranks write (a collective that was not counted shifts all later
    ones).
    """

    name: ClassVar[str]

    def __init__(self, recorder: Recorder) -> None:
        """Observe nothing until `install`."""
        self.recorder = recorder
        self.off = False
        self.guard = Guard(self.fail)
        """Around what the probe does in the middle of the program, where torch sees nothing of it;
        elsewhere `probes.guard` hides it."""
        self._patches = Patches(self._miss)
        self._to_undo: list[Callable[[], object]] = []
        """What takes back subscriptions and the hooks of torch."""

    @abstractmethod
    def _install(self) -> None:
        """Put the hooks in place; any exception switches the probe off."""

    def install(self) -> None:
        """Begin to observe."""
        with Guard(self._give_up):
            self._install()

    def _give_up(self, error: Exception) -> None:
        self.fail(error)
        self.uninstall()

    def flush(self) -> None:
        """Write down what is known by now: the script has ended."""
        return  # most probes keep nothing back

    def uninstall(self) -> None:
        """Take the hooks away again, those that nobody has wrapped since."""
        self.off = True
        while self._to_undo:
            self._to_undo.pop()()
        self._patches.undo()

    def _call_before(self, callback: Callable[..., object]) -> Wrap:
        """Let a callback, which raises nothing, be called first with what a function is given."""

        def make(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def function(*args: object, **kwargs: object) -> object:
                if not self.is_off:
                    callback(*args, **kwargs)
                return original(*args, **kwargs)

            return function

        return make

    def _call_after(self, callback: Callable[..., object]) -> Wrap:
        """Let a callback be called with what a function has returned, then what it was given."""

        def make(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def function(*args: object, **kwargs: object) -> object:
                result = original(*args, **kwargs)
                if not self.is_off:
                    callback(result, *args, **kwargs)
                return result

            return function

        return make

    def _subscribe(self, signal: Signal[_P], callback: Callable[_P, object]) -> None:
        """Call back at a moment until the probe is uninstalled; the callback is guarded."""
        self._to_undo.append(signal.subscribe(callback))

    def fail(self, error: Exception) -> None:
        """Switch the probe off because its own code raised this.

        Raises:
            Exception: the error itself, if it is the program's: a signal handler raised it while
                the probe ran, or ``--strict`` refuses a call by it.

        """
        is_refusal = isinstance(error, CollectiveMismatchError)
        if is_refusal or _came_from_signal_handler(error.__traceback__):
            raise error
        if self.off:
            return
        self.off = True
        reason = f"{type(error).__name__}: {message_of(error)}"[:500]
        with Guard(lambda _: self.recorder.close()):  # the event file is gone, too
            self.recorder.event(
                ProbeDisabled,
                probe=self.name,
                reason=reason,
                traceback=traceback_of(error, error.__traceback__, _LONGEST_TRACEBACK),
            )

    def _miss(self, what: str, reason: str) -> None:
        """Say what is not observed, and why; the rest is."""
        with self.guard:
            self.recorder.event(Unobserved, probe=self.name, what=what, reason=reason[:500])

    def _enter(self, phase: Phase) -> Phase:
        """Say what the rank begins to do; return what it did before."""
        with self.guard:
            return self.recorder.set_phase(phase)
        return phase

    def _show_progress(self) -> None:
        """Show the counters of the recorder on the status page."""
        with self.guard:
            self.recorder.push_progress()

    @property
    def is_off(self) -> bool:
        """Whether the probe observes nothing (any more)."""
        return self.off or self.recorder.closed


def _came_from_signal_handler(trace: TracebackType | None) -> bool:
    """Say whether a handler of the script raised it, be it installed before the agent was there."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == SIGNAL_FRAME or code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> object:
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None)


class Patches:
    """Attributes of modules and classes that come to us first, and how to put them back.

    What is not there, or cannot be wrapped, costs what would be seen through it and nothing else.
    """

    def __init__(self, tell: Callable[[str, str], None] = lambda *_: None) -> None:
        """Nothing is wrapped yet; `tell` gets what cannot be, and why."""
        self._tell = tell
        self._undo: list[Callable[[], None]] = []
        self.wrapped: list[tuple[object, str]] = []
        """Owner and name of each attribute that comes to us first."""

    def wrap(self, owner: object, name: str, make: Wrap) -> bool:
        """Put what `make` returns before an attribute of the owner's own; it is given that.

        A function of C stays where it is and calls ours. All else is replaced. Return whether it is
        wrapped now.
        """
        return self.wrap_all(owner, {name: make})

    def wrap_all(self, owner: object, makes: Mapping[str, Wrap]) -> bool:
        """Wrap several attributes of one owner, which is cheaper for functions of C."""
        own = getattr(owner, "__dict__", {})
        built_ins = {name: built_in_of(own[name]) for name in makes if name in own}
        problem = _opened_up(each for each in built_ins.values() if each is not None)
        are_wrapped = True
        for name, make in makes.items():
            built_in, is_wrapped = built_ins.get(name), False
            with Guard(partial(self._cannot, owner, name)):  # another version than we know
                if name not in own:
                    raise AttributeError("it is not there")
                self.wrapped.append((owner, name))
                if built_in is None:
                    self.replace(owner, name, _made(own[name], make))
                elif problem is None:
                    self._undo.append(InPlace(built_in, make).undo)
                else:
                    raise problem
                is_wrapped = True
            are_wrapped = are_wrapped and is_wrapped
        return are_wrapped

    def wrap_everywhere(self, owner: object, name: str, make: Wrap, *aliases: str) -> bool:
        """Wrap a function in every module that has it under its own name or one of the aliases."""
        original = getattr(owner, "__dict__", {}).get(name)
        is_wrapped = self.wrap(owner, name, make)
        ours = vars(owner)[name] if is_wrapped else original
        for module in list(sys.modules.values()) if ours is not original else ():
            # vars(): getattr would wake modules that load themselves lazily.
            held = getattr(module, "__dict__", {})
            for each in (name, *aliases):
                if held.get(each) is original:
                    self.replace(module, each, ours)
        return is_wrapped

    def add(self, owner: type, name: str, make: Wrap) -> bool:
        """Put what `make` returns before a method that the owner inherits; it is given that.

        Objects come to it; the class itself shows the inherited one, as before.
        """
        inherited = getattr(owner, name, None)
        if inherited is None or name in vars(owner):
            return self.wrap(owner, name, make)
        with Guard(partial(self._cannot, owner, name)):  # another version than we know
            ours = _OfObjects(inherited, make(inherited))
            setattr(owner, name, ours)
            self.wrapped.append((owner, name))
            self._undo.append(lambda: _take_back(owner, name, ours))
            return True
        return False

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute that the owner itself has by another value."""
        original = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: _put_back(owner, name, original, value))

    def undo(self) -> None:
        """Put back what is still ours, the last one first."""
        while self._undo:
            self._undo.pop()()

    def _cannot(self, owner: object, name: str, error: Exception) -> None:
        if isinstance(owner, type):
            what = f"{owner.__module__}.{owner.__qualname__}.{name}"
        else:
            what = f"{getattr(owner, '__name__', owner)}.{name}"
        self._tell(what, str(error))


def _opened_up(functions: Iterable[BuiltinFunctionType]) -> Exception | None:
    """Make functions of C ready to be wrapped; return what is wrong."""
    problems: list[Exception] = []
    with Guard(problems.append):  # another Python than we know
        open_up(functions)
    return problems[0] if problems else None


class _OfObjects:
    """A method that comes to us from the objects of a class; the class itself shows another one."""

    def __init__(self, shown: object, function: AnyCallable) -> None:
        self._shown = shown
        self._function = function

    def __get__(self, instance: object, owner: type) -> object:
        return self._shown if instance is None else MethodType(self._function, instance)


def _made(value: object, make: Wrap) -> object:
    """Return what is to be in the place of an attribute: of its kind, as far as that can be."""
    match value:
        case staticmethod():
            return staticmethod(make(value.__func__))
        case classmethod():
            return classmethod(make(value.__func__))
        case ClassMethodDescriptorType():

            @functools.wraps(value)
            def method(cls: type, *args: object, **kwargs: object) -> object:
                return value.__get__(None, cls)(*args, **kwargs)

            return classmethod(make(method))
        case MethodDescriptorType() | WrapperDescriptorType():
            return _OfObjects(value, make(value))
    return make(value)


def _put_back(owner: object, name: str, original: object, ours: object) -> None:
    if vars(owner).get(name) is ours:
        setattr(owner, name, original)


def _take_back(owner: object, name: str, ours: object) -> None:
    if vars(owner).get(name) is ours:
        delattr(owner, name)


def like(original: AnyCallable) -> Callable[[AnyCallable], AnyCallable]:
    """Make a wrapper look like what it wraps: name, signature, documentation and pickling."""

    def decorate(wrapper: AnyCallable) -> AnyCallable:
        functools.update_wrapper(wrapper, original)
        if hasattr(original, "__code__"):  # not all that ask for a signature look behind a wrapper
            with contextlib.suppress(ValueError):  # behind it is a function of C
                wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def wrap_like(original: AnyCallable) -> Callable[[AnyCallable], AnyCallable]:
    """Make a wrapper that Dynamo does not look into look `like` what it wraps.

    The code object gets the name too: a C++ class that lets Python override its methods tells by
    it whether it was called from the override.
    """

    def decorate(wrapper: AnyCallable) -> AnyCallable:
        like(original)(wrapper)
        # Dynamo runs what bears this mark without looking into it, as it does with most of torch.
        wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
        if hasattr(wrapper, "__code__"):
            wrapper.__code__ = wrapper.__code__.replace(co_name=original.__name__)
            if wrapper.__code__.co_argcount == 0:  # only to be read: there is no parameter to fill
                wrapper.__defaults__ = getattr(original, "__defaults__", None)
        return wrapper

    return decorate
