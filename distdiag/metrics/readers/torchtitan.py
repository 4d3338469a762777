"""torchtitan and torchtune, PyTorch's own trainers."""

from __future__ import annotations

import re
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, number_in, pairs

# ``step:  1  loss:  8.2107  grad_norm:  1.4210  memory:  1.21GiB(1.52%)  tps: 1,234  mfu: 2.10%``;
# ``validate step: 10  loss: ...`` after an evaluation
_STEP: Final = re.compile(
    r"\b(?:(validate|validation|evaluation:?|eval|test) {1,4}+)?step: {1,12}+(\d{1,12}+) {2,}+"
)
_SHARE: Final = re.compile(r"\bmemory: {0,12}+[\d.]{1,12}+GiB\(([\d.]{1,12}+)%\)")


def _read(line: str) -> Parsed | None:
    match = _STEP.search(line)
    if match is None or "loss: " not in line:
        return None
    values = named(pairs(line[match.end() :]))
    if share := _SHARE.search(line, match.end()):
        values["memory(%)"] = number_in(share[1]) or 0.0
    if match[1]:
        values = {f"validate {name}": value for name, value in values.items()}
    return Parsed(values, match.start(), step=float(match[2]))


TORCHTITAN: Final = LineFormat("torchtitan", (b"step: ",), _read)

# ``Step 1 | loss:2.1 lr:1e-05 tokens_per_second_per_gpu:123.4``, and the text of its bar:
# ``1|10|Loss: 2.1:  10%|``, which is the epoch and the step
_LOGGED: Final = re.compile(r"\bStep (\d{1,12}+) \| (?=[\w/]{1,60}+:)")
_BAR: Final = re.compile(rf"(?<![\d|])(\d{{1,9}}+)\|(\d{{1,12}}+)\|Loss: ({NUMBER})")


def _read_torchtune(line: str) -> Parsed | None:
    if match := _LOGGED.search(line):
        return Parsed(named(pairs(line[match.end() :])), match.start(), step=float(match[1]))
    if match := _BAR.search(line):
        values = {"Loss": float(match[3].replace(",", ""))}
        return Parsed(values, match.start(), step=float(match[2]), is_repeated=True)
    return None


TORCHTUNE: Final = LineFormat("torchtune", (b"Step ", b"|Loss: "), _read_torchtune)
