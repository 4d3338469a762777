"""The contract of a probe, and the guard that keeps its failures away from the training."""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Final

from distdiag.event import Phase, ProbeDisabled
from distdiag.recorder import Recorder

AnyCallable = Callable[..., Any]

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
        self._patches = Patches()

    @abstractmethod
    def _install(self) -> None:
        """Put the hooks in place; any exception switches the probe off."""

    def install(self) -> None:
        """Begin to observe."""
        try:
            self._install()
        except Exception as error:  # noqa: BLE001 (a probe must never break the training)
            self.fail(error)
            self.uninstall()

    def flush(self) -> None:  # noqa: B027 (most probes keep nothing back)
        """Write down what is known by now: the script has ended."""

    def uninstall(self) -> None:
        """Take the hooks away again, those that nobody has wrapped since."""
        self.off = True
        self._patches.undo()

    def fail(self, error: Exception) -> None:
        """Switch the probe off because its own code raised this.

        Raises:
            Exception: the error itself, if a signal handler of the user raised it while the
                probe ran.

        """
        if _came_from_signal_handler(error.__traceback__):
            raise error
        if self.off:
            return
        self.off = True
        reason = f"{type(error).__name__}: {error}"[:500]
        text = "".join(traceback.format_exception(error))
        try:
            self.recorder.event(
                ProbeDisabled,
                probe=self.name,
                reason=reason,
                traceback=text[-_LONGEST_TRACEBACK:],
            )
        except Exception:  # noqa: BLE001 (the event file is gone too: nothing is left to tell)
            self.recorder.close()

    def _enter(self, phase: Phase) -> Phase:
        """Say what the rank begins to do; return what it did before."""
        try:
            return self.recorder.set_phase(phase)
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)
            return phase

    def _show_progress(self) -> None:
        """Show the counters of the recorder on the status page."""
        try:
            self.recorder.push_progress()
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)

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
    """Replaced attributes of modules and classes, and how to put them back."""

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self._done: list[tuple[Any, str, object, object]] = []
        self._added: list[tuple[Any, str, object]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute that the owner itself has."""
        self._done.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    def add(self, owner: object, name: str, value: object) -> None:
        """Give the owner an attribute of its own that hides an inherited one."""
        self._added.append((owner, name, value))
        setattr(owner, name, value)

    def replace_everywhere(self, original: AnyCallable, value: AnyCallable) -> None:
        """Replace a function in every module that has it under its own name."""
        name = original.__name__
        for module in list(sys.modules.values()):
            # vars(): getattr would wake modules that load themselves lazily.
            if getattr(module, "__dict__", {}).get(name) is original:
                self.replace(module, name, value)

    def undo(self) -> None:
        """Put back what is still ours, the last replacement first."""
        while self._done:
            owner, name, original, ours = self._done.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        while self._added:
            owner, name, ours = self._added.pop()
            if vars(owner).get(name) is ours:
                delattr(owner, name)


def wrap_like(original: AnyCallable) -> Callable[[AnyCallable], AnyCallable]:
    """Make a wrapper look like what it wraps: name, signature, documentation and pickling.

    The code object gets the name too: a C++ class that lets Python override its methods tells by
    it whether it was called from the override.
    """

    def decorate(wrapper: AnyCallable) -> AnyCallable:
        functools.update_wrapper(wrapper, original)
        # Dynamo runs what bears this mark without looking into it, as it does with most of torch.
        wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
        code = getattr(wrapper, "__code__", None)
        if code is not None:
            wrapper.__code__ = code.replace(co_name=original.__name__)
        return wrapper

    return decorate
