"""What the modules of a forward pass were given, and how little is touched for it."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from distdiag.probes.data.forward_arguments import arguments_of


class Inner(nn.Module):
    def forward(self, hidden):
        self.seen = [(each.further, each.named) for each in arguments_of(sys._getframe())]
        return hidden


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, ids, *more, labels=None, **kwargs):
        hidden = ids * 2
        other = ids * 3
        self.other = weakref.ref(other)
        self.inner(hidden)
        self.inner.seen, seen = None, self.inner.seen
        del other
        gc.collect()
        self.is_freed = self.other() is None
        return seen, labels, more, kwargs


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, ids):
        held = locals()
        self.inner(ids)
        assert "held" not in held
        return self.inner.seen


def test_all_kinds_of_arguments_are_known_the_innermost_modules_first():
    ids, mask = torch.ones(2), torch.ones(3)
    seen, *others = Outer()(ids, mask, labels=4, shift_labels=5)
    assert list(seen[0][1]) == ["hidden"]
    assert seen[1] == ((mask,), {"ids": ids, "labels": 4, "shift_labels": 5})
    assert others == [4, (mask,), {"shift_labels": 5}]


def test_nothing_else_of_the_pass_is_kept():
    model = Outer()
    model(torch.ones(2))
    assert model.is_freed


def test_a_pass_that_asks_for_its_own_variables_is_left_alone():
    assert len(Asking()(torch.ones(2))) == 1


@pytest.mark.parametrize("container", [nn.Sequential, nn.DataParallel])
def test_containers_of_torch_are_no_models_of_the_user(container):
    inner = Inner()
    container(inner)(torch.ones(2))
    assert [list(named) for _, named in inner.seen] == [["hidden"]]


def test_outside_of_modules_there_are_none():
    assert list(arguments_of(sys._getframe())) == []


class Computed:
    """What a class has is computed when somebody asks for it."""

    num_asked = 0

    def __get__(self, one, kind):
        Computed.num_asked += 1
        return moved


def moved(positions, rank): ...


class Placing(nn.Module):
    table = Computed()

    def forward(self, ids):
        (found,) = arguments_of(sys._getframe())
        self.placed(ids)
        if ids is None:
            self.table(ids)
        return found.called

    @staticmethod
    def placed(ids): ...


def test_a_class_is_not_asked_for_what_it_computes():
    called = Placing()(torch.ones(2))
    assert not Computed.num_asked
    assert Placing.placed.__code__ in called
    assert moved.__code__ not in called
