"""Backward passes that compiled autograd runs."""

import sys


def is_compiled_pass() -> bool:
    """Say whether the pass itself is compiled: hooks would become a part of it."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
