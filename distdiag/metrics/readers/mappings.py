"""Mappings of names to numbers on one line: JSON, and dictionaries as Python prints them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from distdiag.metrics.readers.lines import LineFormat, Parsed
from distdiag.metrics.readers.numbers import number_in

_DEEPEST: Final = 4
_MOST_VALUES: Final = 2_000
_MOST_RANKS: Final = 1 << 20

# What counts steps, the surest first: W&B's own `_step` counts calls of its `log`.
STEPS: Final = (
    *("global_step", "train/global_step", "trainer/global_step", "training/global_step"),
    *("step", "steps", "iteration", "iter", "iters", "global_step/max_steps", "current_steps"),
    *("num_updates", "train_num_updates", "update", "num_steps", "train_step", "global_steps"),
    *("training_step", "optimizer_step", "batch", "batch_idx", "_step", "step_num", "itr"),
)
_WEAK: Final = "_step"
_EPOCHS: Final = ("epoch", "train/epoch", "train_epoch", "current_epoch")
_TIMES: Final = ("_timestamp", "timestamp", "wall_time", "time", "ts", "created", "datetime")
_LEAST_TIME: Final = 1e9
"""In seconds since 1970: September 2001. What is less is a duration."""
# What loggers add, which is no curve.
_NO_CURVES: Final = frozenset(
    {"lineno", "levelno", "pid", "process", "thread", "process_id", "thread_id", "port", "version"}
    | {"total_steps", "max_steps", "percentage", "msecs", "relativecreated", "_runtime", "seed"}
    | {_WEAK, "rank", "global_rank", "local_rank", "world_size", "node_rank"}
)


def parsed_mapping(found: Mapping[str, Any], start: int = 0) -> Parsed | None:
    """Return what a mapping says, None if it holds no number beside the counters."""
    flat = dict(_flat(found, "", _DEEPEST))
    by_plain = {name.lower(): name for name in flat}
    step, epoch, time, counter = None, None, 0.0, ""
    for names in (STEPS, _EPOCHS):
        name = next((by_plain[name] for name in names if name in by_plain), None)
        if name is not None and names is STEPS:
            step, counter = flat.pop(name), name.lower()
        elif name is not None:
            epoch = flat[name]
    for name in _TIMES:
        if name in by_plain and flat.get(by_plain[name], 0.0) > _LEAST_TIME:
            time = flat.pop(by_plain[name])
            time = time / 1e3 if time > 1e12 else time
            break
    else:
        time = _date(found)
    values = {name: v for name, v in flat.items() if name.lower() not in _NO_CURVES}
    if not values or (epoch is not None and len(values) == 1 and step is None):
        return None
    rank = next((flat[n] for n in ("rank", "global_rank") if n in flat), None)
    is_rank = rank is not None and 0 <= rank < _MOST_RANKS and rank == int(rank)
    return Parsed(
        values,
        start,
        step,
        epoch,
        time=time,
        rank=int(rank) if rank is not None and is_rank else None,
        is_weak=counter == _WEAK,
    )


def _flat(found: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings, with a slash between the names."""
    for key, value in list(found.items())[:_MOST_VALUES]:
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if depth:
                yield from _flat(value, f"{name}/", depth - 1)
        elif (number := as_number(value)) is not None:
            yield name, number


def as_number(value: object) -> float | None:
    """Return a number, or what a text says that is one; None for truth values and the rest."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return number_in(value) if isinstance(value, str) and len(value) <= 64 else None


def _date(found: Mapping[str, Any]) -> float:
    for name in _TIMES:
        value = found.get(name)
        if isinstance(value, str) and value[:2] == "20":
            try:
                return datetime.fromisoformat(value).timestamp()
            except (ValueError, OverflowError):
                continue
    return 0.0


def decoded(text: str | bytes) -> object:
    """Return what JSON says, with Python's NaN and infinities, or None where it is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# JSONL of any trainer, and JSON within lines of text, as fairseq prints.
_CUT: Final = "this line is no whole JSON, and was passed over"


def _read_json(line: str) -> Parsed | None:
    start = line.find('{"')
    end = line.rfind("}") + 1
    if end <= start:
        return Parsed({}, why=_CUT) if start == 0 else None
    found = decoded(line[start:end])
    if found is None and start == 0:
        return Parsed({}, why=_CUT)
    return parsed_mapping(found, start) if isinstance(found, dict) else None


JSON_LINES: Final = LineFormat("jsonl", (b'{"',), _read_json)

# Dictionaries as Python prints them: transformers, TRL, OpenRLHF, ms-swift, axolotl.
# ``{'loss': 0.5, 'grad_norm': tensor(1.2), 'learning_rate': '1e-05', 'epoch': 0.1}``
_ITEM: Final = re.compile(
    r"'([^'\\\n]{1,200}+)': "
    r"(?:'([^'\\\n]{0,100}+)'|((?:np\.|numpy\.|tensor)[\w.]{0,20}+\([^()\n]{1,100}+\)"
    r"|[^\s,{}\[\]()'\"]{1,40}+))"
)
_EPOCH_BEFORE: Final = re.compile(r"\b[Ee]poch[ :=]{1,3}+(\d{1,9}+)\b")
# A dictionary of settings is no point of a curve: it names an epoch, a step or one of these.
_METRIC: Final = re.compile(
    r"(?:^|[/_ ])(?:loss|grad_norm|reward|accuracy|acc|perplexity|ppl|kl|runtime)(?:$|[/_ ])"
)


def _read_dict(line: str) -> Parsed | None:
    start = line.find("{'")
    items = {match[1]: match[2] or match[3] for match in _ITEM.finditer(line, start)}
    parsed = parsed_mapping(items, start)
    if parsed is None or not any(_METRIC.search(name.lower()) for name in parsed.values):
        return None
    if parsed.step is None and parsed.epoch is None:
        # ``epoch 3: {'accuracy': 0.7}``, as the examples of accelerate print it
        before = _EPOCH_BEFORE.search(line, max(0, start - 100), start)
        if before is not None:
            return replace(parsed, start=before.start(), epoch=float(before[1]))
    return parsed


DICTS: Final = LineFormat("dicts", (b"{'",), _read_dict)
