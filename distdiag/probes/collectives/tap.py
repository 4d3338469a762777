"""What all taps of collectives share: process groups, signatures, and the record of a call."""

import weakref
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch.distributed import distributed_c10d

from distdiag.events.base import CallSite
from distdiag.events.collectives import ProcessGroup, Signature, blocks_host
from distdiag.events.errors import CollectiveMismatchError
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import find_site
from distdiag.probes.collectives.functional import FunctionalTap
from distdiag.probes.collectives.operators import (
    ASYNC_MESSAGES,
    NO_DETAILS,
    Method,
    details_of,
    flatten,
    options_of,
    reduce_op_of,
)
from distdiag.probes.collectives.strict import StrictGate
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder, Site
from distdiag.record.signals import Signal
from distdiag.record.thread_context import ThreadContext

Recorded = tuple[int, bool, bool]
"""A call from Python: its event number, whether the user's own code made it, and whether the caller
will wait for it by himself."""

SignatureKey = tuple[Any, ...]
"""Op, input shapes, output shapes, dtypes, `Details` or None, reduce op: cheap to make."""


# In C: they are called for each tensor of each call.
shape_of: Final = attrgetter("shape")
dtype_of: Final = attrgetter("dtype")


class TapError(Exception):
    """A way of observing collectives does not work here."""


class Group:
    """A process group that has been seen.

    Found by the id of its handle, which is held weakly: keeping a group alive would change when
    the user's `destroy_process_group` takes effect.
    """

    __slots__ = ("handle", "hosts", "next_seq_id", "value")

    def __init__(
        self, value: ProcessGroup, handle: weakref.ref[Any], counter: Iterator[int]
    ) -> None:
        self.value = value
        self.handle = handle
        self.next_seq_id = counter.__next__
        self.hosts: dict[str, bool] = {}
        """By operation, whether the host waits for it."""


_FEWEST_GROUPS: Final = 64
"""With fewer it is not worth looking which of them are destroyed."""
_MOST_SIGNATURES: Final = 1 << 14
"""More than the event file defines at a time, in half of a segment of 1 MiB."""


