"""The training loop: its calls, their order, and the mode of the model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import SHOWN, Clue, Issue
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.program import (
    Code,
    Program,
    batch_loop,
    block_of,
    dotted,
    is_optimizer,
    keyword,
    positional,
    receiver,
    statement_of,
    tail,
)
from distdiag.findings.finding import Severity
from distdiag.lint.modules import all_nodes

KEPT_GRADIENTS: Final = Issue(
    id="gradients-never-cleared",
    title="the loop steps the optimizer and never clears the gradients: each step adds those of all"
    " batches before",
    severity=Severity.ERROR,
    fix="Call optimizer.zero_grad() once for each optimizer.step(), before the next backward pass.",
    quick="add optimizer.zero_grad() to the loop",
    wants=(("loss_curves", "whether gradient norms grow from step to step"),),
    explains=("divergence", "gradient-explosion", "gradient-spike"),
)
CLEARED_EARLY: Final = Issue(
    id="gradients-cleared-before-step",
    title="the gradients are cleared between backward() and step(): the optimizer sees none",
    severity=Severity.ERROR,
    fix="Call zero_grad() before backward(), or after step().",
    quick="move zero_grad() before backward()",
    explains=("stuck", "plateau", "zero-gradient"),
)
NO_STEP: Final = Issue(
    id="optimizer-never-steps",
    title="the loop computes gradients, and nothing applies them: no step() is called anywhere",
    severity=Severity.ERROR,
    fix="Call optimizer.step() after backward().",
    quick="add optimizer.step() after backward()",
    explains=("stuck", "plateau"),
)
NO_EVAL: Final = Issue(
    id="validation-in-training-mode",
    title="validation runs with the model in training mode: dropout is on, and batch normalisation"
    " takes and keeps the statistics of validation batches",
    severity=Severity.WARNING,
    fix="Call model.eval() before the validation loop and model.train() after it.",
    quick="add model.eval() before validation, model.train() after it",
    explains=("overfitting",),
)
NO_TRAIN: Final = Issue(
    id="training-in-evaluation-mode",
    title="model.eval() is called between epochs and model.train() never again: after the first"
    " validation the model trains without dropout and with frozen batch statistics",
    severity=Severity.WARNING,
    fix="Call model.train() at the beginning of each training epoch.",
    quick="add model.train() at the beginning of each epoch",
)
FUNCTIONAL_DROPOUT: Final = Issue(
    id="dropout-always-on",
    title="functional dropout is called without the module's mode: it is on in evaluation, too",
    severity=Severity.WARNING,
    fix="Pass training=self.training, or use nn.Dropout.",
    quick="pass training=self.training to dropout",
)
LATE_CLIP: Final = Issue(
    id="clipping-without-effect",
    title="gradients are clipped where it has no effect on the step",
    severity=Severity.WARNING,
    fix="Clip after backward() (and after scaler.unscale_) and before step().",
    quick="move clipping between backward() and step()",
    explains=("gradient-explosion", "gradient-spike", "divergence"),
)

_CLEARING: Final = frozenset({"zero_grad", "set_to_none"})
_MODEL: Final = re.compile(r"(?:^|\.|_)(?:model|net|network|engine)$")
_VALIDATION: Final = re.compile(
    r"\b(?:val|valid|validation|eval|test|dev)_?(?:loader|dl|dataloader|data_loader|iter|batches"
    r"|set|dataset|ds)\b"
)
_MODES: Final = re.compile(
    r"^(?:Alpha|Feature)?Dropout\d?d?$|^BatchNorm\dd$|^SyncBatchNorm$"
    r"|^Transformer(?:En|De)coderLayer$|^Transformer$|^resnet\d+$"
)
_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


def kept_gradients(facts: Facts) -> Iterator[Clue]:
    """Find optimizers that step in a loop in which nothing clears gradients."""
    program = facts.program
    if "deepspeed" in program.text or re.search(r"\.grad\s?=\s?none", program.text):
        return
    for code, call in program.calls("step"):
        if not _steps_optimizer(code, call):
            continue
        loop = batch_loop(code, call)
        units = [loop] if loop is not None else _loops_that_call(program, code.scope(call))
        if units and all(_keeps(program, unit) for unit in units):
            yield Clue(KEPT_GRADIENTS, SHOWN, (code.evidence(call),))
            return


def _keeps(program: Program, loop: ast.AST) -> bool:
    called = program.reach(loop)
    return "backward" in called and not called & _CLEARING and not _zeroes(loop)


def _loops_that_call(program: Program, function: ast.AST) -> list[ast.AST]:
    """Return the loops in which a function of the program is called."""
    name = getattr(function, "name", "")
    sites = [(code, batch_loop(code, call)) for code, call in program.calls(name) if name]
    return [loop for _, loop in sites if loop is not None]


def _zeroes(unit: ast.AST) -> bool:
    """Whether gradients are cleared by hand: ``p.grad.zero_()``."""
    return any(
        isinstance(node, ast.Call)
        and tail(node) in ("zero_", "fill_", "_foreach_zero_")
        and ("grad" in ast.unparse(node))
        for node in all_nodes(unit)
    )


def _steps_optimizer(code: Code, call: ast.Call) -> bool:
    held = receiver(call)
    if "scaler" in dotted(held).lower():
        return bool(call.args) and is_optimizer(code, call.args[0])
    # A closure clears the gradients itself.
    return is_optimizer(code, held) and not call.args and not call.keywords


def cleared_early(facts: Facts) -> Iterator[Clue]:
    """Find backward(), zero_grad(), step() of one optimizer in this order in one block."""
    for code, call in facts.program.calls("zero_grad"):
        statement = statement_of(code, call)
        block = block_of(code, statement) if statement is not None else []
        if not isinstance(statement, ast.Expr) or not block:
            continue
        place = block.index(statement)
        before = [tail_of(each) for each in block[:place]]
        if "backward" not in before or "step" in before[before.index("backward") :]:
            continue
        for later in block[place + 1 :]:
            name = tail_of(later)
            if name == "backward":
                break
            if name == "step" and _is_of_one(code, later, call, facts.program):
                yield Clue(CLEARED_EARLY, SHOWN, (code.evidence(call), code.evidence(later)))
                return


def tail_of(statement: ast.stmt) -> str:
    """Return the last name of a call that is a statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return tail(statement.value)
    return ""


