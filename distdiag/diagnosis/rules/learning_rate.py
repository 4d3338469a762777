"""The learning rate: its size, its warm-up, and how often its schedule moves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.diagnosis.causes import FITS, SAID, SHOWN, Clue, Evidence, Issue
from distdiag.diagnosis.curves import BLOWN_UP
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.program import (
    Code,
    Program,
    dotted,
    is_optimizer_class,
    positional,
    receiver,
    tail,
)
from distdiag.diagnosis.rules.loss_functions import made_of
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes

TOO_HIGH: Final = Issue(
    id="learning-rate-too-high",
    title="the learning rate is too high: the loss leaves its course",
    severity=Severity.ERROR,
    fix="Divide the learning rate by 10 and compare the first hundred steps; keep gradient clipping"
    " at 1.0 and a warm-up.",
    quick="divide the learning rate by 10",
    wants=(
        ("config", "which learning rate, optimizer and warm-up are set"),
        ("loss_curves", "where the loss leaves its course, and what the gradient norm did before"),
    ),
    explains=("divergence", "gradient-explosion", "not-finite", "gradient-spike"),
)
NO_WARMUP: Final = Issue(
    id="no-warm-up",
    title="Adam starts at its full learning rate: its estimates of the gradients' size are of few"
    " steps then, and updates are too large",
    severity=Severity.WARNING,
    fix="Raise the learning rate from 0 over the first steps (1 to 5 % of them).",
    quick="add a warm-up",
    wants=(("loss_curves", "whether the loss leaves its course within the first steps"),),
    explains=("divergence", "gradient-explosion", "gradient-spike", "not-finite"),
)
PER_BATCH: Final = Issue(
    id="epoch-schedule-stepped-per-batch",
    title="a schedule of so many epochs moves at every batch: the learning rate is gone after the"
    " first batches",
    severity=Severity.ERROR,
    fix="Step the schedule once per epoch, or make it of epochs * len(loader) steps.",
    quick="move scheduler.step() out of the batch loop",
    wants=(("loss_curves", "the learning rate of each step"),),
    explains=("plateau",),
)
PER_EPOCH: Final = Issue(
    id="batch-schedule-stepped-per-epoch",
    title="a schedule of so many batches moves once per epoch: the learning rate stays in its"
    " warm-up",
    severity=Severity.ERROR,
    fix="Step the schedule after every optimizer step.",
    quick="move scheduler.step() into the batch loop",
    wants=(("loss_curves", "the learning rate of each step"),),
    explains=("plateau",),
)

HIGH_FOR: Final = {"adam": 1e-2, "sgd": 10.0}
"""What no published recipe reaches: ten times torch's default of Adam (1e-3), which is above
GPT-3's rates for all sizes (6e-4 to 6e-5: Brown et al. 2020, table 2.1), and a hundred times the
usual 0.1 of SGD (He et al. 2016)."""
HIGH_FOR_TRANSFORMER: Final = 3e-3
"""Five times the largest of GPT-3's table 2.1, for transformers under Adam."""
RATE_OF_WARMUP: Final = 5e-4
"""From here on published transformer recipes under Adam all have a warm-up (6e-4 in GPT-3)."""
EARLY: Final = 2_000
"""The longest usual warm-up of language models: what breaks later is not for want of one (GPT-3:
375 million tokens, some 750 steps of its smallest batch; nanoGPT: 2,000 steps)."""

_ADAM: Final = re.compile(r"adam|lion|lamb", re.IGNORECASE)
_SGD: Final = re.compile(r"^sgd|momentum", re.IGNORECASE)
_TRANSFORMER: Final = re.compile(
    r"multiheadattention|transformer|attention|gpt|llama|bert|causallm|n_head|num_heads"
)
_EPOCHS: Final = re.compile(r"epoch", re.IGNORECASE)
_BATCHES: Final = re.compile(r"len\(\w*(?:loader|dl|dataloader)\w*\)")
_SCHEDULES: Final = re.compile(r"(?:LR|_schedule\w{0,60}|_scheduler)$")


def too_high(facts: Facts) -> Iterator[Clue]:
    """Find a rate beyond all recipes in a run that blows up."""
    effect = facts.blows_up or facts.is_nan
    said = facts.said("diverges") or facts.said("nan")
    if not effect and not said:
        return
    kind, limit = _limit(facts)
    rate = facts.settings.smallest("lr")
    if rate is None or (rate.number or 0.0) < limit or _is_measured_lower(facts, limit):
        return
    says = f"the learning rate is {rate.number:g}, beyond what {kind} stands (about {limit:g})"
    yield Clue(TOO_HIGH, FITS, (rate.evidence,), says)
    if effect:
        yield Clue(TOO_HIGH, FITS, effect)
    if said:
        yield Clue(TOO_HIGH, SAID, said)


def _limit(facts: Facts) -> tuple[str, float]:
    """Return which optimizer it is, in words, and the rate beyond which no recipe goes."""
    name = _optimizer(facts)
    if name and _SGD.search(name):
        return "SGD", HIGH_FOR["sgd"]
    if name and _ADAM.search(name):
        if _is_transformer(facts):
            return f"a transformer under {name}", HIGH_FOR_TRANSFORMER
        return name, HIGH_FOR["adam"]
    return "any usual optimizer", HIGH_FOR["sgd"]


