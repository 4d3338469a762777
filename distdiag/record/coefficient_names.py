"""Which names tell of the coefficient of a auxiliary loss, and which of something else."""

from __future__ import annotations

import re
from typing import Final

_COEFFICIENT: Final = re.compile(
    r"coef|alpha|lambda|aux|balanc|router|z_loss|(^|_)lbl?(_|$)"
    r"|(loss|moe|gate)_?(weight|scale|factor)|(weight|scale|factor)_?(of_)?(loss|moe|gate)",
    re.IGNORECASE,
)
_OTHER: Final = re.compile(
    r"decay|noise|jitter|epsilon|(^|_)(eps|lr)(_|$)|init|drop|momentum|smooth|learning_rate",
    re.IGNORECASE,
)


def is_coefficient(name: str) -> bool:
    """Say whether a name may be that of a auxiliary loss, or of what it is multiplied by."""
    return bool(_COEFFICIENT.search(name)) and not _OTHER.search(name)
