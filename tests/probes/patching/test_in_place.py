from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional

from distdiag.probes.patching.in_place import (
    InPlace,
    all_at_once,
    as_it_was,
    built_in_of,
    fits,
    open_up,
)
from distdiag.record.guard import Guard

FUNCTIONS = {
    "open": open,
    "os.open": os.open,
    "os._exit": os._exit,
    "torch.randn": torch.randn,
    "torch.softmax": torch.softmax,
    "attention": functional.scaled_dot_product_attention,
}


class Seen(list[tuple[Any, ...]]):
    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.append(args)
            return original(*args, **kwargs)

        return call


@pytest.fixture
def seen() -> Iterator[Seen]:
    yield (calls := Seen())
    calls.clear()


@pytest.fixture
def wrap(seen: Seen) -> Iterator[Callable[[Any], InPlace]]:
    done: list[InPlace] = []

    def one(function: Any) -> InPlace:
        done.append(InPlace(function, seen.wrap))
        return done[-1]

    yield one
    for each in reversed(done):
        each.undo()


def test_this_python_keeps_functions_of_c_as_is_known() -> None:
    assert fits()


def test_everybody_who_has_the_function_is_seen(seen: Seen, wrap: Callable[[Any], InPlace]) -> None:
    kept, default = os.getpgid, functools.partial(os.getpgid, 0)

    wrapped = wrap(os.getpgid)

    assert kept is os.getpgid
    assert kept(0) == default() == os.getpgid(pid=0)
    assert seen == [(0,), (0,), ()]
    assert as_it_was(os.getpgid)(0) == kept(0)
    assert len(seen) == 4
    wrapped.undo()
    kept(0)
    assert len(seen) == 4


def test_what_it_raises_is_raised(wrap: Callable[[Any], InPlace]) -> None:
    wrap(open)

    with pytest.raises(FileNotFoundError):
        open("/nowhere")  # noqa: SIM115
    with pytest.raises(TypeError, match="file"):
        open()  # type: ignore[call-overload]  # noqa: SIM115


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_looks_like_before(name: str, wrap: Callable[[Any], InPlace]) -> None:
    function = FUNCTIONS[name]
    before = _looks(function)

    wrap(function)

    assert _looks(function) == before


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_pickled_for_a_process_without_us(name: str, wrap: Callable[[Any], InPlace]) -> None:
    function = FUNCTIONS[name]
    wrap(function)

    data = [pickle.dumps(function, each) for each in range(pickle.HIGHEST_PROTOCOL + 1)]

    assert all(pickle.loads(each) is function for each in data)
    code = "import pickle, sys, torch; print(*map(repr, map(pickle.loads, eval(sys.argv[1]))))"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'distdiag' not in sys.modules", repr(data)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert run.stdout.count(function.__name__) >= len(data)


_KNOWN = frozenset((os.getsid, os.getpriority, os.getgroups))


def test_tables_that_were_filled_before_and_after_find_it(
    wrap: Callable[[Any], InPlace],
) -> None:
    table, known = {os.getsid: 1, os.getpid: 2}, {os.getsid}
    before = list(table)

    open_up([os.getgroups, os.getsid, os.getpriority])
    wrapped = wrap(os.getsid)

    assert {os.getgroups, os.getpriority} <= _KNOWN
    assert table[os.getsid] == 1
    assert list(table) == before
    assert os.getsid in known
    assert os.getsid in _KNOWN
    later = {os.getsid: 3}
    wrapped.undo()
    assert table[os.getsid] == 1
    assert later[os.getsid] == 3


def test_one_that_is_wrapped_twice_is_seen_by_both_until_they_end(seen: Seen) -> None:
    other = Seen()
    one, two = InPlace(os.getsid, seen.wrap), InPlace(os.getsid, other.wrap)

    os.getsid(0)
    one.undo()
    os.getsid(0)
    two.undo()
    os.getsid(0)

    assert (len(seen), len(other)) == (2, 2)  # what was wrapped later still calls the first


