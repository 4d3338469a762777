"""What lies in the folder of a job beside its logs and dumps, told by names and first bytes.

A person says ``distdiag analyze .`` where sources, checkpoints and data sets of any size are, too.
Only what a folder holds is judged here: a file that the user names is always read.
"""

from __future__ import annotations

import re
from typing import Final

HEAD_BYTES: Final = 4096
"""So much of a file is looked at to see what it is."""
LARGE: Final = 16 << 20
"""Texts that are larger are data sets as often as logs: they must look like a log."""
LARGE_ARCHIVE: Final = 256 << 20

_SKIPPED_FOLDERS: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}
)
_KINDS: Final = {
    "sources": (
        "a bash c cc cfg cpp css cu cubin cuh go h hpp html ini ipynb java js lock md o ptx py pyc "
        "pyi rs rst sh so toml ts whl yaml yml"
    ),
    "checkpoints": "ckpt distcp gguf h5 hdf5 metadata onnx safetensors tiktoken",
    "data": (
        "arrow avi bmp csv feather flac gif idx jpeg jpg lmdb mdb mkv mp3 mp4 npy npz ogg parquet "
        "pdf png svg tfevents tfrecord tif tiff tsv wav webm webp"
    ),
}
_KIND_BY_SUFFIX: Final = {
    suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()
}
_OF_TORCH: Final = frozenset({"bin", "pt", "pth"})
_EVENTS: Final = "events.out.tfevents."
# Names of logs: train.log, slurm-47.out, job.err, stdout, worker.e4711
_LOG_SUFFIX: Final = re.compile(r"(?:log|out|err|stdout|stderr|txt|\d+|[eo]\d+)?")
_LOG_SIGNS: Final = (b"Traceback (most recent", b"NCCL", b"[rank", b'  File "', b"Xid (", b"srun:")
_DUMP_SIGNS: Final = (b'"pg_config"', b'"pg_status"', b'"entries"')
_PICKLE: Final = b"\x80"
_MARKS: Final = (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b", b"PK\x03\x04", _PICKLE)


def is_skipped_folder(name: str) -> bool:
    """Whether a folder of this name holds no evidence: hidden, caches, installed packages."""
    return name.startswith(".") or name in _SKIPPED_FOLDERS


def kind_by_name(name: str) -> str:
    """Return what a file is that need not be opened to know: sources, checkpoints or data."""
    if name.startswith(_EVENTS):
        return "data"
    return _KIND_BY_SUFFIX.get(_suffix(name), "")


def kind_by_head(name: str, head: bytes, tail: bytes, size: int) -> str:
    """Return what a file is by its first and last bytes; ``""`` if it may be evidence.

    `head` are its first `HEAD_BYTES` bytes, `tail` some of its last ones.
    """
    suffix = _suffix(name)
    if suffix in _OF_TORCH and not head.startswith(_PICKLE):
        return "checkpoints"
    member = _first_member(head)
    if member:
        kind = "checkpoints" if member.endswith("/data.pkl") else kind_by_name(member)
        return kind or ("large archives" if size > LARGE_ARCHIVE else "")
    if b"\0" in head and not head.startswith(_MARKS) and not _is_wide_text(head):
        return "data"
    if head.startswith(_MARKS) or size <= LARGE:
        return ""
    is_named_so = _LOG_SUFFIX.fullmatch(suffix) is not None
    is_log = is_named_so and any(sign in head or sign in tail for sign in _LOG_SIGNS)
    is_dump = suffix == "json" and any(sign in head or sign in tail for sign in _DUMP_SIGNS)
    return "" if is_log or is_dump or suffix in ("log", "out", "err") else "data"


def _suffix(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return suffix.lower() if dot and stem else ""


def _first_member(head: bytes) -> str:
    """Return the name of the first file in a zip or tar archive, or ``""``."""
    if head.startswith(b"PK\x03\x04") and len(head) > 30:
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].decode(errors="replace")
    if head[257:262] == b"ustar":
        return head[:100].partition(b"\0")[0].decode(errors="replace")
    return ""


def _is_wide_text(head: bytes) -> bool:
    """Whether every second byte is zero, as in UTF-16 without a mark."""
    half = len(head) // 2
    return half > 0 and max(head[::2].count(0), head[1::2].count(0)) > half // 2
