"""What runs out of sight is seen by nothing that belongs to the program."""

import signal
import sys
import threading
import warnings
from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.probes.guard import guard
from distdiag.probes.out_of_sight import in_sight, is_grad_enabled, out_of_sight, reading_attributes
from distdiag.probes.process.exceptions import ExceptionProbe
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import contents


class SeenOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    """A subclass that sees what is done with it."""

    seen: ClassVar[list[object]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def work(tensor):
    """Do what probes do: read attributes, make views, compute, compare and read numbers."""
    with out_of_sight():
        assert tensor.shape == (3, 4)
        assert tensor.grad_fn is None or tensor.requires_grad
        rows = tensor.detach().reshape(-1, 2)
        total = (rows * 2).double().sum() + torch.zeros(1, dtype=torch.float64, device="cpu")
        best = torch.topk(rows, 1).indices.tolist()
        assert torch.equal(rows, rows.clone())
        return float(total), best, rows.numpy().tobytes()


@pytest.fixture
def tensor():
    return torch.linspace(0, 1, 12).view(3, 4).requires_grad_() * 1.0


def test_dispatch_modes_see_nothing(tensor):
    expected = work(tensor)
    with SeenOperations() as outer, SeenOperations() as inner:
        assert work(tensor) == expected
        assert outer.seen == inner.seen == []
        torch.zeros(1)
    assert len(outer.seen) == len(inner.seen) == 1


def test_function_modes_and_subclasses_see_nothing(tensor):
    Logged.seen.clear()
    own = tensor.detach().as_subclass(Logged)
    Logged.seen.clear()
    with SeenFunctions() as mode:
        work(tensor)
        work(own)
        with reading_attributes():
            assert tensor.shape == (3, 4)
        assert mode.seen == Logged.seen == []
        assert tensor.shape == (3, 4)
    assert len(mode.seen) == 1


def test_fake_tensors_are_neither_made_nor_read(tensor):
    expected = work(tensor)
    plain = tensor.detach()
    with FakeTensorMode() as mode:
        fake, faked = torch.ones(3, 4), mode.from_tensor(plain)
        assert work(tensor) == expected
        with out_of_sight():
            assert type(torch.ones(2)) is torch.Tensor
            assert not is_readable(fake)
            assert contents([fake]).take() == [None]
            assert not is_readable(faked)


def test_graphs_of_tracers_hold_nothing(tensor):
    def traced(x):
        work(tensor)
        with out_of_sight():
            is_readable(x)
        return x + 1

    graph = make_fx(traced)(torch.ones(2)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    given = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(traced, (given,), check_trace=False)
    assert [node.kind() for node in script.graph.nodes()] == ["prim::Constant"] * 2 + ["aten::add"]


def test_levels_of_vmap_and_grad_are_passed_by(tensor):
    expected = work(tensor)
    wrapped = []

    def function(x):
        assert work(tensor) == expected
        with out_of_sight():
            wrapped.append(is_readable(x))
            assert contents([x]).take() == [None]
            assert not torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(2))
        return (x * 2).sum()

    assert torch.vmap(function)(torch.ones(2, 3)).tolist() == [6, 6]
    assert torch.func.grad(function)(torch.ones(3)).tolist() == [2, 2, 2]
    assert torch.vmap(torch.func.grad(function))(torch.ones(2, 3)).tolist() == [[2] * 3] * 2
    assert wrapped == [False] * 3


def test_functionalized_tensors_are_not_read(tensor):
    def function(x):
        work(tensor)
        with out_of_sight():
            assert not is_readable(x)
        return x.add(1)

    assert torch.func.functionalize(function)(torch.ones(2)).tolist() == [2, 2]


def test_autograd_builds_no_graph_and_saves_nothing(tensor):
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda kept: kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hooks, torch.autograd.detect_anomaly(), out_of_sight():
            result = tensor * tensor
    assert packed == []
    assert result.grad_fn is None
    assert not result.requires_grad


def test_what_the_program_does_with_gradients_is_known_and_put_back():
    with out_of_sight():
        assert is_grad_enabled()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        with out_of_sight():
            assert not is_grad_enabled()
        assert not torch.is_grad_enabled()


def test_versions_of_tensors_stay(tensor):
    before = tensor._version
    with out_of_sight():
        copy = tensor.detach().clone()
        copy.add_(1)
    assert tensor._version == before


def test_what_is_made_in_inference_mode_can_be_used_after_it():
    with torch.inference_mode():
        with out_of_sight():
            made = torch.zeros(2)
        assert torch.is_inference_mode_enabled()
        assert torch.zeros(1).is_inference()
    assert not made.is_inference()
    made.add_(1)


def test_autocast_and_its_cache_play_no_part():
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with out_of_sight():
            assert (weight @ weight).dtype is torch.float32
        assert (weight @ weight).dtype is torch.bfloat16


def test_deterministic_checks_hear_of_nothing(tensor):
    torch.use_deterministic_algorithms(True)
    try:
        work(tensor)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_profilers_name_nothing(tensor):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work(tensor)
        torch.ones(1).cos()
    names = {event.name for event in profiler.events()}
    assert "aten::cos" in names
    assert not names & {"aten::detach", "aten::topk", "aten::mul", "aten::equal"}


def hidden(tensor):
    return [each for each in (tensor * 2).tolist()]


def test_profilers_of_python_see_as_many_functions_return_as_begin_and_none_within(tensor):
    seen = []

    def note(frame, event, _):
        seen.append((event, frame.f_code.co_name))

    def look():
        with guard(seen.append):
            hidden(tensor)
        with out_of_sight(), out_of_sight():
            hidden(tensor)

    sys.setprofile(note)
    try:
        look()
    finally:
        sys.setprofile(None)
    names = {name for _, name in seen}
    assert {"look", "__enter__", "__exit__"} <= names
    assert not names & {"hidden", "<listcomp>"}
    events = Counter(event for event, _ in seen)
    assert events["call"] == events["return"]
    hidden(tensor)
    assert sys.getprofile() is None


def test_a_profile_of_torch_with_stacks_shows_what_the_program_called_and_where(tensor):
    def look():
        with guard(pytest.fail):
            hidden(tensor)
        return torch.ones(1).cos()

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True) as profiler:
        for _ in range(3):
            look()
    events = profiler.events()
    assert not [event for event in events if event.name.endswith(": hidden")]
    looks = [event for event in events if event.name.endswith(": look")]
    assert len(looks) == 3
    assert len({id(event.cpu_parent) for event in looks}) == 1  # none is inside another one
    assert sum(event.name == "aten::cos" for event in events) == 3


