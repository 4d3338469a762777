"""The methods of a process group as data: where in their arguments things stand.

Their overloads differ in the last arguments only: options, or an operator, a root and a timeout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index, itemgetter
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.untyped import Untyped

# The collectives of torch's dispatcher as data: where in their arguments things stand.

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


def _one(place: int) -> Callable[[tuple[Any, ...]], Any]:
    return itemgetter(slice(place, place + 1))


def _nested(place: int) -> Callable[[tuple[Any, ...]], Any]:
    return lambda args: [tensor for tensors in args[place] for tensor in tensors]


_FLATTEN: Final[dict[str, Callable[[int], Callable[[tuple[Any, ...]], Any]]]] = {
    "Tensor": _one,
    "List[Tensor]": itemgetter,
    "List[List[Tensor]]": _nested,
}
"""What takes the tensors of an argument from all of them; mostly in C, for it does so each time."""


class Argument(NamedTuple):
    """Where an argument stands; callers leave trailing arguments out that have their default."""

    place: int
    default: Any

    def of(self, args: tuple[Any, ...]) -> Untyped:
        """Return its value in a call."""
        return args[self.place] if self.place < len(args) else self.default


class Layout:
    """How to read the arguments of one operator, as the installed torch declares it."""

    def __init__(self, name: str, schema: Untyped) -> None:
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

    def _tensors(self, name: str) -> Callable[[tuple[Any, ...]], Any] | None:
        if not name:
            return None
        index, argument = self._arguments[name]
        return _FLATTEN[str(argument.type)](index)

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


# The table of methods of a process group.

Tensors = Any
"""A tensor, a list of tensors, or a list of lists: as the caller gave them."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method of `ProcessGroup`.

    `names` are its arguments up to the last that has the same place in all overloads, with their
    other spellings after ``|``. `input` and `output` are places among them (-1: none). `is_async`
    tells what a call without options does.
    """

    public: str
    names: tuple[str, ...]
    input: int = -1
    output: int = -1
    reduces: bool = False
    has_root: bool = False
    has_splits: bool = False
    is_message: bool = False
    is_async: bool = True
    has_details: bool = field(init=False)

    def __post_init__(self) -> None:
        """Sum up what makes a call have `Details`."""
        has_details = self.has_root or self.has_splits or self.is_message
        object.__setattr__(self, "has_details", has_details)


_IN: Final = ("tensors|tensor",)
_OUT_IN: Final = (
    "output|output_tensors|output_tensor|output_lists|outputs|outputTensor|outputTensors",
    "input|input_tensors|input_tensor|input_list|inputs|inputTensor|inputTensors",
)
_SPLITS: Final = (*_OUT_IN, "output_split_sizes", "input_split_sizes")


def _gathering(public: str, *, has_root: bool = False) -> Method:
    return Method(public, _OUT_IN, input=1, output=0, has_root=has_root)


def _scattering(public: str) -> Method:
    return Method(public, _OUT_IN, input=1, output=0, reduces=True)


_EXCHANGING: Final = Method("all_to_all_single", _SPLITS, input=1, output=0, has_splits=True)

METHODS: Final = {
    "allreduce": Method("all_reduce", _IN, input=0, reduces=True),
    "allreduce_coalesced": Method("all_reduce_coalesced", _IN, input=0, reduces=True),
    "broadcast": Method("broadcast", _IN, input=0, has_root=True),
    "reduce": Method("reduce", _IN, input=0, reduces=True, has_root=True),
    "allgather": _gathering("all_gather"),
    "_allgather_base": _gathering("all_gather_into_tensor"),
    "all_gather_single": _gathering("all_gather_into_tensor"),
    "allgather_coalesced": _gathering("all_gather_coalesced"),
    "allgather_into_tensor_coalesced": _gathering("all_gather_into_tensor_coalesced"),
    "all_gather_single_coalesced": _gathering("all_gather_into_tensor_coalesced"),
    "gather": _gathering("gather", has_root=True),
    "gather_single": _gathering("gather_into_tensor", has_root=True),
    "scatter": _gathering("scatter", has_root=True),
    "reduce_scatter": _scattering("reduce_scatter"),
    "_reduce_scatter_base": _scattering("reduce_scatter_tensor"),
    "reduce_scatter_single": _scattering("reduce_scatter_tensor"),
    "reduce_scatter_tensor_coalesced": _scattering("reduce_scatter_tensor_coalesced"),
    "reduce_scatter_single_coalesced": _scattering("reduce_scatter_tensor_coalesced"),
    "alltoall": _gathering("all_to_all"),
    "alltoall_base": _EXCHANGING,
    "all_to_all_single": _EXCHANGING,
    "barrier": Method("barrier", ()),
    "monitored_barrier": Method("monitored_barrier", (), is_async=False),
    "send": Method("send", ("tensors", "dstRank", "tag"), input=0, is_message=True),
    "recv": Method("recv", ("tensors", "srcRank", "tag"), output=0, is_message=True),
    "recv_anysource": Method(
        "recv_any_source", ("tensors|arg0", "tag|arg1"), output=0, is_message=True
    ),
}
"""By name of the method. A torch that lacks one has another name for it, or does without."""

_OPTION_KINDS: Final = frozenset(
    kind for name, kind in vars(torch._C._distributed_c10d).items() if name.endswith("Options")
)
_REDUCE_KINDS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def flatten(given: Tensors) -> Sequence[torch.Tensor]:
    """Return the tensors in the order in which they were given."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if given and not isinstance(given[0], torch.Tensor):
        return [tensor for tensors in given for tensor in tensors]
    return given  # type: ignore[no-any-return]