def _is_of_one(code: Code, later: ast.stmt, clear: ast.Call, program: Program) -> bool:
    assert isinstance(later, ast.Expr) and isinstance(later.value, ast.Call)
    step = later.value
    stepped = dotted(receiver(step))
    if "scaler" in stepped.lower() and step.args:
        stepped = dotted(step.args[0])
    if not is_optimizer(code, receiver(step)) and "scaler" not in dotted(receiver(step)).lower():
        return False
    cleared = dotted(receiver(clear))
    if cleared == stepped:
        return True
    made = [call for owner, call in program.calls("parameters") if owner is code]
    return len(made) == 1 and _MODEL.search(cleared) is not None


def no_step(facts: Facts) -> Iterator[Clue]:
    """Find loops with backward() in a program that steps nothing."""
    program = facts.program
    applied = {"step", "apply_gradients", "fit", "train_batch", "add_", "sub_", "run_step"}
    if program.tails & applied or ".grad" in program.text:
        return
    for code, call in program.calls("backward"):
        loop = batch_loop(code, call)
        if loop is None or _hands_on(loop):
            continue
        if any(is_optimizer(code, receiver(node)) for node in _method_calls(loop)):
            yield Clue(NO_STEP, SHOWN, (code.evidence(call),))
            return


def _method_calls(top: ast.AST) -> Iterator[ast.Call]:
    for node in all_nodes(top):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node


def _hands_on(loop: ast.AST) -> bool:
    """Whether an optimizer is given to some function, which may step it."""
    return any(
        "optim" in dotted(given).lower()
        for node in all_nodes(loop)
        if isinstance(node, ast.Call)
        for given in (*node.args, *(k.value for k in node.keywords))
    )


