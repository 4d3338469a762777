"""Under a real launcher, auxiliary losses of the wrong weight, or of none, are found."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("auxiliary_losses.py")

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("ranks", "MOE009"),
        pytest.param("passes", "MOE009", marks=pytest.mark.slow),
        pytest.param("injected-passes", "MOE009", marks=pytest.mark.slow),
        pytest.param("by-hand", "MOE009", marks=pytest.mark.slow),
        pytest.param("by-hand-right", None, marks=pytest.mark.slow),
        pytest.param("thrown", "MOE010", marks=pytest.mark.slow),
        pytest.param("forgotten", "MOE010", marks=pytest.mark.slow),
        pytest.param("warm-up", None, marks=pytest.mark.slow),
        pytest.param("right", None, marks=pytest.mark.slow),
        pytest.param("injected", None, marks=pytest.mark.slow),
    ],
)
def test_an_auxiliary_loss_is_found_if_it_is_wrong(how, code, tmp_path):
    config = tmp_path / "distdiag.toml"
    config.write_text("[aux_loss]\ncoefficient = 0.02\n")
    run = run_checked(SCRIPT, [how], options=["--config", str(config)])
    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    assert run.leftovers == (), run.describe()
    loud = [each for each in run.report["findings"] if each["severity"] != "info"]
    assert [each["code"] for each in loud] == ([code] if code else []), run.describe()
    assert all(each["ranks"] == [0, 1] for each in loud)
