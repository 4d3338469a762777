from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from safetensors import safe_open

from distdiag.probes.files.libraries import ClassPatch, patch_class


@pytest.fixture
def ours() -> Any:
    return patch_class(safe_open, lambda *given: safe_open(*given))


def test_a_stand_in_for_a_class_makes_its_objects() -> None:
    ours: Any = patch_class(memoryview, lambda *given: memoryview(*given))

    assert isinstance(ours(b""), ours)
    assert not isinstance(b"", ours)
    assert issubclass(memoryview, ours)
    assert not issubclass(bytes, ours)


def test_it_looks_like_the_class(ours: Any) -> None:
    assert isinstance(ours, type)
    assert inspect.isclass(ours)
    assert ours.__name__ == ours.__qualname__ == "safe_open"
    assert repr(ours) == repr(safe_open)
    assert inspect.signature(ours) == inspect.signature(safe_open)
    with pytest.raises(AttributeError):
        ours.nothing  # noqa: B018


def test_it_equals_the_class_and_is_found_where_that_is(ours: Any) -> None:
    assert ours == safe_open
    assert safe_open == ours
    assert {safe_open: 1}[ours] == 1
    assert safe_open in {ours}


def test_it_is_pickled_by_name_and_copied_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = patch_class(memoryview, lambda *given: memoryview(*given))
    monkeypatch.setattr("builtins.memoryview", ours)

    assert isinstance(ours, type)
    assert type(ours) is not ClassPatch
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(ours, protocol)) is ours
    assert copy.deepcopy(ours) is copy.copy(ours) is ours
