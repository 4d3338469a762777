"""What kind of tensor something is, without importing what the program has not."""

from __future__ import annotations

import sys
from typing import Final

_DTENSOR: Final = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> bool:
    """Say whether this is a DTensor, without importing them."""
    kind = getattr(sys.modules.get(_DTENSOR), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
