"""Half precision: loss scaling, clipping under it, and updates that are lost to rounding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import FITS, SAID, SHOWN, Clue, Issue
from distdiag.diagnosis.facts import Facts, spoken
from distdiag.diagnosis.program import (
    Code,
    Program,
    dotted,
    is_optimizer_class,
    keyword,
    positional,
    receiver,
    tail,
)
from distdiag.diagnosis.rules.loss_functions import made_of
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes
from distdiag.metrics.judging import Kind

NO_SCALER: Final = Issue(
    id="fp16-without-loss-scaling",
    title="training runs in float16 without loss scaling: gradients below 6e-8 become 0, and what"
    " exceeds 65504 becomes inf",
    severity=Severity.ERROR,
    fix="Use torch.amp.GradScaler around backward() and step(), or bfloat16, which needs none.",
    quick="use bfloat16, or a GradScaler",
    wants=(("loss_curves", "whether the loss becomes NaN or stays where it is"),),
    explains=("not-finite", "divergence", "gradient-explosion", "stuck", "plateau"),
)
SCALED_CLIP: Final = Issue(
    id="clipping-of-scaled-gradients",
    title="gradients are clipped while they are still multiplied by the loss scale: nearly all of"
    " each is cut away",
    severity=Severity.ERROR,
    fix="Call scaler.unscale_(optimizer) before clip_grad_norm_.",
    quick="add scaler.unscale_(optimizer) before clipping",
    explains=("plateau", "stuck"),
)
SCALE_COLLAPSE: Final = Issue(
    id="loss-scale-collapse",
    title="the loss scale falls again and again: float16 cannot hold the gradients, and steps are"
    " skipped",
    severity=Severity.ERROR,
    fix="Train in bfloat16, or find what overflows: a learning rate that is too high, a sum in"
    " float16, a mask of -1e9 (torch.finfo(dtype).min holds).",
    quick="use bfloat16",
    wants=(("config", "which precision and learning rate are set"),),
    explains=("not-finite",),
)
LOST_UPDATES: Final = Issue(
    id="updates-lost-in-bfloat16",
    title="weights are kept in bfloat16, and updates are too small for it: it has 8 bits, so what"
    " is below 0.4 % of a weight is rounded away",
    severity=Severity.WARNING,
    fix="Keep the weights in float32 (autocast for the arithmetic), or use an optimizer with"
    " float32 copies or stochastic rounding.",
    quick="keep float32 weights",
    wants=(("loss_curves", "whether the loss stands still"),),
    explains=("plateau", "stuck"),
)

_SCALING: Final = (
    "gradscaler",
    "loss_scale",
    "lossscaler",
    "amp.initialize",
    "deepspeed",
    "accelerat",
    "fabric",
    "trainer(",
)
_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_")
SMALL_RATE: Final = 2e-5
"""A step of Adam moves a weight by about the learning rate; weights of a layer of width 1,000 are
about 0.02, of which bfloat16 keeps steps of 2**-8: 8e-5. A fourth of that is lost for certain."""
_SCALE: Final = re.compile(
    r"(?i)(?:reducing|reduced|attempted) loss scale.{0,60}?(?:to|:)\s{0,3}(\d[\d.e+-]{0,20})"
)
_AT_MINIMUM: Final = re.compile(
    r"(?i)loss scale (?:is )?already at minimum|minimum loss scale reached"
)
NO_SCALE_LEFT: Final = 1.0
"""A scaler begins at 65536 and halves; below 1 it makes gradients smaller, which nobody wants.
Single overflows on the way are how a healthy scaler finds its scale."""


def no_scaler(facts: Facts) -> Iterator[Clue]:
    """Find float16 in a loop that trains, in a program without a scaler."""
    program = facts.program
    if "backward" not in program.tails or any(word in program.text for word in _SCALING):
        return
    for code in program.codes:
        for call in code.calls:
            if _is_fp16_autocast(code, call) and _trains(program, code, call):
                yield Clue(NO_SCALER, SHOWN, (code.evidence(call),))
                return
            if _halves_model(program, code, call):
                yield Clue(NO_SCALER, SHOWN, (code.evidence(call),))
                return


def _is_fp16_autocast(code: Code, call: ast.Call) -> bool:
    full = code.module.full_name(call.func)
    if tail(call) != "autocast":
        return False
    enabled = keyword(call, "enabled")
    if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value is True):
        return False
    dtype = keyword(call, "dtype")
    if dtype is not None:
        return dotted(dtype) in ("torch.float16", "torch.half", "float16")
    if full == "torch.cuda.amp.autocast":
        return True
    device = positional(call, 0, "device_type")
    return isinstance(device, ast.Constant) and device.value == "cuda"


def _trains(program: Program, code: Code, call: ast.Call) -> bool:
    loops = code.loops(call)
    unit: ast.AST = loops[0] if loops else code.scope(call)
    if isinstance(unit, ast.Module | ast.ClassDef):
        return False
    return "backward" in program.reach(unit)


def _halves_model(program: Program, code: Code, call: ast.Call) -> bool:
    held = receiver(call)
    if held is None or not _is_trained(program, held):
        return False
    if tail(call) == "half":
        return True
    given = [*call.args, *(k.value for k in call.keywords)]
    return tail(call) == "to" and any(dotted(g) in ("torch.float16", "torch.half") for g in given)


def _is_trained(program: Program, expr: ast.expr) -> bool:
    """Whether an expression is, or makes, the model that an optimizer trains."""
    name = dotted(expr)
    trained = {
        dotted(receiver(node))
        for code in program.codes
        for call in code.calls
        if is_optimizer_class(code, call)
        for node in all_nodes(call)
        if isinstance(node, ast.Call) and tail(node) in ("parameters", "named_parameters")
    }
    if name:
        return name in trained
    made = [made_of(program, each.rpartition(".")[2]) for each in trained]
    return any(each is not None and ast.dump(each) == ast.dump(expr) for each in made)


def scaled_clip(facts: Facts) -> Iterator[Clue]:
    """Find clipping between scaler.scale(...).backward() and scaler.step() without unscale_."""
    program = facts.program
    if "unscale_" in program.tails or "GradScaler" not in program.tails:
        return
    for code, call in program.calls("step"):
        held = dotted(receiver(call)).lower()
        if "scaler" not in held or not call.args:
            continue
        loops = code.loops(call)
        unit: ast.AST = loops[0] if loops else code.scope(call)
        for node in all_nodes(unit):
            if isinstance(node, ast.Call) and tail(node) in _CLIPS:
                yield Clue(SCALED_CLIP, SHOWN, (code.evidence(node), code.evidence(call)))
                return


def scale_collapse(facts: Facts) -> Iterator[Clue]:
    """Find a loss scale that keeps falling: measured, or in many lines of the log."""
    measured = facts.measured.of_kinds(Kind.LOSS_SCALE)
    if measured:
        yield Clue(SCALE_COLLAPSE, SHOWN, measured)
    for document, number, line in facts.lines():
        scale = _SCALE.search(line)
        if _AT_MINIMUM.search(line) or (scale and _number(scale[1]) < NO_SCALE_LEFT):
            yield Clue(SCALE_COLLAPSE, SHOWN, (spoken(document, number, line),))
            break
    else:
        if not measured:
            return
    if on := facts.settings.is_on("fp16"):
        yield Clue(SCALE_COLLAPSE, FITS, (on.evidence,))


def _number(text: str) -> float:
    try:
        return float(text.rstrip("."))
    except ValueError:
        return NO_SCALE_LEFT


def lost_updates(facts: Facts) -> Iterator[Clue]:
    """Find bfloat16 weights with a small rate in a run that stands still."""
    standing = facts.stands_still
    said = facts.said("stuck")
    rate = facts.settings.only_number("lr")
    if not (standing or said) or rate is None or (rate.number or 1.0) > SMALL_RATE:
        return
    for code in facts.program.codes:
        for call in code.calls:
            if _keeps_bfloat16(facts.program, code, call):
                yield Clue(LOST_UPDATES, FITS, (code.evidence(call), rate.evidence))
                if standing:
                    yield Clue(LOST_UPDATES, FITS, standing)
                if said:
                    yield Clue(LOST_UPDATES, SAID, said)
                return


def _keeps_bfloat16(program: Program, code: Code, call: ast.Call) -> bool:
    held = receiver(call)
    if held is None or not _is_trained(program, held):
        return False
    given = [*call.args, *(k.value for k in call.keywords)]
    return tail(call) == "bfloat16" or (
        tail(call) == "to" and any(dotted(g) == "torch.bfloat16" for g in given)
    )


RULES: Final = (no_scaler, scaled_clip, scale_collapse, lost_updates)
