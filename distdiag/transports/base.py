"""The contract of a source of events."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from distdiag.events.base import Event


class EventSource:
    """Where the events of some ranks come from. The events of one rank come in their order."""

    def poll(self) -> Iterator[Event]:
        """Yield what is new since the last call; never wait for more."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
