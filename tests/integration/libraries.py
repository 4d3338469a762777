"""Which runs there are of the programs that train with real libraries of experts and sequences.

Tests of runs that need more than the extra `test` installs are skipped where it is missing. To have
them run, put it beside: `pip install --no-deps --target DIR megatron-core`, then `PYTHONPATH=DIR`.
"""

from typing import NamedTuple

__all__ = ["LIBRARY_RUNS", "LibraryRun"]


class LibraryRun(NamedTuple):
    """A program, its arguments as one types them, and what it needs."""

    name: str
    args: str
    nproc: int = 2
    needs: tuple[str, ...] = ()


_CONTEXT = (
    LibraryRun("context_parallel", "--rotate allgather --wrapper fsdp2"),
    LibraryRun("context_parallel", "--rotate alltoall --wrapper ddp --recompute"),
    LibraryRun("context_parallel", "--rotate alltoall --wrapper fsdp2", nproc=4),
    LibraryRun("split_models", "--way dropout", nproc=4),
    LibraryRun("split_models", "--way sequence", nproc=4),
)
_DEEPSPEED = (
    ("deepspeed_experts", "--ep 1 --zero 0"),
    ("deepspeed_experts", "--ep 1 --zero 2 --accumulate 2 --residual"),
    ("deepspeed_experts", "--ep 2 --zero 0 --drop keep"),
    ("deepspeed_experts", "--ep 2 --zero 1"),
    ("deepspeed_experts", "--ep 2 --zero 2 --k 1"),
    ("deepspeed_ulysses", "--way layer --wrapper fsdp2"),
    ("deepspeed_ulysses", "--way transformers --wrapper fsdp2"),
    ("deepspeed_ulysses", "--way verified --wrapper ddp"),
)
_EXPERTS = (
    ("expert_layers", "--way biased --wrapper ddp --recompute exact"),
    ("expert_layers", "--way biased --wrapper fsdp2 --recompute reentrant"),
    ("expert_layers", "--way choosing --wrapper ddp --recompute exact"),
    ("expert_layers", "--way dropless --wrapper fsdp2 --recompute reentrant"),
    ("expert_layers", "--way noisy --wrapper ddp --recompute exact"),
    ("expert_layers", "--way signed --wrapper fsdp2 --recompute exact"),
    ("expert_layers", "--way switch --wrapper ddp --recompute exact"),
    ("expert_parallel", "--way idle --wrapper ddp"),
    ("expert_parallel", "--way plain --wrapper hand"),
    ("expert_parallel", "--way recomputed --wrapper fsdp2"),
    ("sparse_trainer", "--model mixtral --recompute exact"),
    ("sparse_trainer", "--model qwen3 --recompute reentrant"),
)
_MEGATRON = (
    LibraryRun("megatron_layers", ""),
    LibraryRun("megatron_models", "--pp 2"),
    LibraryRun("megatron_models", "--pp 1 --tp 2"),
    LibraryRun("megatron_models", "--tp 2 --experts --untied --dispatcher allgather --capacity 1"),
    LibraryRun("megatron_models", "--ep 2 --experts --recompute --balance aux_loss"),
    LibraryRun("megatron_models", "--ep 2 --experts --recompute --bias --balance none"),
    LibraryRun("megatron_models", "--tp 2 --ep 2 --experts --bias --dropout 0.1", nproc=4),
)
_TRANSFORMERS = (
    "--model deepseek --wrapper ddp --recompute reentrant --extras accumulate",
    "--model deepseek --wrapper fsdp2 --recompute exact --extras bf16 eval",
    "--model gpt-oss --wrapper ddp --recompute selective --extras autocast",
    "--model mixtral --wrapper ddp --recompute reentrant --extras aux autocast",
    "--model mixtral --wrapper fsdp2 --recompute exact --extras bf16 accumulate",
    "--model olmoe --wrapper ddp --recompute selective --extras autocast",
    "--model olmoe --wrapper fsdp2 --recompute reentrant --extras aux accumulate",
    "--model qwen3 --wrapper ddp --recompute exact --extras autocast accumulate eval",
    "--model qwen3 --wrapper fsdp2 --recompute selective --extras aux eval",
)
_TITAN = ("torchtitan", "spmd_types", "triton")

_SPLITTING = ("deepspeed", "veomni", "yunchang")

LIBRARY_RUNS = (
    *_CONTEXT,
    *(LibraryRun(name, args, needs=("deepspeed",)) for name, args in _DEEPSPEED),
    *(LibraryRun(name, args) for name, args in _EXPERTS),
    *(run._replace(needs=("megatron",)) for run in _MEGATRON),
    LibraryRun(
        "sparse_transformers",
        "--model gpt-oss --wrapper fsdp2 --recompute exact --extras aux bf16",
    ),
    *(LibraryRun("sparse_transformers", args) for args in _TRANSFORMERS),
    *(LibraryRun("split_by_libraries", f"--way {name}", needs=(name,)) for name in _SPLITTING),
    *(LibraryRun("titan_experts", args, needs=_TITAN) for args in ("", "--score softmax")),
)
