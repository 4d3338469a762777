"""The guard around all parts of distdiag whose failure must not reach the program.

`Exception` is caught here and nowhere else: a guard knows whom to notify, and lets everything
through that is no `Exception`.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from distdiag.events.errors import DistdiagError
from distdiag.record.visible import visible

T = TypeVar("T")


class Guard:
    """Hands what a block raises to `fail`, and lets the program go on behind the block.

    It keeps nothing of a block: one guard serves all threads, and blocks may nest. `fail` may raise
    what belongs to the program.
    """

    __slots__ = ("_fail",)
    kinds: ClassVar[type[BaseException]] = Exception

    def __init__(self, fail: Callable[[Any], object]) -> None:
        """Tell `fail` what was raised; in a probe that switches it off."""
        self._fail = fail

    def __enter__(self) -> None:
        """Begin our part."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, self.kinds):
            return False
        self._fail(error)
        return True


def attempt(
    fail: Callable[[Exception], object], function: Callable[..., T], *args: object
) -> T | None:
    """Call a function as a guard would, where microseconds count; return None if it raises."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 (this is the guard)
        fail(error)
        return None


class WideGuard(Guard):
    """A guard that lets nothing through: for code of the program's that only shows a value."""

    __slots__ = ()
    kinds = BaseException


def warn(message: str) -> None:
    """Say one line to the user, on stderr, whoever may have closed it."""
    try:
        sys.stderr.write(f"distdiag: {visible(' '.join(message.split()))}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def unobserved(purpose: str, error: Exception) -> None:
    """Say why the script goes on without being observed."""
    kind = "" if isinstance(error, DistdiagError) else f"{type(error).__name__}: "
    warn(f"{purpose} failed, the script runs unobserved: {kind}{error}")


def guarded(action: Callable[[], None], purpose: str) -> None:
    """Run a part of the tool; should it fail, say so to the user, and let the script go on."""
    with Guard(partial(unobserved, purpose)):
        action()
