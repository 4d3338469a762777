"""The one place that hides what the agent does with tensors from the program that it observes.

A program may have modes, hooks and checks of its own: selective checkpointing counts operations,
loggers and flop counters look at them, hooks move saved tensors, profilers name them. Within
`out_of_sight` operations go straight to the kernels of the device, so none of these sees them:

- dispatch modes, fake tensors, functionalization, tracers, and the levels of vmap and grad;
- autograd, with its anomaly mode and the hooks of saved tensors, and counters of versions;
- autocast and its cache;
- modes and subclasses that override functions of torch, also reads such as `tensor.shape`;
- profilers and other observers of operations, and profilers of Python's calls (cProfile, and that
  of torch with stacks).

Nothing may be drawn in it, and no operation used that deterministic algorithms forbid. Whether a
tensor can be read at all (it may be fake, wrapped, or on a device that records a CUDA graph) says
`tensors.bytes.is_readable`. Code of the program never runs in it: where it has to, as when a signal
arrives, it runs `in_sight`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import torch
from torch._C import DispatchKey

reading_attributes: Final = torch._C.DisableTorchFunction
"""Hides reads such as `tensor.shape` only, where microseconds count and nothing is computed."""


def _hidden_keys() -> torch._C.DispatchKeySet:
    """Return the dispatch keys above the kernels of devices, but for lazy conjugates and signs."""
    keys = torch._C._dispatch_keyset_full()
    keys -= torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
    for name in ("BackendSelect", "Conjugate", "Negative", "ZeroTensor"):
        keys = keys.remove(getattr(DispatchKey, name))
    return keys.add(DispatchKey.PythonDispatcher)


_HIDDEN: Final = _hidden_keys()
_exclude: Final = torch._C._ExcludeDispatchKeyGuard
_set_observed: Final = torch._C._autograd._enable_record_function
_set_grad: Final = torch._C._set_grad_enabled
_has_grad: Final = torch.is_grad_enabled
_tracing: Final = torch._C._get_tracing_state
_set_tracing: Final = torch._C._set_tracing_state  # type: ignore[attr-defined]
_is_inference: Final = torch.is_inference_mode_enabled
_profile: Final = sys.getprofile
_python_thread: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
_suspend, _resume = (
    ctypes.PYFUNCTYPE(None, ctypes.c_void_p)((f"PyThreadState_{name}Tracing", ctypes.pythonapi))
    for name in ("Enter", "Leave")
)


class _Thread(threading.local):
    """What hides the operations of this thread now, and a veil for the next time."""

    veil: _Veil | None = None
    spare: _Veil | None = None


HERE: Final = _Thread()
"""Where microseconds count, it is asked for its `veil` without a call."""


class _Veil:
    """What has been switched off, and how to put it back.

    A thread uses it again: to make the guards of torch costs as much as to use them.
    """

    __slots__ = (
        "_functions",
        "_has_keys",
        "_inference",
        "_is_grad_off",
        "_keys",
        "_tracing",
        "has_grad",
        "unprofiled",
    )

    def __init__(self) -> None:
        self.has_grad = _has_grad()
        self._functions: Any = reading_attributes()
        self._keys: Any = _exclude(_HIDDEN)
        self._is_grad_off = self._has_keys = False
        self._tracing: Any = None
        self._inference: Any = None
        self.unprofiled: int | None = None
        """The thread whose calls a profiler of Python's does not see now, as Python knows it."""

    def begin(self) -> None:
        """Switch off, first of all what would see that the rest is switched off."""
        self._functions.__enter__()
        self.has_grad = _has_grad()
        self._is_grad_off = True
        _set_grad(False)
        self._tracing = _tracing()
        if self._tracing is not None:
            _set_tracing(None)
        # What is made now may be kept until the program has left this mode.
        self._inference = torch._C._InferenceMode(False) if _is_inference() else None
        self._keys.__enter__()
        self._has_keys = True
        _set_observed(False)

    def end(self) -> None:
        """Put all back, in reverse order."""
        _set_observed(True)
        if self._has_keys:
            self._has_keys = False
            self._keys.__exit__(None, None, None)
        self._inference = None
        if self._tracing is not None:
            tracing, self._tracing = self._tracing, None
            _set_tracing(tracing)
        if self._is_grad_off:
            self._is_grad_off = False
            _set_grad(self.has_grad)
        self._functions.__exit__(None, None, None)
        if self.unprofiled is not None:
            thread, self.unprofiled = self.unprofiled, None
            _resume(thread)


class out_of_sight:
    """Runs a block so that nothing of the program sees the operations in it; blocks may nest."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        """Hide what follows on this thread."""
        self._is_outermost = begin_hiding()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hide nothing any more, after the outermost block."""
        if self._is_outermost:
            end_hiding()


def begin_hiding() -> bool:
    """Hide what follows on this thread; return whether the caller has to end it."""
    here = HERE
    if here.veil is not None:
        return False
    veil, here.spare = here.spare, None
    _hide(_Veil() if veil is None else veil)
    return True


def end_hiding() -> None:
    """Hide nothing any more on this thread."""
    here = HERE
    veil, here.veil = here.veil, None
    if veil is not None:
        veil.end()
        here.spare = veil


@contextmanager
def in_sight() -> Iterator[None]:
    """Run code of the program that interrupts ours as if ours were not there."""
    veil, HERE.veil = HERE.veil, None
    if veil is not None:
        veil.end()
    try:
        yield
    finally:
        if veil is not None:
            _hide(veil)


def _hide(veil: _Veil) -> None:
    try:
        veil.begin()
        HERE.veil = veil
        if _profile() is not None:
            # Here, so that a profiler sees as many functions begin as it sees return after `end`.
            veil.unprofiled = _python_thread()
            _suspend(veil.unprofiled)
    except BaseException:  # a signal handler of the program raised
        HERE.veil = None
        veil.end()
        raise


def is_grad_enabled() -> bool:
    """Say whether the program builds graphs now, also within `out_of_sight`."""
    veil = HERE.veil
    return _has_grad() if veil is None else veil.has_grad
