"""The names of modules and parameters as the user knows them."""

from __future__ import annotations

import re
from typing import Final

# What wrappers put into the names of modules; the user never wrote it.
_WRAPPERS: Final = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)(?=\.|$)"
)


def clean_name(name: str) -> str:
    """Return the name of a module as the user knows it."""
    return _WRAPPERS.sub("", name).lstrip(".")
