"""Writes what one rank computed to a file, so that two runs can be compared bit for bit."""

import argparse
import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from operation_log import Watch
from torch import Tensor
from torch.distributed.tensor import DTensor

_watch = Watch()


class _BeginToWatch(argparse.Action):
    def __call__(self, parser: object, namespace: object, value: object, *_: object) -> None:
        _watch.begin(is_ordered=value == "order")


def out_parser() -> argparse.ArgumentParser:
    """Return a parser that knows `--out FILE`; the record of a rank goes to `FILE.rank{r}.json`.

    With `--watch` it holds what modes see that are there from now on, and in which order unless
    that is `any`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--watch", choices=("order", "any"), action=_BeginToWatch)
    return parser


def seed_everything(seed: int) -> None:
    """Seed the three generators whose states the record holds."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write_record(
    out: Path | None,
    losses: Iterable[float | Tensor],
    weights: Mapping[str, object],
    **more: object,
) -> None:
    """Write losses, the digests of this rank's weights and generators, and what else is given."""
    seen = _watch.end()
    if out is None:
        return
    record = {
        "losses": [float(loss).hex() for loss in losses],
        "weights": _weights_digest(weights),
        "rng": _rng_digests(),
        **seen,
        **more,
    }
    path = out.with_name(f"{out.name}.rank{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(record, indent=1, sort_keys=True))


def _weights_digest(weights: Mapping[str, object]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        if not isinstance(value, Tensor):
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        digest.update(f"{name}{tuple(local.shape)}{local.dtype}".encode())
        digest.update(_bytes_of(local.detach()))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _rng_digests() -> dict[str, str]:
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": hashlib.sha256(_bytes_of(torch.get_rng_state())).hexdigest(),
        "numpy": hashlib.sha256(repr(_plain(numpy_state)).encode()).hexdigest(),
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
    }


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    # The repr of a long array leaves out its middle.
    return value.tolist() if isinstance(value, np.ndarray) else value
