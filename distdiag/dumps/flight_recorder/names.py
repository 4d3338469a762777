"""How torch's flight recorder names operations, dtypes and peers, and what they are called here.

Facts from ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, the ``profilingTitle`` arguments of
the backends, and dumps of torch 2.13 on gloo.
"""

import re
from typing import Final

from distdiag.events.collectives import Signature, Sizes

COALESCED: Final = "coalesced"
"""The entry that ends a batch of calls; it has no sizes."""

_OPS: Final = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "ALLGATHER_coalesced": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
}
_DTYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_SENT: Final = re.compile(r"send (\d{1,9})->(\d{1,9})")
_RECEIVED: Final = re.compile(r"recv (\d{1,9})<-(\d{1,9})")
_BATCHED: Final = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"})
# Which rank hands over what is not recorded, so these sizes cannot be compared.
_UNCOMPARABLE: Final = frozenset({"all_to_all", "gather", "scatter", COALESCED})


def backend_and_op(profiling_name: str) -> tuple[str, str]:
    """Split ``nccl:_all_gather_base`` into ``nccl`` and ``all_gather_into_tensor``."""
    backend, colon, name = profiling_name.partition(":")
    if not colon:
        backend, name = "", profiling_name
    return backend, _OPS.get(name, name)


def peers_of(op: str) -> tuple[int, int] | None:
    """Return own place and peer's place in the group of ``send 0->1`` or ``recv 1<-0``."""
    match = _SENT.fullmatch(op) or _RECEIVED.fullmatch(op)
    return (int(match[1]), int(match[2])) if match else None


def dtype_name(name: str) -> str:
    """Return ``float32`` for ``Float``."""
    return _DTYPES.get(name, name.lower())


def signature_of(op: str, inputs: Sizes, outputs: Sizes, dtypes: tuple[str, ...]) -> Signature:
    """Build the signature of a recorded call; a peer is still its place in the group.

    The backends flatten a list of equal tensors into one with a dimension more: then the call is
    the same as the one on a single tensor, and so it is called.
    """
    places = peers_of(op)
    if places is not None:
        op = op.partition(" ")[0]
    elif op == "all_gather" and _is_stacked(outputs, inputs):
        op = "all_gather_into_tensor"
    elif op == "reduce_scatter" and _is_stacked(inputs, outputs):
        op = "reduce_scatter_tensor"
    known = tuple(dict.fromkeys(map(dtype_name, dtypes)))
    peer, tag = (places[1], 0) if places is not None else (None, None)
    return Signature(op, inputs, outputs, known, peer=peer, tag=tag)


def refined_op(op: str, api: str | None) -> str:
    """Return the operation that the public function `api` tells, where the recorder says less.

    Gloo does a reduce-scatter, and NCCL a barrier, by an all-reduce, and records that.
    """
    if op == "all_reduce" and api is not None:
        if api.startswith("reduce_scatter"):
            return "reduce_scatter_tensor"
        if api == "barrier":
            return api
    return op


def batch_op(ops: set[str]) -> str:
    """Return what a batch of collectives is called that were issued as one."""
    op = next(iter(ops)) if len(ops) == 1 else COALESCED
    return f"{op}_coalesced" if op in _BATCHED else op if op.endswith("_coalesced") else COALESCED


def is_symmetric(op: str) -> bool:
    """Say whether no rank can complete the call before every rank has come to it."""
    return op.startswith(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


def comparable(signature: Signature) -> Signature:
    """Return the part of a signature that is alike on all ranks of a correct call."""
    if signature.op in _UNCOMPARABLE:
        return Signature(signature.op)
    return signature


def _is_stacked(stacked: Sizes, one: Sizes) -> bool:
    return len(stacked) == len(one) == 1 and len(stacked[0]) == len(one[0]) + 1
