"""The catalogue: one module for each check, and the checks of third parties."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages
from types import MappingProxyType
from typing import Any

from distdiag.checks.base import Check

__all__ = ["Check", "load_checks"]


@cache
def load_checks() -> Mapping[str, type[Check[Any]]]:
    """Import every module of this package and map each check's code to its class.

    Packages of others add checks through the entry-point group ``distdiag.checks``.
    """
    found = list(_own_checks())
    found += [entry.load() for entry in entry_points(group="distdiag.checks")]
    found.sort(key=lambda check: check.code)
    return MappingProxyType({check.code: check for check in found})


def _own_checks() -> list[type[Check[Any]]]:
    modules = [import_module(m.name) for m in walk_packages(__path__, prefix=f"{__name__}.")]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Check)
        and hasattr(value, "code")  # the others are what several checks share
        and value.__module__ == module.__name__
    ]