class Tap(Probe):
    """Records each collective before it is issued. Its subclasses differ in where they see it."""

    name: ClassVar[str] = "collectives"

    def __init__(
        self,
        recorder: Recorder,
        functional: FunctionalTap,
        recorded: Signal[int, str],
        exchange_known: Signal[[]],
        gate: StrictGate | None = None,
    ) -> None:
        """Tell `functional` where results will lie; `gate` may refuse a call (``--strict``)."""
        super().__init__(recorder)
        self._recorded = recorded
        self._exchange_known = exchange_known
        self._functional = functional
        self._gate = gate
        self._groups: dict[int, Group] = {}
        self._enough = 2 * _FEWEST_GROUPS
        self._counters: dict[tuple[str, int], Iterator[int]] = {}
        self._signatures: dict[int, Signature] = {}

    def can_observe(self) -> bool:
        """Try this way on a group that no counter of torch knows about."""
        raise NotImplementedError

    def engage(self) -> None:
        """Be ready for calls that come from C++: those from Python pass the Python wrappers."""

    def record(
        self,
        context: ThreadContext,
        method: Method,
        handle: object,
        args: tuple[Any, ...],
        frame: FrameType,
    ) -> Recorded | None:
        """Write down a call that Python makes of a method of this group, from this frame.

        Returns None for a call that is not observed.
        """
        inputs = flatten(args[method.input]) if method.input >= 0 else ()
        outputs = flatten(args[method.output]) if method.output >= 0 else ()
        shown = inputs or outputs
        group = self._groups.get(id(handle))
        if group is None or group.handle() is not handle:
            group = self._learn(handle)
        if group is None:
            return None
        first = shown[0] if shown else None
        # What a compiler or a simulation made only has a shape: nothing will be sent.
        if first is not None and (first.is_meta or (type(first) not in _PLAIN and _is_fake(first))):
            return None
        options = options_of(args)
        key = (
            method.public,
            tuple(map(shape_of, inputs)),
            tuple(map(shape_of, outputs)),
            tuple(map(dtype_of, shown)),
            details_of(method, args, options, group.value.ranks) if method.has_details else None,
            reduce_op_of(method, args, options) if method.reduces else None,
        )
        site = find_site(self.recorder, context, frame)
        if method.is_message:
            is_async = site.api in ASYNC_MESSAGES
        else:
            is_async = method.is_async if options is None else bool(options.asyncOp)
        call = self._write(
            context,
            group,
            key,
            site,
            is_message=method.is_message,
            is_async=is_async,
            results=outputs or shown,
        )
        return call, site.is_own_call, is_async

    def mark(self, call: int, mark: int) -> None:
        """Write down that a call went on, before anything else happens on its thread."""
        if not self.off:
            with self.guard:
                self.recorder.mark(call, mark)

    def failed(self, call: int) -> None:
        """Write down that a call raised."""
        if not self.off:
            with self.guard:
                self.recorder.state(call, "failed")

    def _group(self, handle: object) -> Group | None:
        group = self._groups.get(id(handle))
        if group is None or group.handle() is not handle:
            return self._learn(handle)
        return group

    def _learn(self, handle: object) -> Group | None:
        world = distributed_c10d._world
        if handle not in world.pg_map or handle not in world.pg_group_ranks:
            return None  # made by hand: nobody can say who its members are
        by_rank = world.pg_group_ranks[handle]
        value = ProcessGroup(
            name=handle.group_name,
            desc=handle.group_desc,
            ranks=tuple(sorted(by_rank, key=by_rank.__getitem__)),
            backend=str(world.pg_map[handle][0]),
            generation=self.recorder.generation,
        )
        # setdefault: another thread may have been as fast, and there must be one counter.
        counter = self._counters.setdefault((value.name, value.generation), count(1))
        self._forget_destroyed()
        group = self._groups[id(handle)] = Group(value, weakref.ref(handle), counter)
        return group

    def _forget_destroyed(self) -> None:
        if len(self._groups) < self._enough:
            return
        for number, known in tuple(self._groups.items()):
            if known.handle() is None:
                self._groups.pop(number, None)
        self._enough = 2 * max(_FEWEST_GROUPS, len(self._groups))

    def _write(  # noqa: PLR0913 (a struct would cost a microsecond for each call)
        self,
        context: ThreadContext,
        group: Group,
        key: SignatureKey,
        site: Site,
        *,
        is_message: bool,
        is_async: bool,
        results: object,
    ) -> int:
        """Write the call down, let the strict mode look at it, and return its event number."""
        recorder, tables = self.recorder, self.recorder.tables
        signature = tables.signatures.get(key)
        if signature is None:
            signature = self._define(key)
        group_number = tables.groups.get(group)
        if group_number is None:
            group_number = recorder.define_group(group, group.value)
        seq_id = -1 if is_message else group.next_seq_id()
        by_host = group.hosts.get(key[0])
        if by_host is None:
            by_host = group.hosts[key[0]] = blocks_host(group.value, key[0])
        call = recorder.call(
            group_number,
            seq_id,
            signature,
            site.number,
            is_async,
            context.name,
            site.api,
            by_host=by_host,
        )
        for tell in self._recorded.subscribers:
            tell(call, key[0])
        if context.is_functional:
            self._functional.remember(results, call)
        if self._gate is not None and seq_id >= 0:
            self._pass_gate(call, group.value, seq_id, signature, site)
        return call

    def _pass_gate(
        self, call: int, group: ProcessGroup, seq_id: int, signature: int, site: Site
    ) -> None:
        assert self._gate is not None
        place = CallSite(site.frames, self.recorder.here.context.module)
        try:
            self._gate.compare(group, seq_id, self._signatures[signature], place)
        except CollectiveMismatchError:
            self.failed(call)
            raise

    def _define(self, key: tuple[Any, ...]) -> int:
        op, inputs, outputs, dtypes, details, reduce_op = key
        if op.startswith("all_to_all") or (op.startswith(_GATHERS) and _are_parts(inputs, dtypes)):
            self._exchange_known.emit()
        root, peer, tag, input_splits, output_splits = details or NO_DETAILS
        signature = Signature(
            op=op,
            input_sizes=tuple(tuple(map(int, shape)) for shape in inputs),
            output_sizes=tuple(tuple(map(int, shape)) for shape in outputs),
            dtypes=tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            reduce_op=reduce_op,
            root=root,
            peer=peer,
            tag=tag,
            input_splits=input_splits,
            output_splits=output_splits,
        )
        number = self.recorder.define_signature(key, signature)
        if self._gate is not None:
            self._signatures[number] = signature
            if len(self._signatures) > _MOST_SIGNATURES:
                del self._signatures[next(iter(self._signatures))]
        return number


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GATHERS = ("all_gather", "reduce_scatter")


def _are_parts(shapes: Untyped, dtypes: Untyped) -> bool:
    """Say whether these may be parts of activations: wrappers gather flat parameters."""
    is_flat = all(len(shape) < 2 for shape in shapes)
    return not is_flat and all(dtype.is_floating_point for dtype in dtypes)


def _is_fake(tensor: object) -> bool:
    return any(kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__)
