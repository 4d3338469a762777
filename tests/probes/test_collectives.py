from __future__ import annotations

import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.events.lifecycle import ProbeDisabled, TorchLoaded
from distdiag.probes.catalogue import PROBES
from distdiag.probes.collectives.operators import OPS
from tests.probes.conftest import Observed

TENSOR_PARTS = ("collectives",)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        # Newer torch renames some of the collectives that are called here by their old names.
        warnings.simplefilter("ignore")
        yield


def _two() -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(3)]


EAGER: dict[str, tuple[Callable[[], object], dict[str, object]]] = {
    "all_reduce": (
        lambda: dist.all_reduce(torch.ones(2, 3), op=dist.ReduceOp.MAX),
        {"input_sizes": ((2, 3),), "reduce_op": "MAX", "dtypes": ("float32",)},
    ),
    "broadcast": (lambda: dist.broadcast(torch.ones(3), src=1), {"root": 1}),
    "reduce": (lambda: dist.reduce(torch.ones(3), dst=0), {"root": 0, "reduce_op": "SUM"}),
    "all_gather": (
        lambda: dist.all_gather(_two(), torch.ones(3)),
        {"input_sizes": ((3,),), "output_sizes": ((3,), (3,))},
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(torch.ones(6), torch.ones(3)),
        {"input_sizes": ((3,),), "output_sizes": ((6,),)},
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.ones(3), _two(), op=dist.ReduceOp.AVG),
        {"input_sizes": ((3,), (3,)), "output_sizes": ((3,),), "reduce_op": "AVG"},
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(6)),
        {"input_sizes": ((6,),), "output_sizes": ((3,),), "reduce_op": "SUM"},
    ),
    "gather": (lambda: dist.gather(torch.ones(3), _two(), dst=0), {"root": 0}),
    "scatter": (lambda: dist.scatter(torch.ones(3), _two(), src=0), {"root": 0}),
    "all_to_all": (lambda: dist.all_to_all(_two(), _two()), {"input_sizes": ((3,), (3,))}),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [3, 1]),
        {"input_splits": (3, 1), "output_splits": (1, 3)},
    ),
    "barrier": (dist.barrier, {"input_sizes": (), "dtypes": ()}),
}


@pytest.mark.parametrize("op", EAGER)
def test_an_eager_collective_is_recorded_with_what_it_asks_for(
    op: str, observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    action, expected = EAGER[op]

    action()

    (call,) = observed.calls()
    assert call.signature.op == op
    assert {name: getattr(call.signature, name) for name in expected} == expected
    assert call.group.ranks == (0, 1)
    assert call.collective_seq_id == 1
    assert not call.is_async
    assert call.site.location is not None
    assert call.site.location.file == __file__
    assert observed.states(call)[0] == "issued"


@pytest.mark.parametrize("kind", [np.array, lambda sizes: list(torch.tensor(sizes))])
def test_splits_and_tags_need_not_be_plain_numbers(
    kind: Callable[[list[int]], Any], observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)

    dist.all_to_all_single(torch.ones(4), torch.ones(4), kind([1, 3]), kind([3, 1]))
    dist.send(torch.ones(3), dst=1, tag=kind([7])[0])

    exchange, send = observed.calls()
    assert (exchange.signature.input_splits, exchange.signature.output_splits) == ((3, 1), (1, 3))
    assert send.signature.tag == 7


def test_the_api_is_the_function_that_the_user_called(observed: Observed, fake_group: None) -> None:
    observed.install(*TENSOR_PARTS)

    dist.all_reduce(torch.ones(1))
    with _coalescing_manager() as _:
        dist.all_reduce(torch.ones(1))

    assert [call.api for call in observed.calls()] == ["all_reduce", "_coalescing_manager"]


def test_messages_have_no_sequence_number_but_peer_and_tag(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)

    dist.send(torch.ones(3), dst=1, tag=7)
    dist.irecv(torch.ones(3), src=1)
    dist.all_reduce(torch.ones(1))

    send, receive, reduce = observed.calls()
    assert (send.signature.op, send.signature.peer, send.signature.tag) == ("send", 1, 7)
    assert (receive.signature.op, receive.signature.peer) == ("recv", 1)
    assert [c.collective_seq_id for c in (send, receive, reduce)] == [-1, -1, 1]
    assert [c.is_async for c in (send, receive)] == [False, True]


def test_peers_and_roots_of_a_subgroup_are_global_ranks(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    group = dist.new_group([1, 0], sort_ranks=False) if _can_reorder() else dist.new_group([0, 1])

    dist.broadcast(torch.ones(1), src=1, group=group)

    (call,) = observed.calls()
    assert call.signature.root == 1
    assert set(call.group.ranks) == {0, 1}


def _can_reorder() -> bool:
    return "sort_ranks" in dist.new_group.__code__.co_varnames


def test_the_numbering_starts_again_with_the_next_initialisation(
    observed: Observed, lone_group: None
) -> None:
    observed.install("process-groups", *TENSOR_PARTS)

    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))

    calls = observed.calls()
    assert [call.collective_seq_id for call in calls] == [1, 2, 1]
    assert calls[0].group.generation != calls[2].group.generation


