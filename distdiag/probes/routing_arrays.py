"""The arrays that a recording of routing keeps: choices with their margins, samples of outputs."""

from __future__ import annotations

from typing import Any, Final

import torch

from distdiag.probes.batch_store import bytes_of
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.routing_mode import Chosen
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.tensor_bytes import is_readable
from distdiag.probes.tensor_content import contents
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import local_part

MOST_SAMPLED: Final = 1024
_MOST_TENSORS: Final = 64


def digests_of(value: Any) -> str:  # noqa: ANN401
    """Return one digest of all tensors in a value, empty if there are none that can be read.

    It waits for the device.
    """
    tensors = [local_part(t).detach() for t, _ in zip(tensors_in(value), range(_MOST_TENSORS))]  # noqa: B905
    found = contents(tensors).wait() if tensors else []
    return "-".join(content.digest for content in found if content is not None)


def sample_of(value: Any) -> tuple[str, bytes]:  # noqa: ANN401
    """Return the dtype of the first floating-point tensor in a value, and some of its numbers."""
    for each in tensors_in(value):
        tensor = local_part(each).detach()
        if not tensor.is_floating_point() or not tensor.numel() or not is_readable(tensor):
            continue
        with out_of_sight():
            flat = tensor.reshape(-1)
            some = flat[:: max(1, -(-flat.numel() // MOST_SAMPLED))]
            return _dtype(tensor), bytes_of(some.float().cpu().contiguous())
    return "", b""


def choice_of(chosen: Chosen) -> bytes:
    """Return the chosen indices and, for each token, the scores at the boundary and the greatest.

    The first score that was not chosen is minus infinity where there is none.
    """
    with out_of_sight():
        k = chosen.indices.shape[1]
        scores, indices = chosen.scores.detach(), chosen.indices.detach()
        wide = scores.double()
        best = wide.topk(min(k + 1, wide.shape[1]), -1).values
        inner = best[:, k - 1]
        outer = best[:, k] if best.shape[1] > k else torch.full_like(inner, -torch.inf)
        size = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(-1)
        parts = (indices.int(), inner, outer, size)
        return b"".join(bytes_of(part.contiguous().cpu()) for part in parts)


def is_whole(chosen: Chosen) -> bool:
    """Say whether a choice can be recorded: of tokens, out of plain numbers."""
    scores, indices = chosen.scores, chosen.indices
    is_plain = is_readable(scores) and is_readable(indices) and not is_dtensor(scores)
    return is_plain and len(scores) > 0 and 0 < indices.shape[1] <= scores.shape[1]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
