"""Python runs this when it starts in a process that a checked program has started.

`agent.children` puts this folder first on the path of such processes. Nothing is imported before
the process itself imports `torch.distributed`: most that a program starts never do.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _Waiting:
    """Sits in `sys.meta_path` until `torch.distributed` is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Let the process join at its `init_process_group`, and the other finders find."""
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        # In another environment of Python's there may be no distdiag, or not what it needs.
        with suppress(Exception):
            from distdiag.agent.joining import expect_to_join

            expect_to_join()
        return find_spec(name)


def _run_the_next() -> None:
    """Run the module of this name that would have been found without us, under its name."""
    sys.path[:] = [path for path in sys.path if path != _FOLDER]
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("DISTDIAG_JOIN"):
    sys.meta_path.insert(0, _Waiting())
_run_the_next()