def test_functional_collectives_show_their_operator_and_their_wait(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*TENSOR_PARTS)

    result = funcol.all_reduce(torch.ones(3), "max", dist.group.WORLD)
    (call,) = observed.calls()
    assert call.signature.reduce_op == "MAX"
    assert observed.states(call) == ["issued"]
    assert (result + 1).sum().item() == 6
    assert observed.states(call) == ["issued", "waited"]


def test_a_collective_on_another_thread_bears_its_name(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), name="aux")

    thread.start()
    thread.join()

    assert [call.thread for call in observed.calls()] == ["aux"]


def test_a_collective_is_seen_under_inference_mode(observed: Observed, fake_group: None) -> None:
    observed.install(*TENSOR_PARTS)

    with torch.inference_mode():
        dist.all_reduce(torch.ones(1))

    assert len(observed.calls()) == 1


def test_an_error_of_torch_reaches_the_caller_and_is_recorded_as_failed(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*TENSOR_PARTS)

    with pytest.raises(RuntimeError):
        dist.group.WORLD.allreduce([torch.ones(2), torch.ones(3)])

    (call,) = observed.calls()
    assert observed.states(call) == ["failed"]
    assert observed.events(ProbeDisabled) == []


def test_equal_calls_share_one_definition_of_site_and_signature(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)

    for _ in range(50):
        dist.all_reduce(torch.ones(1))

    calls = observed.calls()
    assert len(calls) == 50
    assert len({id(call.site) for call in calls}) == 1
    assert len(observed.recorder.tables.sites) == 1


def test_compiled_functions_are_recorded_once_for_each_run_and_have_no_more_graph_breaks(
    observed: Observed, lone_group: None
) -> None:
    observed.install()

    def reduce_and_add(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return funcol.all_reduce(tensor, "sum", dist.group.WORLD) + 1

    torch._dynamo.reset()
    compiled = torch.compile(reduce_and_add, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2))
    compiled(torch.ones(2))

    assert [call.signature.op for call in observed.calls()] == ["all_reduce"] * 4
    assert {call.signature.reduce_op for call in observed.calls()} == {"SUM"}


def test_the_public_functions_of_torch_are_the_same_objects_as_before(
    observed: Observed, fake_group: None
) -> None:
    before = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "send", "barrier")}

    observed.install()

    assert all(getattr(dist, name) is function for name, function in before.items())
    assert pickle.loads(pickle.dumps(dist.new_group)) is dist.new_group
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save


def test_uninstalling_leaves_nothing_behind(observed: Observed, fake_group: None) -> None:
    methods = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    functions = {name: getattr(dist, name) for name in ("new_group", "destroy_process_group")}
    observed.install()

    observed.uninstall()
    dist.all_reduce(torch.ones(1))

    assert observed.calls() == []
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == methods
    assert {name: getattr(dist, name) for name in functions} == functions
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def test_the_self_test_leaves_no_trace(observed: Observed) -> None:
    state = torch.get_rng_state()

    observed.install("collectives")

    assert [type(event) for event in observed.events()] == [TorchLoaded]
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized()


def test_every_operator_of_torch_that_moves_data_between_ranks_is_known() -> None:
    names = {
        full_name.partition("::")[2]
        for full_name in torch._C._dispatch_get_all_op_names()
        if full_name.startswith("c10d::")
    }

    assert names - {"check_for_nan"} <= set(OPS)


def test_a_group_is_not_kept_alive(observed: Observed, fake_group: None) -> None:
    observed.install("process-groups", *TENSOR_PARTS)
    dist.all_reduce(torch.ones(1))
    group = weakref.ref(dist.group.WORLD)

    dist.destroy_process_group()

    assert group() is None