def test_nothing_is_drawn(tensor):
    before = torch.get_rng_state()
    work(tensor)
    contents([tensor]).take()
    assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_are_not_concerned(tensor):
    begun, done, seen = threading.Event(), threading.Event(), []

    def program():
        with SeenOperations() as mode:
            begun.wait(10)
            torch.zeros(1)
            seen.extend(mode.seen)
        done.set()

    thread = threading.Thread(target=program)
    thread.start()
    with out_of_sight():
        begun.set()
        done.wait(10)
    thread.join()
    assert len(seen) == 1


def test_blocks_may_nest_and_end_by_exceptions(tensor):
    with SeenOperations() as mode, SeenFunctions() as functions:
        with pytest.raises(ValueError, match="ours"), out_of_sight():
            work(tensor)
            torch.zeros(1)
            raise ValueError("ours")
        assert mode.seen == functions.seen == []
        torch.zeros(1)
    assert len(mode.seen) == 1
    assert len(functions.seen) == 1


def test_code_of_the_program_that_interrupts_ours_runs_as_ever(tensor):
    with SeenOperations() as mode, out_of_sight():
        with in_sight():
            assert (tensor * 2).requires_grad
            work(tensor)
        torch.zeros(1)
    assert [str(func) for func in mode.seen] == ["aten.mul.Tensor"]
    with in_sight():
        assert torch.is_grad_enabled()


def test_signal_handlers_of_the_program_run_in_its_own_modes(observed):
    watch = ExceptionProbe(observed.recorder, after_raise=lambda: None)
    watch.install()
    observed.probes.append(watch)
    found = []

    def handler(*_):
        found.append((torch.ones(2, requires_grad=True) * 2).requires_grad)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with out_of_sight():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [True]


def test_a_guard_hides_and_catches(tensor):
    failures = []
    with SeenOperations() as mode:
        with guard(failures.append):
            work(tensor)
            raise ValueError("ours")
        with guard(failures.append):
            torch.zeros(1)
    assert mode.seen == []
    assert [str(each) for each in failures] == ["ours"]
    with pytest.raises(KeyboardInterrupt), guard(failures.append):
        raise KeyboardInterrupt
    assert torch.is_grad_enabled()
