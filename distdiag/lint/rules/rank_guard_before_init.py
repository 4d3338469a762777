"""BAR005: a test on the rank is made before the process group exists."""

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.checks.bar.rank_guard_before_init import RankGuardBeforeInit as Check
from distdiag.findings.finding import Severity
from distdiag.frameworks.rank_names import last_name
from distdiag.lint.base import LintFinding, Rule, related
from distdiag.lint.effects import Effects
from distdiag.lint.guarded import short
from distdiag.lint.mentions import mentions, mentions_ranks
from distdiag.lint.modules import Function, Module, all_nodes
from distdiag.lint.operations import Family
from distdiag.lint.sites import Site, sites_of

# What is called to create a process group has such a name; the call itself is then looked at.
_STARTING: Final = (
    "accelerator(",
    "ddp_setup",
    "dist_init",
    "dist_setup",
    "distributed_init",
    "distributed_setup",
    "init_ddp",
    "init_dist",
    "init_parallel",
    "init_process",
    "init_torch",
    "initialize_dist",
    "initialize_parallel",
    "initialize_process",
    "launch_dist",
    "partialstate(",
    "setup_ddp",
    "setup_dist",
    "setup_parallel",
    "setup_process",
    "start_dist",
)
# Helpers that answer as rank 0 while there is no process group.
_MAX_DEPTH: Final = 3
_GET_RANK: Final = re.compile(r"^(torch\.distributed(\.\w+)?|dist)\.get_rank$")
_ASKING: Final = re.compile(r"rank|main|master|primary|zero|lead|chief", re.IGNORECASE)
_IS_READY: Final = re.compile(r"initialized|avail")
# Who asks the launcher's variables knows the rank before there is a process group.
_LAUNCHER: Final = re.compile(r"environ|getenv|RANK")
_TELLING: Final = re.compile(r"print|log|warn|info|debug|seed", re.IGNORECASE)


class RankGuardBeforeInit(Rule):
    """A test on the rank is made before the process group exists.

    ## What you see
    Every rank takes itself for rank 0: all of them download, write or delete. Helpers such as
    `not dist.is_initialized() or dist.get_rank() == 0` answer so until `init_process_group`.

    ## Example
        # wrong: it is true on every rank
        if is_main_process():
            download(data)
        dist.init_process_group()
        # right
        dist.init_process_group()
        if is_main_process():
            download(data)

    ## How to fix
    Create the process group first, or ask the environment variable RANK.

    ## When it is not a defect
    What stands under the test may be done by all ranks, such as a message on the screen.

    To silence a line, end it with `# distdiag: ignore[BAR005]`.

    ## References
    - https://github.com/yiqiao-yin/deepspeed-course/issues/16
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.is_initialized
    """

    code = Check.code
    name = Check.name
    severity = Severity.WARNING

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the tests on the rank that come before the process group."""
        for function in module.functions:
            start = self._start(function)
            if start is None or _asks_whether_ready(start, self.effects):
                continue
            for site in sites_of(function)[: start.order]:
                guess = self._guess(site)
                if guess is None or _are_apart(site, start):
                    continue
                asks = "is asked" if guess is site else f"asks {short(guess.call)}"
                yield self.finding(
                    module,
                    site.call,
                    f"{short(site.call)} {asks} before {short(start.call.func)} (line "
                    f"{start.call.lineno}) creates the process group: every rank acts as rank 0",
                    related=(
                        related(module, start.call, "creates the process group"),
                        related(guess.function.module, guess.call, "asks for the rank"),
                    ),
                )

    def _start(self, function: Function) -> Site | None:
        """Return the first call that creates the process group."""
        if not mentions(function, _STARTING):
            return None
        likely = (site for site in sites_of(function) if _is_named_so(site))
        return next((site for site in likely if self._starts(site)), None)

    def _starts(self, site: Site) -> bool:
        return any(e.operation.family is Family.START for e in self.effects.of_site(site))

    def _guess(self, site: Site) -> Site | None:
        """Return the guess of the rank that a call is, or that the called function decides by."""
        if _guesses_rank(site, self.effects):
            return site if _decides(site) else None
        function = self.effects.project.target(site.call, site.function)
        if function is None or not mentions_ranks(function):
            return None
        guards = (inner for inner in sites_of(function) if isinstance(inner.statement, ast.If))
        guesses = (g for g in guards if _guesses_rank(g, self.effects) and _decides(g))
        return next(guesses, None)


def _is_named_so(site: Site) -> bool:
    name = f"{last_name(site.call.func).lower()}("
    return any(word in name for word in _STARTING)


def _decides(site: Site) -> bool:
    """Say whether more than a message depends on the answer."""
    statement = site.statement
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return True
    if not isinstance(statement, ast.If):
        return False
    if site.call not in (statement.test, *all_nodes(statement.test)):
        return False
    calls = [n for s in statement.body for n in (s, *all_nodes(s)) if isinstance(n, ast.Call)]
    return any(not _TELLING.search(ast.unparse(call.func)) for call in calls)


def _are_apart(first: Site, second: Site) -> bool:
    answers = {condition.test: condition.answer for condition in first.conditions}
    return any(answers.get(c.test, c.answer) != c.answer for c in second.conditions)


def _guesses_rank(site: Site, effects: Effects, depth: int = 0) -> bool:
    """Say whether a call answers as rank 0 while there is no process group."""
    if _GET_RANK.match(site.function.module.full_name(site.call.func)):
        around = site.function.node if depth else site.statement
        asks_launcher = isinstance(around, ast.stmt) and _LAUNCHER.search(_text(around))
        return not asks_launcher and _asks_whether_ready(site, effects)
    if depth == _MAX_DEPTH or not _ASKING.search(ast.unparse(site.call.func)):
        return False
    function = effects.project.target(site.call, site.function)
    if function is None or not _is_small(function):
        return False
    return any(_guesses_rank(inner, effects, depth + 1) for inner in sites_of(function))


def _asks_whether_ready(site: Site, effects: Effects) -> bool:
    """Say whether a test before a call asks if there is a process group, itself or by a helper."""
    conditions = (*site.conditions, *(c for way in site.exits for c in way.conditions))
    for test in (condition.test for condition in conditions):
        if _IS_READY.search(ast.unparse(test)):
            return True
        calls = (node for node in (test, *all_nodes(test)) if isinstance(node, ast.Call))
        for call in calls:
            helper = effects.project.target(call, site.function)
            if helper and _is_small(helper) and _IS_READY.search(ast.unparse(helper.node)):
                return True
    return False


def _is_small(function: Function) -> bool:
    """Say whether a function only tells something: a longer one does other things as well."""
    return not isinstance(function.node, ast.Module) and len(function.node.body) <= 5


def _text(statement: ast.stmt) -> str:
    if isinstance(statement, ast.If | ast.While):
        return ast.unparse(statement.test)
    return ast.unparse(statement)
