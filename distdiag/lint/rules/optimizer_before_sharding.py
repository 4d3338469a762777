"""SHD001: an optimizer holds the parameters that a model had before it was sharded."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Rule, related
from distdiag.lint.guarded import short
from distdiag.lint.mentions import mentions
from distdiag.lint.modules import Function, Module, all_nodes
from distdiag.lint.sites import Site, sites_of

_OPTIMIZER: Final = re.compile(
    r"(^|\.)(\w*(Adam|SGD|Adagrad|RMSprop|Lion|Muon|Adafactor)\w*|\w*Optimizer)$"
)
_SHARDING: Final = re.compile(
    r"^torch\.distributed\.(fsdp|_composable\.fsdp)(\.\w+)*\.(fully_shard|FullyShardedDataParallel)$"
    r"|^torch\.distributed\.tensor\.parallel(\.\w+)*\.parallelize_module$"
)
_WORDS: Final = ("fully_shard", "fsdp", "fullysharded", "parallelize_module")
_PARAMETERS: Final = frozenset({"parameters", "named_parameters"})


# Both in the same function, with no new optimizer behind the sharding.
class OptimizerBeforeSharding(Rule):
    """An optimizer holds the parameters that a model had before it was sharded.

    ## What you see
    Training runs and gradients look right, but the weights never change. `fully_shard`, `FSDP` and
    `parallelize_module` replace the parameters, and the optimizer goes on with the old ones.

    ## Example
        # wrong
        optimizer = AdamW(model.parameters())
        fully_shard(model)
        # right
        fully_shard(model)
        optimizer = AdamW(model.parameters())

    ## How to fix
    Shard the model first, and make the optimizer of the sharded parameters.

    ## When it is not a defect
    The optimizer gets the sharded parameters further on, in a place that lint does not see.

    To silence a line, end it with `# distdiag: ignore[SHD001]`.

    ## References
    - https://github.com/pytorch/pytorch/issues/107843
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "SHD001"
    name = "optimizer-before-sharding"
    severity = Severity.ERROR

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the optimizers that hold parameters from before the sharding."""
        for function in module.functions:
            if mentions(function, _WORDS):
                yield from _Order(self, function).findings()


class _Order:
    """The optimizers and shardings of one function."""

    def __init__(self, rule: OptimizerBeforeSharding, function: Function) -> None:
        self._rule = rule
        self._function = function
        self._sites = sites_of(function)

    def findings(self) -> Iterator[LintFinding]:
        shardings = [site for site in self._sites if self._is_sharding(site)]
        if not shardings:
            return
        module = self._function.module
        for site in self._sites:
            model = self._model_of_optimizer(site)
            later = [s for s in shardings if self._follows(s, site) and _first(s) == model]
            if not model or not later or self._is_made_again(later[-1], model):
                continue
            yield self._rule.finding(
                module,
                site.call,
                f"{short(site.call.func)} is made of {model}.parameters() before "
                f"{short(later[0].call.func)} in line {later[0].call.lineno} replaces them",
                related=(related(module, later[0].call, "replaces the parameters"),),
            )

    def _is_sharding(self, site: Site) -> bool:
        full = self._function.module.full_name(site.call.func)
        return _SHARDING.match(full) is not None

    def _model_of_optimizer(self, site: Site) -> str:
        """Return the text of the model whose parameters an optimizer is made of, "" for others."""
        if not _OPTIMIZER.search(ast.unparse(site.call.func)):
            return ""
        for node in all_nodes(site.call):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in _PARAMETERS:
                return ast.unparse(node.func.value)
        return ""

    def _follows(self, later: Site, site: Site) -> bool:
        answers = {c.test: c.answer for c in site.conditions}
        apart = any(answers.get(c.test, c.answer) != c.answer for c in later.conditions)
        return later.order > site.order and not apart and not site.exits[len(later.exits) :]

    def _is_made_again(self, sharding: Site, model: str) -> bool:
        return any(self._model_of_optimizer(s) == model for s in self._sites[sharding.order :])


def _first(site: Site) -> str:
    return ast.unparse(site.call.args[0]) if site.call.args else ""
