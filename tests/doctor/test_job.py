"""The look at all nodes of a job."""

import pytest

from tests.integration.launch import run_plain


@pytest.mark.timeout(200)
def test_two_ranks_look_once_at_their_machine_and_at_what_is_between_them():
    done = run_plain("-m", ["distdiag.doctor.job"])
    assert done.exit_status == 0, done.describe()
    told = done.stdout.splitlines()
    assert sum(" torch " in line for line in told) == 1
    assert any(line.startswith("ok       clocks") for line in told)
    assert any("64 MiB over 2 ranks" in line for line in told)
    assert done.leftovers == ()