@pytest.mark.parametrize("spec", PROBES, ids=lambda spec: spec.name)
def test_a_probe_that_cannot_be_installed_is_reported_and_harms_nothing(
    spec: Any, observed: Observed, fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spec.make(observed.wiring)

    def explode() -> None:
        raise RuntimeError("injected")

    for probe in made:
        monkeypatch.setattr(probe, "_install", explode)
        probe.install()
    dist.all_reduce(torch.ones(1))

    disabled = observed.events(ProbeDisabled)
    assert [event.probe for event in disabled] == [probe.name for probe in made]
    assert all("injected" in event.reason for event in disabled)


@pytest.mark.parametrize(
    "broken", ["call", "state", "define_group", "define_signature", "define_site"]
)
def test_a_failure_inside_the_tap_never_reaches_the_user(
    broken: str, observed: Observed, fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install(*TENSOR_PARTS)

    def explode(*args: object, **kwargs: object) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(observed.recorder, broken, explode)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()

    assert tensor.tolist() == [1, 1]
    assert any("injected" in event.reason for event in observed.events(ProbeDisabled))


def test_an_exception_of_the_users_signal_handler_is_not_swallowed(
    observed: Observed, fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install()
    real_call = observed.recorder.call

    class Timeout(Exception):
        pass

    def on_alarm(*_: object) -> None:
        raise Timeout

    def slow_call(*args: Any, **kwargs: Any) -> int:
        signal.raise_signal(signal.SIGALRM)  # arrives while the tap is at work
        return real_call(*args, **kwargs)

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        monkeypatch.setattr(observed.recorder, "call", slow_call)
        with pytest.raises(Timeout):
            dist.all_reduce(torch.ones(1))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert observed.events(ProbeDisabled) == []


# Two ways in: the methods of the group, and the dispatcher for calls that C++ makes

METHOD_CALLS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "allreduce, one tensor": lambda group: group.allreduce(torch.ones(3)),
    "allreduce, operator": lambda group: group.allreduce([torch.ones(3)], dist.ReduceOp.MAX),
    "allreduce, by name": lambda group: group.allreduce(tensors=[torch.ones(3)]),
    "allreduce_coalesced": lambda group: group.allreduce_coalesced(_two()),
    "broadcast, root": lambda group: group.broadcast(torch.ones(3), 1),
    "broadcast, root by name": lambda group: group.broadcast(torch.ones(3), root=1),
    "reduce, root and operator": lambda group: group.reduce(torch.ones(3), 1, dist.ReduceOp.MIN),
    "allgather, one tensor": lambda group: group.allgather(_two(), torch.ones(3)),
    "allgather, lists": lambda group: group.allgather([_two()], [torch.ones(3)]),
    "gather, root": lambda group: group.gather(_two(), torch.ones(3), 0),
    "scatter, root": lambda group: group.scatter(torch.ones(3), _two(), 0),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(3), _two()),
    "alltoall": lambda group: group.alltoall(_two(), _two()),
    "alltoall_base": lambda group: group.alltoall_base(
        torch.ones(4), torch.ones(4), [1, 3], [2, 2]
    ),
    "barrier": lambda group: group.barrier(),
    "send": lambda group: group.send([torch.ones(3)], 1, 5),
    "recv": lambda group: group.recv([torch.ones(3)], 1, tag=5),
}


@pytest.mark.parametrize("what", METHOD_CALLS)
def test_both_ways_of_seeing_a_call_write_the_same(
    what: str, observed: Observed, fake_group: None
) -> None:
    probes = {probe.name: probe for probe in observed.install(*TENSOR_PARTS)}
    call: Any = METHOD_CALLS[what]

    call(dist.group.WORLD)
    probes["collective-wrappers"].uninstall()
    probes["collectives"].engage()
    call(dist.group.WORLD)

    by_method, by_dispatcher = (made.signature for made in observed.calls())
    assert msgspec.structs.replace(by_method, reduce_op=None) == by_dispatcher
    assert [made.is_async for made in observed.calls()] in ([True, True], [False, False])


def _kernels_are_in_place() -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"))


def test_python_calls_alone_do_not_pay_for_the_dispatcher(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    dist.all_reduce(torch.ones(3))

    assert len(observed.calls()) == 1
    assert not _kernels_are_in_place()


def test_what_ddp_issues_in_cpp_is_recorded_once_from_its_first_call(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    assert _kernels_are_in_place()
    num_calls = len(observed.calls())

    model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(torch.ones(3))

    by_op = [call.signature.op for call in observed.calls()[num_calls:]]
    assert by_op == ["all_reduce", "all_reduce"]
    assert [call.thread for call in observed.calls()][-1] == "MainThread"


def test_a_fake_tensor_is_never_recorded(observed: Observed, fake_group: None) -> None:
    observed.install(*TENSOR_PARTS)
    with FakeTensorMode():
        dist.all_reduce(torch.ones(3))
    assert not observed.calls()


class _Logged(TorchDispatchMode):
    """A mode of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _LoggedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_that_hands_a_call_on_is_not_where_it_was_made(
    observed: Observed, fake_group: None
) -> None:
    observed.install(*TENSOR_PARTS)
    with _Logged():
        funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)

    (call,) = observed.calls()
    assert call.site.location is not None
    assert call.site.location.function == (
        "test_a_mode_that_hands_a_call_on_is_not_where_it_was_made"
    )


def test_modes_of_the_program_see_no_look_at_a_collective(
    observed: Observed, fake_group: None
) -> None:
    given = torch.ones(4)
    splits = list(torch.tensor([1, 3])), list(torch.tensor([3, 1]))

    def seen() -> tuple[list[str], list[Any]]:
        with _LoggedFunctions() as functions, _Logged() as operations:
            dist.all_to_all_single(torch.ones(4), given, *splits)
            dist.send(given, dst=1, tag=splits[0][0])
            dist.all_reduce(given, async_op=True).wait()
            funcol.all_reduce(given, "sum", dist.group.WORLD)
        return operations.seen, functions.seen

    plain = seen()
    observed.install()
    assert seen() == plain
    assert len(observed.calls()) == 4
