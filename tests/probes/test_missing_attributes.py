"""A library of another version: what a probe would wrap is not there, and all else is seen."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from distdiag.events.lifecycle import ProbeDisabled, StepEnd, Unobserved
from distdiag.probes.base import Patches
from distdiag.probes.catalogue import find_probes
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


def _wrapped(observed: Observed) -> dict[tuple[int, str], tuple[Any, str, set[str]]]:
    """Return owner and name of each attribute that is wrapped, and the probes that do so."""
    found: dict[tuple[int, str], tuple[Any, str, set[str]]] = {}
    for spec in find_probes():
        if sys.modules.keys() >= set(spec.needs):
            observed.install(spec.name)
            for owner, name in chain(*(probe._patches.wrapped for probe in observed.probes)):
                found.setdefault((id(owner), name), (owner, name, set()))[2].add(spec.name)
            observed.uninstall()
    return found


def test_each_costs_what_is_seen_through_it(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_only = [
        (owner, name, probes)
        for owner, name, probes in _wrapped(observed).values()
        if str(getattr(owner, "__module__", None) or owner.__name__).startswith("torch")
        and getattr(owner, "__name__", "") not in _OF_THE_TAP
    ]
    assert len(torch_only) > 40

    for owner, name, probes in torch_only:
        with monkeypatch.context() as patch:
            try:
                patch.delattr(owner, name)
            except (AttributeError, TypeError):
                continue  # added by the probe itself, or a class of C
            before = len(observed.events(ProbeDisabled))
            observed.install(*probes)
            observed.uninstall()
            lost = observed.events(ProbeDisabled)[before:]
            assert lost == [], (owner, name)
    assert {each.reason for each in observed.events(Unobserved)} == {"it is not there"}


_OF_THE_TAP = {"ProcessGroup", "Store", "HashStore", "PrefixStore", "Work", "Reducer"}
"""A call of theirs that is not seen would shift the numbers of later ones."""


def test_the_rest_is_seen(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.functional, "scaled_dot_product_attention")
    monkeypatch.delattr(torch, "randint_like")
    observed.install()
    model = ddp(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert observed.events(ProbeDisabled) == []
    assert len(observed.events(StepEnd)) == 1
    missed = {(each.probe, each.what) for each in observed.events(Unobserved)}
    assert ("step-draws", "torch.randint_like") in missed
    assert ("sequence", "torch.nn.functional.scaled_dot_product_attention") in missed


def test_what_cannot_be_replaced_is_reported_with_the_reason() -> None:
    reported: list[tuple[str, str]] = []
    patches = Patches(lambda *each: reported.append(each))

    assert not patches.wrap(dict, "fromkeys", lambda original: original)
    assert not patches.wrap(torch, "nothing", lambda original: original)
    assert [what for what, _ in reported] == ["builtins.dict.fromkeys", "torch.nothing"]
    assert reported[1][1] == "it is not there"


def test_methods_of_every_kind_can_be_wrapped() -> None:
    class Function(torch._C._FunctionBase):
        apply = vars(torch._C._FunctionBase)["apply"]  # so has torch 2.14 its own

        @classmethod
        def of_class(cls) -> type:
            return cls

        @staticmethod
        def alone() -> str:
            return "alone"

    calls: list[Any] = []

    def make(original: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            calls.append(args)
            return original(*args)

        return wrapper

    patches = Patches(lambda *reported: pytest.fail(str(reported)))
    for name in ("apply", "of_class", "alone"):
        assert patches.wrap(Function, name, make)

    assert Function.of_class() is Function
    assert Function.alone() == "alone"
    with pytest.raises(Exception, match=r".+"):
        Function.apply()
    assert calls == [(Function,), (), (Function,)]
    patches.undo()
    assert type(vars(Function)["apply"]).__name__ == "classmethod_descriptor"
