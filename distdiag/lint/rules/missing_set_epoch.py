"""DAT001: a distributed sampler shuffles every epoch alike."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Rule, related
from distdiag.lint.guarded import short
from distdiag.lint.modules import Function, Module, all_nodes, children, statements

_EPOCH: Final = re.compile(r"epoch", re.IGNORECASE)


# A sampler that shuffles, a data loader made with it, a loop over epochs that uses the loader, and
# no call of `set_epoch` in the file.
class MissingSetEpoch(Rule):
    """A distributed sampler shuffles every epoch alike.

    ## What you see
    Every epoch has the same order, and each rank sees the same share of the data again: the model
    sees less variety than it seems to. The sampler shuffles by its seed and its epoch.

    ## Example
        sampler = DistributedSampler(data)
        for epoch in range(10):
            sampler.set_epoch(epoch)  # right; wrong: without this line
            train(DataLoader(data, sampler=sampler))

    ## How to fix
    Call `sampler.set_epoch(epoch)` at the start of each epoch.

    ## When it is not a defect
    The same order is wanted in each epoch, as in a test whether the model can memorise its data.

    To silence a line, end it with `# distdiag: ignore[DAT001]`.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "DAT001"
    name = "missing-set-epoch"
    severity = Severity.WARNING

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the samplers whose epoch is never set."""
        if not any("DistributedSampler" in line for line in module.lines):
            return
        if any("set_epoch" in line for line in module.lines):
            return
        loops = [loop for function in module.functions for loop in _epoch_loops(function)]
        for function in module.functions:
            for sampler, call in _samplers(function):
                loaders = _loaders(module, sampler, call)
                used = _loop_over({_name(loader.targets[0]) for loader in loaders}, loops)
                if used is None or _goes_elsewhere(module, sampler, loaders):
                    continue
                yield self.finding(
                    module,
                    call,
                    f"{short(call.func)} is never told the epoch: the loop in line {used.lineno} "
                    "sees the data in one order every time",
                    related=(related(module, used, "the loop over epochs"),),
                )


def _samplers(function: Function) -> Iterator[tuple[str, ast.Call]]:
    """Yield the distributed samplers that shuffle, each after its name ("" for none)."""
    for node in statements(function.node):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        for call in (node.value, *all_nodes(node.value)):
            if isinstance(call, ast.Call) and _is_shuffling_sampler(call, function):
                is_inside = isinstance(node.value, ast.Call) and node.value is not call
                yield "" if is_inside else _name(node.targets[0]), call


def _is_shuffling_sampler(call: ast.Call, function: Function) -> bool:
    full = function.module.full_name(call.func)
    if full.rpartition(".")[2] != "DistributedSampler":
        return False
    shuffle = next((k.value for k in call.keywords if k.arg == "shuffle"), None)
    return not (isinstance(shuffle, ast.Constant) and shuffle.value is False)


def _loaders(module: Module, sampler: str, made: ast.Call) -> list[ast.Assign]:
    """Return the assignments of data loaders that are made with a sampler."""
    found: list[ast.Assign] = []
    for node in statements(module.tree, nested=True):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        given = [k.value for k in node.value.keywords if k.arg == "sampler"]
        is_loader = _name(node.value.func).lower().endswith("loader")
        if is_loader and any(_holds(g, made) or _name(g) == sampler != "" for g in given):
            found.append(node)
    return found


def _holds(top: ast.AST, node: ast.AST) -> bool:
    return top is node or any(child is node for child in all_nodes(top))


def _goes_elsewhere(module: Module, sampler: str, loaders: list[ast.Assign]) -> bool:
    """Say whether something besides the loaders is given the sampler: it may be told there."""
    own = {id(k.value) for loader in loaders for k in _keywords(loader.value)}
    for node in all_nodes(module.tree):
        if isinstance(node, ast.Call | ast.keyword | ast.Dict | ast.Return | ast.Tuple):
            parts = (part for part in children(node) if id(part) not in own)
            if any(_name(part) == sampler != "" and _is_read(part) for part in parts):
                return True
    return False


def _is_read(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _keywords(call: ast.expr) -> list[ast.keyword]:
    return call.keywords if isinstance(call, ast.Call) else []


def _epoch_loops(function: Function) -> Iterator[ast.For]:
    for node in statements(function.node):
        if isinstance(node, ast.For) and _EPOCH.search(ast.unparse(node.target)):
            yield node


def _loop_over(loaders: set[str], loops: list[ast.For]) -> ast.For | None:
    for loop in loops:
        for statement in loop.body:
            if any(_name(node) in loaders for node in all_nodes(statement)):
                return loop
    return None


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