def _optimizer(facts: Facts) -> str:
    """Return the name of the optimizer, "" where nothing or more than one is named."""
    names = {
        tail(call)
        for code in facts.program.codes
        for call in code.calls
        if is_optimizer_class(code, call)
    }
    if not names:
        named = facts.settings.of("optimizer")
        names = {str(each.value) for each in named if isinstance(each.value, str)}
        names |= _types_of_optimizers(facts)
    return names.pop() if len(names) == 1 else ""


def _types_of_optimizers(facts: Facts) -> set[str]:
    """Return the ``type`` of a section ``optimizer``, as DeepSpeed and others write it."""
    found = set()
    for document in facts.documents.of("config"):
        match = re.search(
            r"[\"']?optimizer[\"']?\s{0,4}[:=]\s{0,20}\{?\s{0,40}[\"']?(?:type|name|_target_)[\"']?"
            r"\s{0,4}[:=]\s{0,4}[\"']?([\w.]{1,60})",
            document.text,
        )
        if match:
            found.add(match[1].rpartition(".")[2])
    return found


def _is_transformer(facts: Facts) -> bool:
    return _TRANSFORMER.search(facts.program.text) is not None or bool(
        facts.settings.of("vocab") and facts.settings.of("layers")
    )


def _is_measured_lower(facts: Facts, limit: float) -> bool:
    """Whether the log shows rates, and none of them is that high."""
    found = facts.measured.series("lr")
    return bool(found) and all(float(np.nanmax(s.values)) < limit for _, s in found)


def no_warmup(facts: Facts) -> Iterator[Clue]:
    """Find Adam at its full rate from the first step, in a transformer that breaks early."""
    if not _ADAM.search(_optimizer(facts)) or not _is_transformer(facts):
        return
    effect = facts.blows_up
    begin = _begin_of_trouble(facts)
    rate = facts.settings.only_number("lr")
    if not effect or begin is None or begin > EARLY:
        return
    if rate is None or (rate.number or 0.0) < RATE_OF_WARMUP:
        return
    start = _starts_at_full_rate(facts)
    if not start:
        return
    yield Clue(NO_WARMUP, FITS, (*start, rate.evidence))
    yield Clue(NO_WARMUP, FITS, effect)


def _begin_of_trouble(facts: Facts) -> float | None:
    steps = [each.step for each in facts.measured.seen(*BLOWN_UP) if each.step is not None]
    return min(steps, default=None)


def _starts_at_full_rate(facts: Facts) -> tuple[Evidence, ...]:
    """Return what shows that there is no warm-up: a setting of 0, or the first rates of the log."""
    settings = facts.settings.of("warmup")
    if settings:
        zero = [each for each in settings if each.value in (0, 0.0, False)]
        return (zero[0].evidence,) if len(zero) == len(settings) else ()
    for curves, series in facts.measured.series("lr"):
        first = series.values[:20]
        if len(first) >= 5 and series.steps[0] <= 1 and first[0] >= 0.99 * np.nanmax(series.values):
            return (facts.measured.point(curves, series, 0),)
    return ()


def cadence(facts: Facts) -> Iterator[Clue]:
    """Find schedules of epochs that move at each batch, and the other way round."""
    program = facts.program
    for code, call in program.calls("step"):
        made = made_of(program, dotted(receiver(call)).rpartition(".")[2])
        if made is None or not _SCHEDULES.search(tail(made)):
            continue
        length = _length(made)
        loops = code.loops(call)
        if length is None or not loops or _is_conditional(code, call, loops[0]):
            continue
        is_per_batch = len(loops) > 1 and _own_backward(program, loops[0])
        has_batches = _BATCHES.search(ast.unparse(made))
        if is_per_batch and _EPOCHS.search(ast.unparse(length)) and not has_batches:
            yield Clue(PER_BATCH, SHOWN, (code.evidence(call), _made_at(program, made)))
            return
        if not is_per_batch and has_batches and _has_batch_loop(program, loops[0]):
            yield Clue(PER_EPOCH, SHOWN, (code.evidence(call), _made_at(program, made)))
            return


def _length(made: ast.Call) -> ast.expr | None:
    """Return the length of a schedule."""
    places = {"CosineAnnealingLR": (1, "T_max"), "LinearLR": (3, "total_iters")}
    if tail(made) in places:
        return positional(made, *places[tail(made)])
    for name in ("num_training_steps", "total_steps", "steps_per_epoch", "T_max", "total_iters"):
        if (given := positional(made, 99, name)) is not None:
            return given
    return None


def _is_conditional(code: Code, call: ast.Call, loop: ast.AST) -> bool:
    for outer in code.around(call):
        if outer is loop:
            return False
        if isinstance(outer, ast.If):
            return True
    return True


def _own_backward(program: Program, loop: ast.AST) -> bool:
    """Whether a loop does a backward pass itself, and holds no further loop that does."""
    inner = [n for n in all_nodes(loop) if isinstance(n, ast.For | ast.While)]
    return "backward" in program.reach(loop) and not any(
        "backward" in program.reach(each) for each in inner
    )


def _has_batch_loop(program: Program, loop: ast.AST) -> bool:
    inner = [n for n in all_nodes(loop) if isinstance(n, ast.For | ast.While)]
    return any("backward" in program.reach(each) for each in inner)


def _made_at(program: Program, made: ast.Call) -> Evidence:
    code = next(code for code in program.codes if made in code.parents)
    return code.evidence(made)


RULES: Final = (too_high, no_warmup, cadence)
