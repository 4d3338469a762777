"""The arguments of the mark, right and wrong."""

import pytest

from distdiag.events.errors import UsageError
from distdiag.testing.mark import read_mark
from distdiag.testing.plan import Mark


@pytest.mark.parametrize(
    ("args", "kwargs", "mark"),
    [
        ((), {}, Mark()),
        ((4,), {}, Mark(world_size=(4,))),
        ((), {"world_size": [1, 2]}, Mark(world_size=(1, 2))),
        ((), {"timeout": 5, "fail_on": "warning"}, Mark(timeout=5, fail_on="warning")),
        ((), {"reuse": "module"}, Mark(reuse="module")),
    ],
)
def test_arguments_that_are_right(args, kwargs, mark):
    assert read_mark(args, kwargs) == mark


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((2, "gloo"), {}),
        ((2,), {"world_size": 2}),
        ((), {"world_size": []}),
        ((), {"world_size": [2, 2]}),
        ((), {"world_size": True}),
        ((), {"world_size": "2"}),
        ((), {"backend": ""}),
        ((), {"timeout": 0}),
        ((), {"timeout": "5"}),
        ((), {"fail_on": "info"}),
        ((), {"reuse": "session"}),
        ((), {"ranks": 2}),
    ],
)
def test_arguments_that_are_wrong(args, kwargs):
    with pytest.raises(UsageError):
        read_mark(args, kwargs)
