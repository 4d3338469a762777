"""What writes a log in the exact format of a trainer, and keeps what it wrote."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

RED = "\x1b[31m"


@dataclass
class Log:
    """A log that is being written: its text, and by series the steps and values in it."""

    random: random.Random
    text: str = ""
    points: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def line(self, text: str) -> None:
        self.text += text + "\n"

    def put(self, name: str, step: float, printed: str, *, scale: float = 1.0) -> str:
        """Keep a value as it is printed; `scale` turns it into the unit of the series."""
        self.points[name].append((step, float(printed.replace(",", "")) * scale))
        return printed

    def loss(self, step: float) -> float:
        return 2.0 + 8.0 / (1.0 + step / 10) + self.random.random()


@dataclass(frozen=True)
class Format:
    """One format or version of it: its name as the reader has it, and who plays which role."""

    name: str
    write: Callable[[Log], None]
    roles: dict[str, str]
    file: str = "train.log"

    def written(self, seed: int = 1) -> Log:
        log = Log(random.Random(seed))
        self.write(log)
        return log


FORMATS: dict[str, Format] = {}


def written_as(
    name: str, *, file: str = "train.log", **roles: str
) -> Callable[[Callable[[Log], None]], Callable[[Log], None]]:
    def add(write: Callable[[Log], None]) -> Callable[[Log], None]:
        FORMATS[write.__name__] = Format(name, write, roles, file)
        return write

    return add
