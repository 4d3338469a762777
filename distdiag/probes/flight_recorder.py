"""The flight recorder of torch, dumped from within, as JSON: that resolves no stacks."""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""That of NCCL, in builds that have it, and that of all other backends."""
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ENTRIES: Final = b'"entries"'
"""The JSON of a recorder that has recorded nothing lacks this key."""


def dump_flight_recorder() -> tuple[bytes, bytes | None]:
    """Return the recorder's JSON, and that of a second recorder where both have recorded.

    Where there is nothing to return, the JSON is ``{"error": "why"}``.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return _error("torch.distributed is not imported"), None
    size_name = next((name for name in _SIZES if name in os.environ), None)
    if size_name is not None and os.environ[size_name].strip() == "0":
        return _error(f"the flight recorder is off: {size_name} is 0"), None
    known = [dump for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    if not known:
        return _error("this torch has no flight recorder that writes JSON"), None
    try:
        dumps = [data for dump in known if _ENTRIES in (data := bytes(dump()))]
    except RuntimeError as error:
        return _error(f"the flight recorder failed: {error}"), None
    if not dumps:
        return _error("the flight recorder has no entries"), None
    return dumps[0], dumps[1] if len(dumps) > 1 else None


def _error(reason: str) -> bytes:
    return msgspec.json.encode({"error": reason})
