"""Of large files of text the parts are read that tell of a failure, within bounded memory."""

import pytest

from distdiag.analysis import analyze
from distdiag.analysis.large_files import load
from distdiag.dumps.files import Limits
from distdiag.dumps.reading import LargeFile
from tests.analysis.failed_logs import FAULT, RAISED_2, with_prefix
from tests.analysis.test_failed_logs import judge

MIB = 1 << 20
LIMITS = Limits(most_text=4 * MIB)
STEP = "".join(f"[rank{n}]: step 1 loss 2.0 lr 1e-4\n" for n in range(4))
STEP_OF_OTHERS = "".join(f"[rank{n}]: step 1 loss 2.0 lr 1e-4\n" for n in (0, 1, 3))
FAILURE = "".join(f"{line}\n" for line in with_prefix("[rank2]: ", FAULT))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of 10 MiB with a failure in its middle."""
    path = tmp_path_factory.mktemp("large") / "train.log"
    before, after = (steps * (5 * MIB // len(steps)) for steps in (STEP, STEP_OF_OTHERS))
    path.write_text(before + FAILURE + after)
    return path


def test_what_fits_is_read_whole(log):
    loaded = load(LargeFile(path=str(log), shown="train.log"))
    assert loaded.dump.data == log.read_bytes()
    assert loaded.remark == ""


def test_what_tells_of_a_failure_is_read_wherever_it_stands(log):
    loaded = load(LargeFile(path=str(log), shown="train.log"), LIMITS)
    assert len(loaded.dump.data) < 2 * MIB
    assert FAILURE.encode() in loaded.dump.data
    assert loaded.dump.data.startswith(b"[rank0]: step 1")
    assert "all of its 10 MiB were searched" in loaded.remark


def test_however_much_it_tells_memory_is_bounded(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(FAILURE * (6 * MIB // len(FAILURE)))
    loaded = load(LargeFile(path=str(path), shown="train.log"), LIMITS)
    assert len(loaded.dump.data) <= 4 * MIB + 1


def test_the_failure_in_the_middle_is_found(log):
    report = analyze([log])
    judge(report, RAISED_2)
    (file,) = report.files
    assert file.problem == ""