def bind(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call by position, those of the options last."""
    values = list(args)
    left = dict(kwargs)
    for names in method.names[len(args) :]:
        values.append(next((left.pop(name) for name in names.split("|") if name in left), None))
    return (*values, *left.values())


def whole_numbers(given: Iterable[Any] | None) -> tuple[int, ...]:
    """Return plain numbers of split sizes, which may be those of NumPy or of tensors as well."""
    if given is None:
        return ()
    if type(given) is list and all(type(each) is int for each in given):
        return tuple(given)
    with out_of_sight():
        return tuple(map(index, given))


def options_of(args: tuple[Any, ...]) -> Untyped:
    """Return the options object of a call, or None if it has none."""
    return args[-1] if args and type(args[-1]) in _OPTION_KINDS else None


def reduce_op_of(method: Method, args: tuple[Any, ...], options: Untyped) -> str:
    """Return the name of the operator of a call that reduces."""
    if options is not None:
        reduce_op = options.reduceOp
    else:
        extra = args[len(method.names) :]
        reduce_op = next((each for each in extra if isinstance(each, _REDUCE_KINDS)), None)
    # The hash of an operator is its number: the cheapest way to tell it.
    return "SUM" if reduce_op is None else _OPERATORS.get(hash(reduce_op)) or _name(reduce_op)


def details_of(
    method: Method,
    args: tuple[Any, ...],
    options: Untyped,
    ranks: tuple[int, ...],
) -> Details | None:
    """Return what only some methods have; `ranks` are those of the group."""
    if method.has_root:
        root = options.rootRank if options is not None else _root(method, args)
        return (ranks[root], None, None, (), ())
    if method.has_splits:
        return (None, None, None, whole_numbers(args[3]), whole_numbers(args[2]))
    if method.is_message:
        peer = ranks[args[1]] if len(method.names) == _PEER_AND_TAG else None
        (tag,) = whole_numbers([args[len(method.names) - 1]])
        return (None, peer, tag, (), ())
    return None


_PEER_AND_TAG: Final = 3


def _root(method: Method, args: tuple[Any, ...]) -> int:
    extra = args[len(method.names) :]
    return next((each for each in extra if isinstance(each, int)), 0)


def _operator_numbers() -> dict[int, str]:
    """Return the names of the operators by their hashes, if these tell them apart."""
    kinds = dict(dist.ReduceOp.RedOpType.__members__)
    kinds.pop("PREMUL_SUM", None)  # it cannot be made without a factor
    names = {hash(dist.ReduceOp(kind)): name for name, kind in kinds.items()}
    return names if len(names) == len(kinds) and set(names) <= set(range(16)) else {}


_OPERATORS: Final = _operator_numbers()


def _name(reduce_op: Untyped) -> str:
    kind: Untyped = getattr(reduce_op, "op", reduce_op)
    return str(kind.name)
