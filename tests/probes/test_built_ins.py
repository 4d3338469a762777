from __future__ import annotations

import copy
import inspect
import os
import pickle
import posix
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from distdiag.probes.built_ins import Replacements, StandIn, stand_in


@pytest.fixture
def seen() -> Iterator[list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []
    original = os.getpgid

    def call(_: StandIn, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    replaced = Replacements()
    replaced.replace(original, stand_in(original, call))
    yield calls
    replaced.undo()
    assert os.getpgid is posix.getpgid is original


def test_the_stand_in_is_called_wherever_the_function_is(seen: list[tuple[Any, ...]]) -> None:
    assert os.getpgid(0) == posix.getpgid(0)
    assert seen == [(0,), (0,)]


def test_it_is_found_under_any_name() -> None:
    module = types.ModuleType("some_module_of_the_user")
    module.my_name = original = os.getsid  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    replaced = Replacements()
    try:
        value = stand_in(original, lambda _, *args: original(*args))
        replaced.replace(original, value)
        assert module.my_name is value
        replaced.undo()
        assert module.my_name is original
    finally:
        del sys.modules[module.__name__]


def test_it_looks_like_the_function(seen: list[tuple[Any, ...]]) -> None:
    ours: Any = os.getpgid

    assert ours.__name__ == ours.__qualname__ == "getpgid"
    assert ours.__module__ == "posix"
    assert ours.__self__ is posix
    assert "pid" in inspect.signature(ours).parameters
    assert repr(ours).startswith("<built-in function getpgid")
    assert ours.__doc__ == ours.__wrapped__.__doc__
    with pytest.raises(AttributeError):
        ours.nothing  # noqa: B018


def test_it_is_pickled_by_name_and_copied_as_itself(seen: list[tuple[Any, ...]]) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(os.getpgid, protocol)) is os.getpgid
    assert copy.deepcopy(os.getpgid) is os.getpgid


def test_it_is_no_method_where_it_is_an_attribute_of_a_class(
    seen: list[tuple[Any, ...]],
) -> None:
    class Holder:
        function = os.getpgid

    assert Holder().function(0) == Holder.function(0)
    assert seen == [(0,), (0,)]


def test_it_stands_in_for_a_class_too() -> None:
    ours: Any = stand_in(memoryview, lambda _, *args: memoryview(*args))

    assert isinstance(memoryview(b""), ours)
    assert not isinstance(b"", ours)


def test_sets_of_functions_have_it_while_it_is_there() -> None:
    original = os.utime
    ours = stand_in(original, lambda _, *args: original(*args))
    replaced = Replacements()

    replaced.replace(original, ours)
    assert os.utime in os.supports_fd
    assert original in os.supports_fd
    replaced.undo()

    assert ours not in os.supports_fd
    assert os.utime is original


def test_code_that_is_compiled_can_call_it(seen: list[tuple[Any, ...]]) -> None:
    import torch

    @torch.compile(backend="eager")
    def function(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor + 1
        os.getpgid(0)
        return tensor * 2

    assert function(torch.ones(1)).item() == 4
    assert seen == [(0,)]
