"""Reads the arguments of ``@pytest.mark.distdiag`` and of fixtures that start ranks."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, get_args

from distdiag.config import FailOn
from distdiag.events.errors import UsageError
from distdiag.testing.plan import Mark, Reuse

LARGEST_WORLD: Final = 256


def read_mark(args: tuple[object, ...], kwargs: Mapping[str, Any]) -> Mark:
    """Return the mark with these arguments.

    Raises:
        UsageError: one of them is not what it should be.

    """
    given = dict(kwargs)
    if args:
        if len(args) > 1 or "world_size" in given:
            raise UsageError("distdiag mark: all arguments but world_size need their names")
        given["world_size"] = args[0]
    known = Mark.__struct_fields__
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(known)})"
            raise UsageError(f"distdiag mark: unknown argument {name!r}{hint}")
    if "world_size" in given:
        given["world_size"] = read_world_sizes(given["world_size"])
    mark = Mark(**given)
    _require(isinstance(mark.backend, str) and bool(mark.backend), "backend", mark.backend)
    is_number = isinstance(mark.timeout, int | float) and not isinstance(mark.timeout, bool)
    _require(is_number and mark.timeout > 0, "timeout", mark.timeout)
    _require(mark.fail_on in get_args(FailOn), "fail_on", mark.fail_on)
    _require(mark.reuse is None or mark.reuse in get_args(Reuse), "reuse", mark.reuse)
    return mark


def read_world_sizes(given: object) -> tuple[int, ...]:
    """Return numbers of ranks, from one number or several.

    Raises:
        UsageError: they are no numbers of ranks.

    """
    sizes = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    is_good = bool(sizes) and all(type(s) is int and 0 < s <= LARGEST_WORLD for s in sizes)
    _require(is_good and len(set(sizes)) == len(sizes), "world_size", given)
    return tuple(size for size in sizes if isinstance(size, int))


_EXPECTED: Final = {
    "world_size": "a number of ranks such as 2, or distinct ones such as [1, 2, 4]",
    "backend": 'a backend of torch.distributed such as "gloo"',
    "timeout": "a positive number of seconds",
    "fail_on": 'one of "error", "warning", "never"',
    "reuse": '"module", or None',
}


def _require(condition: bool, name: str, given: object) -> None:
    if not condition:
        raise UsageError(f"distdiag mark: {name} is {given!r}, not {_EXPECTED[name]}")
