"""What libraries split sequences with, and how their functions are called: a table.

Functions are named as ``package.module:path``. Groups are found without asking the library to make
any: one that was never set up is none.
"""

from typing import Final

from distdiag.probes.sequence.library_functions import (
    Attribute,
    Call,
    Entry,
    Exchanging,
    GroupOf,
    Slot,
    Splitting,
    Variable,
)

_VEOMNI: Final = "veomni.distributed.sequence_parallel"
_ULYSSES: Final = "yunchang.globals:PROCESS_GROUP.ULYSSES_PG"
_RING: Final = "yunchang.globals:PROCESS_GROUP.RING_PG"
_TORCH: Final = "torch.distributed.tensor.experimental._context_parallel"
_MAPPINGS: Final = "megatron.core.tensor_parallel.mappings"


def _indexed(function: str, layer: str, group: str, *more: object) -> Exchanging:
    """Return an exchange of which the layer has the indices."""
    there, back = Attribute("scatter_idx"), Attribute("gather_idx")
    return Exchanging(
        Call(function, (Slot.GROUP, Slot.TENSOR, there, back, *more)),
        Call(function, (Slot.GROUP, Slot.TENSOR, back, there, *more)),
        GroupOf(attribute=group),
        dim=1,
        head_dim=2,
        layer=layer,
        scattered=there.name,
    )


def _size_of(reference: str) -> Call:
    return Call("torch.distributed:get_world_size", (Variable(reference),))


def _extracting(name: str) -> Splitting:
    """Return a function of yunchang that takes a part; nothing in it joins parts."""
    given = (Slot.TENSOR, Slot.RANK, Slot.SIZE)
    return Splitting(
        Call(
            f"yunchang.comm.extract_local:{name}",
            given,
            (("rd", _size_of(_RING)), ("ud", _size_of(_ULYSSES))),
        ),
        None,
        GroupOf((_ULYSSES, _RING)),
        dim=1,
        has_backward=False,
    )


_BALANCER: Final = Call(
    f"{_TORCH}._load_balancer:_create_default_load_balancer",
    (Slot.LENGTH, Slot.SIZE, Slot.DEVICE),
)

LIBRARIES: Final[tuple[Entry, ...]] = (
    _indexed(
        "deepspeed.sequence.layer:_SeqAllToAll.apply",
        "deepspeed.sequence.layer:DistributedAttention",
        "spg",
        0,
    ),
    Splitting(
        Call(f"{_MAPPINGS}:scatter_to_sequence_parallel_region", (Slot.TENSOR, Slot.GROUP)),
        Call(
            f"{_MAPPINGS}:gather_from_sequence_parallel_region",
            (Slot.TENSOR, False, Slot.GROUP),
        ),
        GroupOf(("megatron.core.parallel_state:_TENSOR_MODEL_PARALLEL_GROUP",)),
        dim=0,
        reduction="none",
    ),
    Splitting(
        Call(
            f"{_TORCH}._attention:_context_parallel_buffers",
            (Slot.GROUP, Slot.TENSORS, [1], _BALANCER),
        ),
        Call(
            f"{_TORCH}._attention:context_parallel_unshard",
            (Slot.GROUP, Slot.TENSORS, [1]),
        ),
        GroupOf(is_mesh=True),
        dim=1,
        has_backward=False,
    ),
    Splitting(
        Call(f"{_VEOMNI}.data:slice_input_tensor", (Slot.TENSOR, 1), (("group", Slot.GROUP),)),
        Call(f"{_VEOMNI}.data:gather_outputs", (Slot.TENSOR, 1), (("group", Slot.GROUP),)),
        GroupOf((f"{_VEOMNI}.comm:get_unified_sequence_parallel_group",)),
        dim=1,
        reduction="mean",
    ),
    Exchanging(
        Call(
            f"{_VEOMNI}.ulysses:gather_seq_scatter_heads",
            (Slot.TENSOR, 1, 2),
            (("group", Slot.GROUP),),
        ),
        Call(
            f"{_VEOMNI}.ulysses:gather_heads_scatter_seq",
            (Slot.TENSOR, 2, 1),
            (("group", Slot.GROUP),),
        ),
        GroupOf((f"{_VEOMNI}.comm:get_ulysses_sequence_parallel_group",)),
        dim=1,
        head_dim=2,
    ),
    _extracting("basic_extract_local"),
    _extracting("stripe_extract_local"),
    _extracting("zigzag_extract_local"),
    *(
        _indexed("yunchang.comm.all_to_all:SeqAllToAll4D.apply", layer, group)
        for layer, group in (
            ("yunchang.hybrid.attn_layer:LongContextAttention", "ulysses_pg"),
            ("yunchang.ulysses.attn_layer:UlyssesAttention", "spg"),
        )
    ),
)
"""In the order in which all ranks come to them."""
