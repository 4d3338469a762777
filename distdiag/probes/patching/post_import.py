"""Calls back when modules have been imported, without importing anything itself."""

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from distdiag.probes.untyped import Untyped


class ImportHook(MetaPathFinder):
    """Sits in `sys.meta_path` and tells when each of some modules has run to its end."""

    def __init__(self, names: Collection[str], callback: Callable[[str], None]) -> None:
        """Call `callback` with the name of each module, also of those imported already."""
        self._names = frozenset(names)
        self._callback = callback
        self._finding: set[str] = set()

    def start(self) -> None:
        """Begin to watch; modules that are there already are reported at once."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and not getattr(spec, "_initializing", False):
                self._callback(name)

    def stop(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the module, and put ourselves behind its loader."""
        if fullname not in self._names or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._callback)
        return spec


class _TellingLoader(Loader):
    """Loads a module as its own loader would, then tells of it."""

    def __init__(self, loader: Untyped, callback: Callable[[str], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the module's own loader create it."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with its own loader in place, as if we had not been here."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback(module.__name__)
