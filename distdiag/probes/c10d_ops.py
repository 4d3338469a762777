"""The collectives of torch's dispatcher as data: where in their arguments things stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

Details = tuple[int | None, int | None, int | None, tuple[int, ...], tuple[int, ...]]
"""Root and peer as global ranks, tag, input splits, output splits."""

NO_DETAILS: Final[Details] = (None, None, None, (), ())


class C10dOp(NamedTuple):
    """One operator of the namespace ``c10d``; all but `public` are names of its arguments.

    `outputs` is empty where the inputs are written in place.
    """

    public: str
    inputs: str = ""
    outputs: str = ""
    root: str = ""
    peer: str = ""
    is_message: bool = False


OPS: Final = {
    "allreduce_": C10dOp("all_reduce", "tensors"),
    "allreduce_coalesced_": C10dOp("all_reduce_coalesced", "tensors"),
    "broadcast_": C10dOp("broadcast", "tensors", root="root_rank"),
    "reduce_": C10dOp("reduce", "tensors", root="root_rank"),
    "allgather_": C10dOp("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": C10dOp("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "allgather_coalesced_": C10dOp("all_gather_coalesced", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": C10dOp(
        "all_gather_into_tensor_coalesced", "inputs", "outputs"
    ),
    "reduce_scatter_": C10dOp("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": C10dOp("reduce_scatter_tensor", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": C10dOp(
        "reduce_scatter_tensor_coalesced", "inputs", "outputs"
    ),
    "gather_": C10dOp("gather", "input_tensors", "output_tensors", root="root_rank"),
    "gather_into_tensor_": C10dOp(
        "gather_into_tensor", "input_tensor", "output_tensor", root="root_rank"
    ),
    "scatter_": C10dOp("scatter", "input_tensors", "output_tensors", root="root_rank"),
    "alltoall_": C10dOp("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": C10dOp("all_to_all_single", "input", "output"),
    "barrier": C10dOp("barrier"),
    "monitored_barrier_": C10dOp("monitored_barrier"),
    "send": C10dOp("send", "tensors", peer="dst", is_message=True),
    "recv_": C10dOp("recv", "", "tensors", peer="src", is_message=True),
    "recv_any_source_": C10dOp("recv_any_source", "", "tensors", is_message=True),
}
"""By name of the operator. ``check_for_nan`` is not here: it looks at one rank's own tensor."""

ASYNC_MESSAGES: Final = frozenset({"isend", "irecv", "batch_isend_irecv"})


def _one(tensor: Any) -> list[Any]:  # noqa: ANN401
    return [tensor]


def _many(tensors: Any) -> Any:  # noqa: ANN401
    return tensors


def _nested(lists: Any) -> list[Any]:  # noqa: ANN401
    return [tensor for tensors in lists for tensor in tensors]


_FLATTEN: Final[dict[str, Callable[[Any], Any]]] = {
    "Tensor": _one,
    "List[Tensor]": _many,
    "List[List[Tensor]]": _nested,
}


class Argument(NamedTuple):
    """Where an argument stands; callers leave trailing arguments out that have their default."""

    place: int
    default: Any

    def of(self, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Return its value in a call."""
        return args[self.place] if self.place < len(args) else self.default


class Layout:
    """How to read the arguments of one operator, as the installed torch declares it."""

    def __init__(self, name: str, schema: Any) -> None:  # noqa: ANN401
        """Find the arguments.

        Raises:
            KeyError: the operator is not one of `OPS` or has lost an argument.

        """
        spec = OPS[name]
        self.spec = spec
        arguments = {argument.name: (i, argument) for i, argument in enumerate(schema.arguments)}
        self._arguments = arguments
        self.process_group = arguments["process_group"][0]
        self.inputs = self._tensors(spec.inputs)
        self.outputs = self._tensors(spec.outputs)
        self.root = self._argument(spec.root)
        self.peer = self._argument(spec.peer)
        self.tag = self._argument("tag")
        self.is_async = self._argument("async_op")
        self.input_splits = self._argument("input_split_sizes")
        self.output_splits = self._argument("output_split_sizes")
        special = (self.root, self.peer, self.tag, self.input_splits, self.output_splits)
        self.has_details = any(argument is not None for argument in special)

    def _argument(self, name: str) -> Argument | None:
        if name not in self._arguments:
            return None
        index, argument = self._arguments[name]
        return Argument(index, argument.default_value)

    def _tensors(self, name: str) -> Callable[[tuple[Any, ...]], Any]:
        if not name:
            return lambda args: ()
        index, argument = self._arguments[name]
        flatten = _FLATTEN[str(argument.type)]
        return lambda args: flatten(args[index])

    def details(self, args: tuple[Any, ...], ranks: tuple[int, ...]) -> Details:
        """Return what only some operators have; `ranks` are those of the group."""
        return (
            None if self.root is None else ranks[self.root.of(args)],
            None if self.peer is None else ranks[self.peer.of(args)],
            None if self.tag is None else self.tag.of(args),
            () if self.input_splits is None else tuple(self.input_splits.of(args)),
            () if self.output_splits is None else tuple(self.output_splits.of(args)),
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call by position."""
        if not kwargs:
            return args
        values = list(args)
        for name, (_, argument) in list(self._arguments.items())[len(args) :]:
            values.append(kwargs.get(name, argument.default_value))
        return tuple(values)
