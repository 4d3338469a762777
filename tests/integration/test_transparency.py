"""A program sees of the agent what docs/transparency.md lists, and nothing else."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.integration.launch import Launch, Outcome

pytestmark = pytest.mark.timeout(400)

VIEW = Path(__file__).with_name("self_view.py")
PAGE = Path(__file__).parents[2] / "docs" / "transparency.md"


def listed() -> list[str]:
    """Return the places of the tables, such as `sys.meta_path.*`."""
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(), re.MULTILINE)
    return [place for row in rows for place in re.findall(r"`([^`]+)`", row)]


def views(folder: Path, outcome: Outcome) -> list[dict[str, object]]:
    assert outcome.exit_status == 0, outcome.describe()
    return [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(2)]


def test_what_differs_with_the_agent_is_on_the_list_and_what_is_on_it_differs(
    tmp_path: Path,
) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    for folder in (plain, checked):
        folder.mkdir()
    launch = Launch(launcher="torchrun", folder=tmp_path)
    before = views(plain, launch.plain(VIEW, [str(plain)]))
    after = views(checked, launch.checked(VIEW, [str(checked)]))

    different = {
        place: (without.get(place), with_agent.get(place))
        for without, with_agent in zip(before, after, strict=True)
        for place in without.keys() | with_agent.keys()
        if without.get(place) != with_agent.get(place)
    }
    patterns = listed()
    unlisted = {
        place: found
        for place, found in different.items()
        if not any(fnmatchcase(place, pattern) for pattern in patterns)
    }
    assert unlisted == {}
    stale = [each for each in patterns if not any(fnmatchcase(p, each) for p in different)]
    assert stale == []
    for view in (*before, *after):
        assert len(view) > 2000
