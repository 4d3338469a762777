"""Gradients that DeepSpeed keeps in flat partitions are measured, right ones not accused."""

import os
import sys
from pathlib import Path

import pytest

from tests.integration.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("deepspeed_gradients.py")
RELEASES = {
    "0.18.5": ("bf16", {"SHD022", "SHD023"}),  # deepspeedai/DeepSpeed#7839
    "0.19.3": ("1", {"SHD004"}),  # deepspeedai/DeepSpeed#8382
}
"""What is wrong in a release with this way: `DISTDIAG_DEEPSPEED_0_18_5` names its folder."""


def findings(way, folder=""):
    environ = {"TORCH_EXTENSIONS_DIR": f"{folder}-extensions"} if folder else {}
    path = os.pathsep.join([folder, *sys.path])
    # A forked rank has imported what is installed.
    launch = Launch(launcher="torchrun", environ=environ | {"PYTHONPATH": path})
    if not folder:
        launch = Launch()
    outcome = launch.checked(SCRIPT, [way])
    found = outcome.reported()
    assert outcome.report is not None
    assert set(outcome.report["checked"]) >= {"SHD021", "SHD022", "SHD023"}, outcome.describe()
    return found


@pytest.mark.parametrize("way", ["0", "1", "2", "3", "bf16"])
def test_right_gradients_are_not_accused(way):
    pytest.importorskip("deepspeed")
    assert findings(way) == {}


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_that_combines_them_wrongly_is_reported(release):
    folder = os.environ.get(f"DISTDIAG_DEEPSPEED_{release.replace('.', '_')}", "")
    if not folder:
        pytest.skip("the folder of this release is not named")
    way, codes = RELEASES[release]
    assert set(findings(way, folder)) == codes
