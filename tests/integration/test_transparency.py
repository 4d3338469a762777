"""A program sees of the agent what docs/transparency.md lists, and nothing else."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.integration.launch import Launch

pytestmark = pytest.mark.timeout(400)

VIEW = Path(__file__).with_name("self_view.py")
PAGE = Path(__file__).parents[2] / "docs" / "transparency.md"

View = dict[str, object]


def listed() -> list[str]:
    """Return the places of the tables, such as `sys.meta_path.*`."""
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(), re.MULTILINE)
    return [place for row in rows for place in re.findall(r"`([^`]+)`", row)]


def seen(launch: Launch, folder: Path, num_ranks: int, *, is_checked: bool) -> list[View]:
    """Return what each rank sees of itself."""
    run = launch.checked if is_checked else launch.plain
    outcome = run(VIEW, [str(folder)], nproc=num_ranks)
    assert outcome.exit_status == 0, outcome.describe()
    views = [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(num_ranks)]
    assert all(len(view) > 2000 for view in views)
    return views


def differences(launch: Launch, folder: Path, num_ranks: int) -> dict[str, tuple[object, object]]:
    """Return the places that look different with the agent: without it, and with it."""
    plain, checked = folder / "plain", folder / "checked"
    for each in (plain, checked):  # both before the first run, which sees them
        each.mkdir()
    before = seen(launch, plain, num_ranks, is_checked=False)
    after = seen(launch, checked, num_ranks, is_checked=True)
    return {
        place: (without.get(place), with_agent.get(place))
        for without, with_agent in zip(before, after, strict=True)
        for place in without.keys() | with_agent.keys()
        if without.get(place) != with_agent.get(place)
    }


def unlisted(different: dict[str, tuple[object, object]]) -> dict[str, tuple[object, object]]:
    patterns = listed()
    return {
        place: found
        for place, found in different.items()
        if not any(fnmatchcase(place, pattern) for pattern in patterns)
    }


def test_what_differs_with_the_agent_is_on_the_list(tmp_path: Path) -> None:
    different = differences(Launch(folder=tmp_path), tmp_path, 1)
    assert any(place.startswith("function.torch.distributed.") for place in different)
    # torch._dynamo is imported before the agent here, and has wrapped it by then.
    assert unlisted(different).keys() == {"function.torch.manual_seed"}


@pytest.mark.slow
def test_on_the_list_is_what_differs_on_two_ranks_of_torchrun_and_no_more(tmp_path: Path) -> None:
    different = differences(Launch(launcher="torchrun", folder=tmp_path), tmp_path, 2)
    assert unlisted(different) == {}
    assert [each for each in listed() if not any(fnmatchcase(p, each) for p in different)] == []
