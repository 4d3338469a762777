"""Labels: how they are padded, shifted, and how large they may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.diagnosis.causes import FITS, SHOWN, SPOKEN, Clue, Evidence, Issue
from distdiag.diagnosis.facts import Facts, spoken
from distdiag.diagnosis.program import Code, Program, dotted, keyword, origin, stripped, tail
from distdiag.diagnosis.rules.loss_functions import losses, made_of
from distdiag.diagnosis.settings import constant
from distdiag.findings.finding import Severity

IGNORED: Final = Issue(
    id="wrong-ignore-index",
    title="labels are padded with one value, and the loss ignores another one",
    severity=Severity.ERROR,
    fix="Pad labels with the value that the loss ignores: -100 unless ignore_index says another.",
    quick="make the padding of labels and ignore_index the same number",
    wants=(("error_messages", "whether a target is out of bounds"),),
    explains=("target-out-of-bounds", "cuda-device-side-assert", "cuda-index-out-of-bounds"),
)
SHIFTED_TWICE: Final = Issue(
    id="labels-shifted-twice",
    title="labels are shifted by the program and once more by the model: it learns to predict the"
    " token after the next one",
    severity=Severity.ERROR,
    fix="Give the model labels equal to input_ids; models of transformers shift them.",
    quick="remove the shift of the labels",
    wants=(("loss_curves", "whether the loss stays high"),),
    explains=("plateau",),
)
NOT_SHIFTED: Final = Issue(
    id="labels-not-shifted",
    title="a causal model is trained to give back its own input: labels are not shifted",
    severity=Severity.ERROR,
    fix="Compare logits[:, :-1] with tokens[:, 1:].",
    quick="shift logits and labels by one",
    wants=(("loss_curves", "whether the loss falls to 0 within few steps"),),
)
OUT_OF_RANGE: Final = Issue(
    id="target-out-of-bounds",
    title="a label is not within the number of classes",
    severity=Severity.ERROR,
    fix="Let labels begin at 0 and end at num_classes - 1, or enlarge the last layer; compare"
    " labels.min(), labels.max() and the size of the last layer.",
    quick="print labels.min(), labels.max() and logits.shape",
    wants=(("model_code", "how many outputs the last layer has, and how labels are made"),),
)
FROM_ONE: Final = Issue(
    id="labels-begin-at-one",
    title="labels begin at 1: the largest is as large as the number of classes, one too many",
    severity=Severity.ERROR,
    fix="Subtract 1 from the labels, or give the last layer one more output.",
    quick="labels = labels - 1",
    explains=("target-out-of-bounds", "cuda-device-side-assert", "cuda-index-out-of-bounds"),
)

DEFAULT_IGNORED: Final = -100
"""torch's default of ``ignore_index``."""
_LABEL: Final = re.compile(r"(?:^|_|\.)(?:labels?|targets?|tgt|lm_labels)(?:$|_)")
_OUT_OF_BOUNDS: Final = re.compile(r"Target (-?\d{1,12}) is out of bounds")
_CAUSAL: Final = re.compile(r"tril|triu|is_causal|causal_mask|causallm|gpt|decoder.only|next.token")
_HUGGING_FACE: Final = re.compile(r"automodelforcausallm|gpt2lmheadmodel|\w+forcausallm")
_IDS: Final = re.compile(r"^(?:x|inputs?|input_ids|tokens|ids|idx|batch)$")


def ignore_index(facts: Facts) -> Iterator[Clue]:
    """Compare the values that labels are padded with to those that losses ignore."""
    program = facts.program
    ignored = list(_ignored(program))
    targets = {dotted(stripped(call.args[1])) for _, call, _ in losses(program)} - {""}
    padded = list(_padded(program, targets))
    if not ignored or not padded:
        return
    values = {value for value, _ in ignored}
    fills = {value for value, _ in padded}
    if values & fills or _is_masked(program):
        return
    says = f"labels are padded with {_listed(fills)}, and the loss ignores {_listed(values)}"
    yield Clue(IGNORED, SHOWN, (padded[0][1], ignored[0][1]), says)
    for document, number, line in facts.lines():
        match = _OUT_OF_BOUNDS.search(line)
        if match and int(match[1]) in fills:
            yield Clue(IGNORED, SPOKEN, (spoken(document, number, line),), says)
            return


