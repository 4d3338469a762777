"""Megatron-LM, its forks (GPT-NeoX, Megatron-DeepSpeed, MindSpeed), and NeMo."""

from __future__ import annotations

import re
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import fields

# `` [2025-08-01 07:19:37] iteration 1/ 5000 | consumed samples: 128 | ... | lm loss: 1.0E+01 |``;
# GPT-NeoX begins with ``samples/sec: 31.2 | ``, other forks with ``==> ``.
_TRAINING: Final = re.compile(
    r"(?:samples/sec: [\d.]{1,20} \| )?\biteration {1,12}+(\d{1,12}+)/ {0,12}+(\d{1,12}+) \|"
)
# ``validation loss at iteration 1000 on validation set | lm loss value: 2.1E+00 | ... |``
_VALIDATION: Final = re.compile(
    r"\b(validation|test) (?:loss|results) at (?:iteration )?(\d{1,12}+)?([^|]{0,200})\|"
)
# ``[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | ...``
_MEMORY: Final = re.compile(r"\(after (\d{1,12}+) iterations\) memory \(MB\) \|")


def _read(line: str) -> Parsed | None:
    if match := _TRAINING.search(line):
        values = named(fields(line[match.start() :], "|"))
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _VALIDATION.search(line):
        kind = "test" if "test" in match[3] else match[1]
        values = named(fields(line[match.end() :], "|"), prefix=f"{kind} ")
        return Parsed(values, match.start(), step=float(match[2]) if match[2] else None)
    if match := _MEMORY.search(line):
        pairs = ((f"memory {name} (MB)", value) for name, value in fields(line[match.end() :], "|"))
        return Parsed(named(pairs), match.start(), step=float(match[1]))
    return None


MEGATRON: Final = LineFormat(
    "megatron", (b"iteration ", b" loss at ", b" results at ", b"memory (MB) |"), _read
)

# ``Training epoch 0, iteration 5/99 | lr: 1e-05 | global_step: 5 | reduced_train_loss: 3.2``
_NEMO: Final = re.compile(
    r"\b(Training|Validation|Testing) epoch (\d{1,9}+), iteration (\d{1,12}+)/(?:\d|inf|None)"
)


def _read_nemo(line: str) -> Parsed | None:
    match = _NEMO.search(line)
    if match is None:
        return None
    values = named(fields(line[match.end() :], "|"))
    if match[1] != "Training":
        # It counts batches of the evaluation: the step is that of the training before.
        kind = "val" if match[1] == "Validation" else "test"
        return Parsed({f"{kind} {name}": values[name] for name in values}, match.start())
    step = values.get("global_step", float(match[3]))
    return Parsed(values, match.start(), step=step, epoch=float(match[2]))


NEMO: Final = LineFormat("nemo", (b"epoch ",), _read_nemo)
