"""Every kind of event: what may stand in an event file or travel between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from distdiag.events.base import Event


def _defined() -> Iterator[type[Event]]:
    package = import_module(__package__)
    for module in iter_modules(package.__path__, f"{__package__}."):
        if module.name == __name__:
            continue
        for value in vars(import_module(module.name)).values():
            is_event = isinstance(value, type) and issubclass(value, Event)
            if is_event and value is not Event and value.__module__ == module.name:
                yield value


EVENTS: Final[tuple[type[Event], ...]] = tuple(_defined())
"""All that the modules beside this one define: a new event needs no entry anywhere."""
