"""The statement that makes one recorded collective again, on tensors of zeros."""

from __future__ import annotations

from distdiag.errors import UsageError
from distdiag.event import Signature

_SUMMED: frozenset[str | None] = frozenset({None, "AVG", "PREMUL_SUM"})
"""Operators that gloo lacks, or that were not seen."""


def statement(signature: Signature, *, is_root: bool) -> str:
    """Return a line of Python; ``dist``, ``torch`` and ``group`` are names in its scope.

    Raises:
        UsageError: there is no public function for the call.

    """
    ins = [_tensor(size, signature) for size in signature.input_sizes]
    outs = [_tensor(size, signature) for size in signature.output_sizes]
    arguments = _arguments(signature, ins, outs, is_root=is_root)
    if arguments is None:
        raise UsageError(f"a call of {signature.op} cannot be replayed")
    return f"dist.{signature.op}({', '.join([*arguments, 'group=group'])})"


def _arguments(  # noqa: C901 (one case for each function of torch.distributed)
    signature: Signature, ins: list[str], outs: list[str], *, is_root: bool
) -> list[str] | None:
    reducing = f"op=dist.ReduceOp.{_operator(signature.reduce_op)}"
    one_in, one_out = (ins or outs)[:1], (outs or ins)[:1]
    match signature.op:
        case "all_reduce":
            return [*one_in, reducing]
        case "broadcast":
            return [*one_in, f"src={signature.root}"]
        case "reduce":
            return [*one_in, f"dst={signature.root}", reducing]
        case "all_gather":
            return [_list(outs), *one_in]
        case "all_gather_into_tensor":
            return [*one_out, *one_in]
        case "reduce_scatter_tensor":
            return [*one_out, *one_in, reducing]
        case "reduce_scatter":
            return [*one_out, _list(ins), reducing]
        case "gather":
            given = _list(outs) if is_root else "None"
            return [*one_in, given, f"dst={signature.root}"]
        case "scatter":
            given = _list(ins) if is_root else "None"
            return [*one_out, given, f"src={signature.root}"]
        case "all_to_all":
            return [_list(outs), _list(ins)]
        case "all_to_all_single":
            splits = [_splits(signature.output_splits), _splits(signature.input_splits)]
            return [*one_out, *one_in, *splits]
        case "barrier" | "monitored_barrier":
            return []
    return None


def _operator(name: str | None) -> str:
    return "SUM" if name in _SUMMED else str(name)


def _splits(splits: tuple[int, ...]) -> str:
    return str(list(splits)) if splits else "None"


def _tensor(size: tuple[int, ...], signature: Signature) -> str:
    dtype = signature.dtypes[0] if signature.dtypes else "float32"
    return f"torch.zeros({size}, dtype=torch.{dtype.removeprefix('torch.')})"


def _list(tensors: list[str]) -> str:
    if len(set(tensors)) == 1 and len(tensors) > 2:
        return f"[{tensors[0]} for _ in range({len(tensors)})]"
    return f"[{', '.join(tensors)}]"