def validation_mode(facts: Facts) -> Iterator[Clue]:
    """Find validation in a program with dropout or batch statistics that never asks for eval."""
    program = facts.program
    if "eval" in program.tails or re.search(r"\.train\((?:mode\s?=\s?)?false\)", program.text):
        return
    if program.tails & {"fit", "Trainer"} or not any(_MODES.match(t) for t in program.tails):
        return
    for code in program.codes:
        for loop in code.nodes:
            if not isinstance(loop, ast.For) or not _VALIDATION.search(ast.unparse(loop.iter)):
                continue
            runs = [n for n in all_nodes(loop) if isinstance(n, ast.Call) and _is_model(n)]
            if runs and "backward" not in program.reach(loop):
                yield Clue(NO_EVAL, SHOWN, (code.evidence(loop), code.evidence(runs[0])))
                return


def _is_model(call: ast.Call) -> bool:
    return _MODEL.search(dotted(call.func)) is not None


def training_mode(facts: Facts) -> Iterator[Clue]:
    """Find loops that train and call eval(), but nowhere train()."""
    program = facts.program
    if not any(_MODES.match(t) for t in program.tails):
        return
    for code in program.codes:
        for loop in code.nodes:
            if not isinstance(loop, ast.For | ast.While) or code.loops(loop):
                continue
            called = program.reach(loop)
            if not {"backward", "eval"} <= called or "train" in called:
                continue
            site = _eval_of_model(program)
            if site is not None:
                yield Clue(NO_TRAIN, SHOWN, (site[0].evidence(site[1]), code.evidence(loop)))
                return


def _eval_of_model(program: Program) -> tuple[Code, ast.Call] | None:
    sites = [
        (code, call)
        for code, call in program.calls("eval")
        if not call.args and _MODEL.search(dotted(receiver(call)))
    ]
    return sites[0] if sites else None


def functional_dropout(facts: Facts) -> Iterator[Clue]:
    """Find F.dropout in a forward method that is not told whether the module trains."""
    for code, call in facts.program.calls("dropout"):
        full = code.module.full_name(call.func)
        if full not in ("torch.nn.functional.dropout", "F.dropout"):
            continue
        given = positional(call, 2, "training")
        scope = code.scope(call)
        is_method = isinstance(scope, ast.FunctionDef) and scope.name == "forward"
        guarded = any(
            isinstance(outer, ast.If | ast.IfExp) and "training" in ast.unparse(outer.test)
            for outer in code.around(call)
        )
        if given is None and is_method and not guarded:
            yield Clue(FUNCTIONAL_DROPOUT, SHOWN, (code.evidence(call),))
            return


def late_clip(facts: Facts) -> Iterator[Clue]:
    """Find clipping behind the step, or before the backward pass, in one block."""
    for code, call in facts.program.calls(*_CLIPS):
        statement = statement_of(code, call)
        block = block_of(code, statement) if statement is not None else []
        if statement is None or not block or keyword(call, "optimizer") is not None:
            continue
        place = block.index(statement)
        before = [tail_of(each) for each in block[:place]]
        after = [tail_of(each) for each in block[place + 1 :]]
        is_behind = "step" in before and "step" not in after and "backward" not in after
        is_ahead = "backward" not in before and _in_order(after, "backward", "step")
        if not code.loops(call) or not ((is_behind and "backward" in before) or is_ahead):
            continue
        says = "after step()" if is_behind else "before backward()"
        optimizer = next(each for each in block if tail_of(each) == "step")
        if not _is_step(code, optimizer):
            continue
        yield Clue(
            LATE_CLIP,
            SHOWN,
            (code.evidence(call), code.evidence(optimizer)),
            f"gradients are clipped {says}, which has no effect on the step",
        )
        return


def _is_step(code: Code, statement: ast.stmt) -> bool:
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return _steps_optimizer(code, statement.value)


def _in_order(names: list[str], first: str, second: str) -> bool:
    return first in names and second in names[names.index(first) :]


RULES: Final = (
    kept_gradients,
    cleared_early,
    no_step,
    validation_mode,
    training_mode,
    functional_dropout,
    late_clip,
)
