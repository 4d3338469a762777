"""Ways to show a report: one module for each, found by its name."""

from importlib import import_module
from pkgutil import iter_modules

from distdiag.reports import formats
from distdiag.reports.base import Reporter, one_line
from distdiag.reports.formats.json import read_report, write_report

__all__ = [
    "Reporter",
    "load_reporter",
    "one_line",
    "read_report",
    "reporter_names",
    "write_report",
]


def reporter_names() -> tuple[str, ...]:
    """Return the names of all reporters; nothing is imported for it."""
    return tuple(sorted(m.name for m in iter_modules(formats.__path__)))


def load_reporter(name: str) -> type[Reporter]:
    """Import the reporter of this name, one of `reporter_names`."""
    module = import_module(f"{formats.__name__}.{name}")
    (reporter,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Reporter)
        and value.__module__ == module.__name__
    )
    return reporter
