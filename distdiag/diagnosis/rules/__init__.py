"""The rules: one module for each subject. A rule takes the facts and yields clues."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from distdiag.diagnosis.causes import Clue
from distdiag.diagnosis.facts import Facts

__all__ = ["Rule", "load_rules"]

Rule = Callable[[Facts], Iterator[Clue]]


def load_rules() -> Mapping[str, tuple[Rule, ...]]:
    """Import every module of this package and return its `RULES`, by the name of the module."""
    names = [module.name for module in iter_modules(__path__)]
    return {name: import_module(f"{__name__}.{name}").RULES for name in names}
