"""The moments of a run that one probe sees and others want to know of.

A probe gets the signals that it needs through its constructor, so that its inputs can be read
there. Values of torch have no type here: nothing in this folder may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import get_annotations
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
Unsubscribe: TypeAlias = Callable[[], None]


class Signal(Generic[P]):
    """Calls all who have subscribed, in the order in which they did.

    A subscriber raises nothing: what a probe subscribes is guarded. To subscribe the same function
    again changes nothing. Any thread may subscribe, and no lock is taken.
    """

    __slots__ = ("_is_muted", "_known", "subscribers")

    def __init__(self) -> None:
        self._known: dict[Callable[P, object], None] = {}
        self._is_muted = False
        self.subscribers: tuple[Callable[P, object], ...] = ()
        """Who is notified now. Where microseconds count these are called without `emit`."""

    def subscribe(self, callback: Callable[P, object]) -> Unsubscribe:
        """Call this function each time, until what is returned is called."""
        self._known[callback] = None
        self._show()

        def unsubscribe() -> None:
            self._known.pop(callback, None)
            self._show()

        return unsubscribe

    def _show(self) -> None:
        # A dict changes in one step of the interpreter. Who shows it last shows all of it.
        known: tuple[Callable[P, object], ...] | None = None
        while known != (known := () if self._is_muted else tuple(self._known)):
            self.subscribers = known

    def emit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell all subscribers."""
        for callback in self.subscribers:
            callback(*args, **kwargs)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Tell nobody while the block runs."""
        self._is_muted = True
        self._show()
        try:
            yield
        finally:
            self._is_muted = False
            self._show()


Module: TypeAlias = Any
"""A `torch.nn.Module`."""
Tensors: TypeAlias = Any
"""A tensor of torch, or a sequence of them."""
Group: TypeAlias = Any
"""A `torch.distributed.ProcessGroup`."""
Optimizer: TypeAlias = Any
"""A `torch.optim.Optimizer`, or what passes itself off as one."""
Node: TypeAlias = Any
"""A node of an autograd graph."""


M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Signals:
    """All signals of one rank."""

    def pick(self, kind: Callable[..., M]) -> M:
        """Make an object of those signals that its class has fields for."""
        return kind(**{name: getattr(self, name) for name in get_annotations(kind)})

    before_sync: Signal[[bool]] = field(default_factory=Signal)
    """An event is about to be written that orders what this rank did for others, or they for it:
    what its host did, or (False) what runs on the device after all that this has waited for."""

    file_access: Signal[[]] = field(default_factory=Signal)
    """An access to a file is about to be written down."""

    # Models

    model_parallelizing: Signal[Module] = field(default_factory=Signal)
    """Tensor parallelism is about to change this model."""
    model_wrapped: Signal[Sequence[Module]] = field(default_factory=Signal)
    """FSDP2 or tensor parallelism has changed these modules."""
    before_first_forward: Signal[[]] = field(default_factory=Signal)
    """A wrapped model is about to be used for the first time."""
    model_started: Signal[Module] = field(default_factory=Signal)
    """A model begins: it is complete."""
    forward_started: Signal[object, Module, object] = field(default_factory=Signal)
    """A wrapped model is given its inputs; the first argument tells this forward pass from those of
    models within it."""
    forward_ended: Signal[object, object] = field(default_factory=Signal)
    """That forward pass is over, with this output."""
    evaluated: Signal[Module] = field(default_factory=Signal)
    """A forward pass of this model is over, which was not in its training mode."""
    inputs_seen: Signal[object] = field(default_factory=Signal)
    """A loader has made a batch, or this was given to a model in training that is wrapped, or whose
    attention works on sequences that ranks share."""
    sequence_cut: Signal[object, Sequence[Any]] = field(default_factory=Signal)
    """Torch's context parallelism is about to cut these buffers over a mesh."""

    # Steps

    before_backward: Signal[[]] = field(default_factory=Signal)
    """A backward pass of the training comes next; it is not counted yet."""
    backward_started: Signal[object] = field(default_factory=Signal)
    """A backward pass is about to run from these outputs; `Recorder.backward` says whence."""
    backward_ended: Signal[bool] = field(default_factory=Signal)
    """It is over; whether it came to its end without an exception."""
    optimizer_stepping: Signal[Optimizer, FrameType] = field(default_factory=Signal)
    """An optimizer is about to change its parameters: all gradients are there."""
    optimizer_stepped: Signal[Optimizer] = field(default_factory=Signal)
    """It has changed them."""
    step_ended: Signal[[]] = field(default_factory=Signal)
    """A step is over, and counted."""

    # Collectives

    collective_recorded: Signal[int, str] = field(default_factory=Signal)
    """A collective was written down, with its event number and operation."""
    work_waited: Signal[[]] = field(default_factory=Signal)
    """The program has waited for a Work: its stream has to, the host may have gone on."""
    exchange_starting: Signal[str, Sequence[Any], Group, int, FrameType] = field(
        default_factory=Signal
    )
    """A collective or message comes next that may bring an activation to other ranks: its name,
    what is given to it, the process group, the rank in it that gets a message (else -1), and the
    frame of the call."""
    exchange_known: Signal[[]] = field(default_factory=Signal)
    """The program issues an all-to-all, or gathers parts of activations, of a kind that is new."""
    tensors_shared: Signal[Tensors, Group, str] = field(default_factory=Signal)
    """The program all-reduces or broadcasts these tensors next; by which operator, if it does."""

    # Auxiliary losses of experts

    aux_loss_injected: Signal[Node] = field(default_factory=Signal)
    """A function of the program was given an auxiliary loss beside a tensor that it passes on."""
    aux_loss_doubted: Signal[bool] = field(default_factory=Signal)
    """Whether it has become doubtful that all auxiliary losses are used."""
    aux_loss_used: Signal[Sequence[str]] = field(default_factory=Signal)
    """A loss holds terms that are made of the scores of these layers; its pass comes next."""

    # Checkpoints

    state_saving: Signal[object, FrameType] = field(default_factory=Signal)
    """`torch.save` is given this."""
    state_read: Signal[object, FrameType] = field(default_factory=Signal)
    """A distributed checkpoint was read into this state dict."""
    load_planned: Signal[object, object] = field(default_factory=Signal)
    """This state dict is asked of a distributed checkpoint with this metadata."""
