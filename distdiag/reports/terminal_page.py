"""Lines of text within the width of a terminal."""

from collections.abc import Iterable, Mapping
from io import StringIO
from itertools import chain
from typing import Final

from rich.console import Console
from rich.text import Text

from distdiag.events.ranks import RankSet
from distdiag.record.visible import visible
from distdiag.reports.base import phrase

LABEL_WIDTH: Final = 11
INDENT: Final = 2 + LABEL_WIDTH
"""What stands beside a label begins in this column."""
MOST_NAMES: Final = 12


class TerminalPage:
    """Lines of text within a width. What is written is taken literally: no markup, no controls."""

    def __init__(self, width: int, *, color: bool, labels: Mapping[int, str]) -> None:
        """Begin an empty page; `labels` are the names of processes whose ranks are not known."""
        self.width = width
        self._labels = labels
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=width,
            force_terminal=color,
            force_jupyter=False,
            color_system="standard" if color else None,
            legacy_windows=False,
        )

    def who(self, ranks: RankSet) -> str:
        """Return ranks as a phrase, with the names of processes whose ranks are not known."""
        named = [self._labels[rank] for rank in ranks if rank in self._labels]
        known = RankSet(rank for rank in ranks if rank not in self._labels)
        more = f" and {len(named) - MOST_NAMES} more" if len(named) > MOST_NAMES else ""
        names = ", ".join([*([phrase(known)] if known else []), *named[:MOST_NAMES]])
        return f"{names}{more}" if named else phrase(ranks)

    def blank(self) -> None:
        """Write an empty line."""
        self._file.write("\n")

    def write(self, text: str, *, indent: int = 2, first: str = "", style: str = "") -> None:
        """Write a paragraph; `first` stands in the indent of its first line."""
        lines = chain.from_iterable(self._wrapped(line, indent) for line in text.splitlines())
        for number, line in enumerate(lines):
            self._put(Text(visible(first)) if number == 0 else Text(), line, indent, style)

    def write_label(self, label: str, text: str, *, style: str = "") -> None:
        """Write a paragraph beside its label; nothing where there is no text."""
        self.write(text, indent=INDENT, first=f"  {label}", style=style)

    def write_whole(self, text: str, *, indent: int, style: str = "") -> None:
        """Write one line that may be longer than the width: a path must stay in one piece."""
        self._put(Text(), Text(visible(text)), indent, style)

    def write_source(self, text: str, *, first: str, style: str = "") -> None:
        """Write a line of source behind `first`, on as many lines as it needs."""
        for line in Text(visible(text)).wrap(self._console, max(self.width - len(first), 20)):
            self._put(Text(), Text(first) + line, 0, style)
            first = " " * len(first)

    def write_cut(self, text: str, *, indent: int, style: str = "") -> None:
        """Write one line of source, cut at the width."""
        line = Text(visible(text))
        line.truncate(max(self.width - indent, 20), overflow="ellipsis")
        self._put(Text(), line, indent, style)

    def text(self) -> str:
        """Return all that was written."""
        return self._file.getvalue()

    def _wrapped(self, line: str, indent: int) -> Iterable[Text]:
        return Text(visible(line.strip())).wrap(self._console, max(self.width - indent, 20))

    def _put(self, first: Text, line: Text, indent: int, style: str) -> None:
        first.stylize("bold")
        first.pad_right(indent - first.cell_len)
        line.rstrip()
        line.stylize(style)
        self._console.print(first + line, soft_wrap=True, highlight=False)
