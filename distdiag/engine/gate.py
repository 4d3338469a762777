"""What keeps the replay of a rank from going on."""

from __future__ import annotations


class Gate:
    """Something that ranks wait for in the replay; `waiters` are to be replayed when it changes."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        """Let nobody wait yet."""
        self.waiters: list[int] = []
