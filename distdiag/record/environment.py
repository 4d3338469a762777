"""The variables of a process, as they may be shown to others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import xxhash

from distdiag.record.redaction import HIDDEN, is_secret_name, redacted

_SHOWN: Final = re.compile(
    r"NCCL|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NVTE|OMP_|MKL|OPENBLAS|NUMEXPR|GLOO|UCX|UCC|FI_|IB_"
    r"|MASTER_|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|ACCELERATE|FSDP|DEEPSPEED|DS_|MEGATRON"
    r"|TRANSFORMERS|HF_|TOKENIZERS|PYTHON|LD_LIBRARY_PATH|PATH$|HIP_|ROCR_|HSA_|RCCL|ASCEND|HCCL|XLA|TPU"
    r"|TRITON|VLLM|RAY_|SLURM_J|SLURM_N|SLURM_PROCID|OMPI_|PMI_|KMP_|MALLOC|GLIBC|SEED|DETERMINIS"
)
"""Variables of the libraries by which people train, and of what starts their ranks."""
_NOT_TOLD: Final = re.compile(
    r"(?:_|OLDPWD|PWD|SHLVL|COLUMNS|LINES|TERM.*|LS_COLORS|SSH_.*|XDG_.*|DBUS_.*|WINDOWID|PS1"
    r"|TORCHELASTIC_.*|MASTER_PORT|PYTEST_.*|DISTDIAG_.*)\Z"
)
"""Variables that differ from one shell or launch to the next, and say nothing of the training."""
_LONGEST: Final = 400


def variables_of(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and values in order; of variables that no library is known to read, a digest.

    The digest has 32 bits: enough to see that two differ, too few to find a secret by it.
    """
    for name in sorted(environ):
        if _NOT_TOLD.match(name) is not None:
            continue
        value = environ[name]
        if is_secret_name(name):
            yield name, HIDDEN
        elif _SHOWN.match(name) is not None or "SEED" in name:
            yield name, shortened(" ".join(redacted(value.split(" "))))
        else:
            yield name, f"digest {xxhash.xxh32_hexdigest(value.encode(errors='surrogateescape'))}"


def shortened(value: str) -> str:
    """Return a value of which the report need not show more, with a digest of what is left out."""
    if len(value) <= _LONGEST:
        return value
    rest = xxhash.xxh32_hexdigest(value.encode(errors="surrogateescape"))
    return f"{value[:_LONGEST]}… (digest {rest})"
