"""Modes, hooks and checks of a program see the same of it, however closely it is looked at.

The profile `standard` is among the correct programs whose results are compared to the last bit.
"""

from pathlib import Path

import pytest

from distdiag.config.tasks import ParityTask, RoutingTask
from tests.integration.catalogue import PROGRAM_FOLDER
from tests.integration.launch import run_checked, run_plain
from tests.integration.records import read_records

SCRIPT = PROGRAM_FOLDER / "own_modes.py"
MORE_STEPS_THAN_IT_TAKES = 100

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["eager", "traced"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain_records(way: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("plain") / "record"
    plain = run_plain(SCRIPT, ["--way", way, "--out", str(out)])
    records = read_records(out)
    assert sorted(records) == ["rank0", "rank1"], plain.describe()
    return records


def recording_options(folder: Path) -> list[str]:
    """Return the options by which the recorders of two runs that are compared are there, too."""
    steps = MORE_STEPS_THAN_IT_TAKES
    names = {"parity": folder / "parity.json", "routing": folder / "routing.json"}
    for name in names:
        (folder / name).mkdir()
    ParityTask(folder=str(folder / "parity"), num_steps=steps).write(names["parity"])
    RoutingTask(folder=str(folder / "routing"), num_steps=steps).write(names["routing"])
    config = folder / "recording.toml"
    config.write_text("".join(f"{name}_task = '{path}'\n" for name, path in names.items()))
    return ["--config", str(config)]


@pytest.mark.parametrize("how", ["light", "recorded"])
def test_modes_of_a_program_see_the_same(
    how: str, way: str, plain_records: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "record"
    options = recording_options(tmp_path) if how == "recorded" else ["--profile", how]
    checked = run_checked(SCRIPT, ["--way", way, "--out", str(out)], options=options)
    assert read_records(out) == plain_records, checked.describe()
    assert checked.reported() == {}
    if how == "recorded":
        for recording in ("parity", "routing"):
            assert any((tmp_path / recording).iterdir()), checked.describe()
