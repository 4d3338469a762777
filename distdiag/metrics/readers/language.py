"""Trainers of language models: Megatron, NeMo, DeepSpeed, torchtitan, torchtune, verl, nanoGPT."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, UNIT, fields, number_in, pairs, scaled

# Megatron-LM, its forks (GPT-NeoX, Megatron-DeepSpeed, MindSpeed), and NeMo.

# `` [2025-08-01 07:19:37] iteration 1/ 5000 | consumed samples: 128 | ... | lm loss: 1.0E+01 |``;
# GPT-NeoX begins with ``samples/sec: 31.2 | ``, other forks with ``==> ``.
_MEGATRON: Final = re.compile(
    r"(?:samples/sec: [\d.]{1,20} \| )?\biteration {1,12}+(\d{1,12}+)/ {0,12}+(\d{1,12}+) \|"
)
# ``validation loss at iteration 1000 on validation set | lm loss value: 2.1E+00 | ... |``
_MEGATRON_VALIDATION: Final = re.compile(
    r"\b(validation|test) (?:loss|results) at (?:iteration )?(\d{1,12}+)?([^|]{0,200})\|"
)
# ``[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | ...``
_MEGATRON_MEMORY: Final = re.compile(r"\(after (\d{1,12}+) iterations\) memory \(MB\) \|")


def _read_megatron(line: str) -> Parsed | None:
    if match := _MEGATRON.search(line):
        values = named(fields(line[match.start() :], "|"))
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _MEGATRON_VALIDATION.search(line):
        kind = "test" if "test" in match[3] else match[1]
        values = named(fields(line[match.end() :], "|"), prefix=f"{kind} ")
        return Parsed(values, match.start(), step=float(match[2]) if match[2] else None)
    if match := _MEGATRON_MEMORY.search(line):
        sizes = ((f"memory {name} (MB)", value) for name, value in fields(line[match.end() :], "|"))
        return Parsed(named(sizes), match.start(), step=float(match[1]))
    return None


MEGATRON: Final = LineFormat(
    "megatron", (b"iteration ", b" loss at ", b" results at ", b"memory (MB) |"), _read_megatron
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

# DeepSpeed: progress, throughput, timers and the loss scale that an overflow leaves.

# ``step=10, skipped=0, lr=[1e-05, 1e-05], mom=[(0.9, 0.999)]``
_PROGRESS: Final = re.compile(
    r"\bstep=(\d{1,12}+), skipped=(\d{1,12}+), lr=\[([^\]]{0,2000})\](?:, mom=\[([^\]]{0,2000})\])?"
)
# ``steps: 10 loss: 5.6123 iter time (s): 0.312 samples/sec: 51.2``
_PIPELINE: Final = re.compile(r"\bsteps: (\d{1,12}+) loss: ")
_ITERATION_TIME: Final = re.compile(rf"iter time \(s\): ({NUMBER})")
# ``epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.3, MemAllocated=1.2GB``
_THROUGHPUT: Final = re.compile(r"\bepoch=\d{1,9}+/micro_step=\d{1,12}+/global_step=(\d{1,12}+), ")
# ``[Rank 0] time (ms) | fwd: 1.20 | bwd: 3.40``, and ``rank=0 time (ms) | ...`` before
_TIMERS: Final = re.compile(r"\btime \(ms\) ?\|")
# ``OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768``
_OVERFLOW: Final = re.compile(
    rf"OVERFLOW! Rank (\d{{1,6}}+) Skipping step\. Attempted loss scale: ({NUMBER})"
)


def _read_deepspeed(line: str) -> Parsed | None:
    if match := _PROGRESS.search(line):
        values = dict(_lists(("lr", match[3]), ("mom", match[4] or "")))
        values["skipped"] = float(match[2])
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _PIPELINE.search(line):
        values = named(pairs(line[match.start() :]))
        values.pop("steps", None)
        if time := _ITERATION_TIME.search(line, match.end()):
            values["iter time (s)"] = scaled(time[1], None)
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _THROUGHPUT.search(line):
        values = named(pairs(line[match.end() :]))
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _TIMERS.search(line):
        timers = ((f"{name} (ms)", ms) for name, ms in fields(line[match.end() :], "|"))
        return Parsed(named(timers, "time "), match.start())
    if match := _OVERFLOW.search(line):
        return Parsed(
            {"loss scale": float(match[2].replace(",", ""))}, match.start(), rank=int(match[1])
        )
    return None


def _lists(*lists: tuple[str, str]) -> Iterator[tuple[str, float]]:
    """Yield the first number of each list by its name, and other rates with their place."""
    for name, text in lists:
        numbers = [number_in(part.strip(" ()")) for part in text.split(",")]
        known = [number for number in numbers if number is not None]
        for place, number in enumerate(known[:64]):
            if place == 0 or (number != known[0] and name == "lr"):
                yield (f"{name}[{place}]" if place else name), number


DEEPSPEED: Final = LineFormat(
    "deepspeed",
    (b", skipped=", b"iter time (s):", b"SamplesPerSec=", b"time (ms)", b"OVERFLOW! Rank"),
    _read_deepspeed,
)

# torchtitan and torchtune, PyTorch's own trainers.

# ``step:  1  loss:  8.2107  grad_norm:  1.4210  memory:  1.21GiB(1.52%)  tps: 1,234  mfu: 2.10%``;
# ``validate step: 10  loss: ...`` after an evaluation
_TORCHTITAN: Final = re.compile(
    r"\b(?:(validate|validation|evaluation:?|eval|test) {1,4}+)?step: {1,12}+(\d{1,12}+) {2,}+"
)
_TORCHTITAN_MEMORY: Final = re.compile(r"\bmemory: {0,12}+[\d.]{1,12}+GiB\(([\d.]{1,12}+)%\)")


def _read_torchtitan(line: str) -> Parsed | None:
    match = _TORCHTITAN.search(line)
    if match is None or "loss: " not in line:
        return None
    values = named(pairs(line[match.end() :]))
    if share := _TORCHTITAN_MEMORY.search(line, match.end()):
        values["memory(%)"] = number_in(share[1]) or 0.0
    if match[1]:
        values = {f"validate {name}": value for name, value in values.items()}
    return Parsed(values, match.start(), step=float(match[2]))


TORCHTITAN: Final = LineFormat("torchtitan", (b"step: ",), _read_torchtitan)

# ``Step 1 | loss:2.1 lr:1e-05 tokens_per_second_per_gpu:123.4``, and the text of its bar:
# ``1|10|Loss: 2.1:  10%|``, which is the epoch and the step
_TORCHTUNE: Final = re.compile(r"\bStep (\d{1,12}+) \| (?=[\w/]{1,60}+:)")
_TORCHTUNE_BAR: Final = re.compile(rf"(?<![\d|])(\d{{1,9}}+)\|(\d{{1,12}}+)\|Loss: ({NUMBER})")


def _read_torchtune(line: str) -> Parsed | None:
    if match := _TORCHTUNE.search(line):
        return Parsed(named(pairs(line[match.end() :])), match.start(), step=float(match[1]))
    if match := _TORCHTUNE_BAR.search(line):
        values = {"Loss": float(match[3].replace(",", ""))}
        return Parsed(values, match.start(), step=float(match[2]), is_repeated=True)
    return None


TORCHTUNE: Final = LineFormat("torchtune", (b"Step ", b"|Loss: "), _read_torchtune)

# verl, and others that print all values on one line: ``step:1 - actor/kl:0.1 - ...``.

_VERL: Final = re.compile(r"\bstep: ?(\d{1,12}+) - (?=[\w/])")


def _read_verl(line: str) -> Parsed | None:
    match = _VERL.search(line)
    if match is None:
        return None
    return Parsed(named(fields(line[match.end() :], " - ")), match.start(), step=float(match[1]))


VERL: Final = LineFormat("verl", (b"step:",), _read_verl)

# nanoGPT and what was made after it.

# ``iter 10: loss 3.2101, time 410.20ms, mfu 2.10%``; ``step 250: train loss 2.1, val loss 2.3``
_NANOGPT: Final = re.compile(
    r"\b(?:iter|step) (\d{1,12}+)(?: step \d{1,12}+)?: (?=(?:train |val )?loss )"
)
_NANOGPT_PAIR: Final = re.compile(rf"([A-Za-z][A-Za-z_ ]{{0,40}}+)({NUMBER})({UNIT})?+")


def _read_nanogpt(line: str) -> Parsed | None:
    match = _NANOGPT.search(line)
    if match is None:
        return None
    found = _NANOGPT_PAIR.finditer(line, match.end())
    values = named((pair[1].strip(), scaled(pair[2], pair[3])) for pair in found)
    return Parsed(values, match.start(), step=float(match[1]))


NANOGPT: Final = LineFormat("nanogpt", (b": loss ", b": train loss "), _read_nanogpt)
