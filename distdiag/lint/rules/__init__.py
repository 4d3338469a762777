"""The rules: one module for each."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from distdiag.lint.base import Rule

__all__ = ["load_rules"]


def load_rules() -> Mapping[str, type[Rule]]:
    """Import every module of this package and map each rule's code to its class."""
    modules = [import_module(m.name) for m in iter_modules(__path__, prefix=f"{__name__}.")]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and value.__module__ == module.__name__
    ]
    return {rule.code: rule for rule in sorted(found, key=lambda rule: rule.code)}
