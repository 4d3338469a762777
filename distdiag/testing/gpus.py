"""How many GPUs a test may use, found out without loading torch."""

from __future__ import annotations

import os


def num_gpus() -> int:
    """Return how many GPUs the driver knows, as far as CUDA_VISIBLE_DEVICES shows them."""
    num = _num_installed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num
    return min(num, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _num_installed() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