def _listed(values: set[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def _ignored(program: Program) -> Iterator[tuple[int, Evidence]]:
    """Yield what each cross entropy ignores, if all are constants."""
    found: list[tuple[int, Evidence]] = []
    for code, call, kind in losses(program):
        if kind not in ("cross_entropy", "nll_loss"):
            continue
        if keyword(call, "reduction") is not None:
            return  # the program sums over what it chooses
        made = made_of(program, dotted(call.func).rpartition(".")[2])
        given = keyword(call, "ignore_index")
        if given is None and made is not None:
            if keyword(made, "reduction") is not None:
                return
            given = keyword(made, "ignore_index")
        value = DEFAULT_IGNORED if given is None else constant(given)
        if not isinstance(value, int):
            return
        found.append((value, code.evidence(call)))
    yield from found


def _padded(program: Program, targets: set[str]) -> Iterator[tuple[int, Evidence]]:
    """Yield the constants that labels are filled with where they are padding."""
    for code in program.codes:
        for node in code.nodes:
            value = _fill(node, targets)
            number = constant(value) if value is not None else None
            if isinstance(number, int) and not isinstance(number, bool):
                yield number, code.evidence(node)


def _fill(node: ast.AST, targets: set[str]) -> ast.expr | None:
    match node:
        case ast.Assign(targets=[ast.Subscript(value=held, slice=chosen)], value=value) if (
            _is_label(held, targets) and isinstance(chosen, ast.Compare | ast.Name | ast.UnaryOp)
        ):
            return value
        case ast.Call(func=ast.Attribute(attr="masked_fill" | "masked_fill_", value=held)) if (
            _is_label(held, targets) and len(node.args) == 2
        ):
            return node.args[1]
        case ast.Call() if (
            tail(node) == "pad_sequence" and node.args and _is_label(node.args[0], targets)
        ):
            return keyword(node, "padding_value") or ast.Constant(value=0)
        case ast.Call():
            return keyword(node, "label_pad_token_id")
        case _:
            return None


def _is_label(expr: ast.expr, targets: set[str]) -> bool:
    """Whether an expression holds labels: by its name, or as what a loss gets for a target."""
    if dotted(stripped(expr)) in targets:
        return True
    name = dotted(stripped(expr)).rpartition(".")[2]
    if not name and isinstance(expr, ast.ListComp):
        text = ast.unparse(expr.elt)
        return re.search(r"label|target", text) is not None
    return _LABEL.search(name) is not None


def _is_masked(program: Program) -> bool:
    """Whether a mask chooses what counts, beside what the loss ignores."""
    return re.search(r"loss_mask|label_mask|\* ?mask|mask\.sum|\[mask\]", program.text) is not None


def shifted_twice(facts: Facts) -> Iterator[Clue]:
    """Find shifted labels that are given to a model of transformers as labels=."""
    program = facts.program
    if _HUGGING_FACE.search(program.text) is None:
        return
    for code in program.codes:
        for call in code.calls:
            labels = keyword(call, "labels")
            name = dotted(call.func).rpartition(".")[2]
            if labels is None or name not in ("model", "net", "lm"):
                continue
            shift = _shift(code, labels, "1:")
            ids = keyword(call, "input_ids") or (call.args[0] if call.args else None)
            if shift is not None and ids is not None and _shift(code, ids, ":-1") is not None:
                yield Clue(SHIFTED_TWICE, SHOWN, (code.evidence(shift), code.evidence(call)))
                return


def _shift(code: Code, expr: ast.expr, part: str) -> ast.expr | None:
    """Return where an expression is cut to ``[:, 1:]`` or ``[:, :-1]``."""
    for _ in range(6):
        if isinstance(expr, ast.Subscript):
            return expr if part in ast.unparse(expr.slice).strip("()").split(", ") else None
        if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
            expr = expr.func.value
            continue
        value = code.value(expr)
        if value is None:
            return None
        expr = value
    return None


def not_shifted(facts: Facts) -> Iterator[Clue]:
    """Find cross entropy of a causal model's output against the very tokens that it was given."""
    program = facts.program
    if _CAUSAL.search(program.text) is None or "labels=" in program.text:
        return
    if re.search(r"\[:, ?1:|\[1:|\[\.\.\., ?1:|roll\(|shift|i ?\+ ?1", program.text):
        return
    for code, call, kind in losses(program):
        if kind != "cross_entropy":
            continue
        target = dotted(stripped(call.args[1]))
        produced = _model_input(code, call.args[0])
        if target and target == produced and _IDS.match(target.rpartition(".")[2]):
            yield Clue(NOT_SHIFTED, SHOWN, (code.evidence(call),))
            return


def _model_input(code: Code, expr: ast.expr) -> str:
    """Return the name that a model's output was computed of."""
    source = origin(code, expr)
    if isinstance(source, ast.Call) and len(source.args) == 1:
        name = dotted(source.func).rpartition(".")[2]
        if name in ("model", "net", "network"):
            return dotted(stripped(source.args[0]))
    return ""


def out_of_range(facts: Facts) -> Iterator[Clue]:
    """Read which label was out of bounds, and compare it to the outputs of the model."""
    for document, number, line in facts.lines():
        match = _OUT_OF_BOUNDS.search(line)
        if match is None:
            continue
        label = int(match[1])
        evidence = spoken(document, number, line)
        yield Clue(OUT_OF_RANGE, SPOKEN, (evidence,), f"the label {label} is not a class")
        for size in _last_layers(facts.program):
            if size[0] == label > 1:
                says = (
                    f"the label {label} is one too large for {size[0]} outputs: labels begin at 1"
                )
                yield Clue(FROM_ONE, FITS, (evidence,), says)
                yield Clue(FROM_ONE, FITS, (size[1],), says)
                break
        return


def _last_layers(program: Program) -> Iterator[tuple[int, Evidence]]:
    """Yield sizes of linear layers' outputs, and constants named as the number of classes."""
    for code in program.codes:
        for node in code.nodes:
            value: ast.expr | None = None
            match node:
                case ast.Call() if tail(node) == "Linear" and len(node.args) >= 2:
                    value = node.args[1]
                case ast.Assign(targets=[ast.Name(id="num_classes" | "n_classes" | "NUM_CLASSES")]):
                    value = node.value
                case ast.keyword(arg="num_classes" | "num_labels"):
                    value = node.value
                case _:
                    pass
            number = constant(value) if value is not None else None
            if isinstance(number, int):
                yield number, code.evidence(node)


RULES: Final = (ignore_index, shifted_twice, not_shifted, out_of_range)