def test_several_are_called_first_from_the_end_of_all_on(
    seen: Seen, wrap: Callable[[Any], InPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[tuple[Any, ...]] = []
    walk = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: (walks.append(of), *walk(*of)))
    table = {os.getuid: "one", os.geteuid: "other"}

    with all_at_once(Guard(pytest.fail)):
        wrap(os.getuid)
        with all_at_once(Guard(pytest.fail)):
            wrap(os.geteuid)
            wrap(os.getuid)
        assert os.getuid() == as_it_was(os.getuid)() == os.geteuid()
        assert (seen, walks) == ([], [])
    os.getuid(), os.geteuid()

    assert len(seen) == 3
    assert walks == [(os.getuid, os.geteuid)]
    assert table[os.getuid] == "one"


def test_a_walk_that_fails_costs_the_calls_and_not_the_program(
    seen: Seen, wrap: Callable[[Any], InPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Exception] = []
    monkeypatch.setattr(gc, "get_referrers", lambda *_: 1 // 0)

    with all_at_once(Guard(problems.append)):
        wrap(os.getgid)
    monkeypatch.undo()

    assert [type(problem) for problem in problems] == [ZeroDivisionError]
    assert os.getgid() == as_it_was(os.getgid)()
    assert seen == []
    wrap(os.getgid)
    os.getgid()
    assert len(seen) == 1
    with pytest.raises(KeyError), all_at_once(Guard(problems.append)):
        raise KeyError("the program's own")


def test_methods_of_torch_stay_what_they_are(seen: Seen, wrap: Callable[[Any], InPlace]) -> None:
    method = vars(dist.Store)["set"]
    built_in = built_in_of(method)
    assert built_in is not None
    store = dist.HashStore()

    wrap(built_in)
    store.set("key", "value")

    assert vars(dist.Store)["set"] is method
    assert seen == [(store, "key", "value")]
    assert store.get("key") == b"value"


def test_torch_knows_it_in_all_its_ways(seen: Seen, wrap: Callable[[Any], InPlace]) -> None:
    handled: dict[Any, str] = {torch.softmax: "ours"}
    wrap(torch.softmax)

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.softmax:
                return handled[func]
            return super().__torch_function__(func, types, args, kwargs or {})

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    x = torch.zeros(2, 2)
    assert torch.softmax(torch.zeros(2).as_subclass(Mine), -1) == "ours"  # type: ignore[comparison-overlap]
    assert torch.fx.symbolic_trace(softmax)(x).tolist() == softmax(x).tolist()
    compiled = torch.compile(softmax, backend="eager", fullgraph=True)
    assert compiled(x).tolist() == softmax(x).tolist()
    assert softmax in {softmax}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_script_can_call_it(wrap: Callable[[Any], InPlace]) -> None:
    wrap(torch.softmax)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    assert torch.jit.script(softmax)(torch.zeros(1, 2)).tolist() == [[0.5, 0.5]]


def test_threads_may_call_it_at_any_time(seen: Seen) -> None:
    is_over = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not is_over.is_set():
                for place in range(5):
                    os.access("/", os.R_OK, follow_symlinks=bool(place))
        except BaseException as error:  # noqa: BLE001 (told by the test)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        InPlace(os.access, seen.wrap).undo()
    is_over.set()
    for thread in threads:
        thread.join()
    gc.collect()

    assert not failures


def _looks(function: Any) -> dict[str, Any]:
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__text_signature__")
    looks = {name: getattr(function, name) for name in names}
    kinds = ("isroutine", "isbuiltin", "isfunction", "ismethoddescriptor")
    looks |= {name: getattr(inspect, name)(function) for name in kinds}
    try:
        looks["signature"] = inspect.signature(function)
    except ValueError:
        looks["signature"] = None
    looks["type"] = type(function) is types.BuiltinFunctionType
    looks["repr"] = repr(function).partition(" at ")[0]
    looks["copy"] = copy.copy(function) is copy.deepcopy(function) is function
    return looks
