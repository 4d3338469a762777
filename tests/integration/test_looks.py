"""What the agent wraps looks as it does without the agent, and is read by processes without it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import run_checked, run_plain

pytestmark = pytest.mark.timeout(400)

LOOKS = Path(__file__).with_name("looks.py")
NAMED = ("torch:randn", "torch:bernoulli", "torch:softmax", "os:_exit", "builtins:open")


def test_all_that_is_wrapped_looks_and_is_pickled_as_before(tmp_path: Path) -> None:
    listed, checked, plain = (tmp_path / name for name in ("listed", "checked", "plain"))

    ours = run_checked(LOOKS, nproc=0, args=(str(listed), str(checked)))
    assert ours.exit_status == 0, ours.describe()
    assert ours.report is not None
    theirs = run_plain(LOOKS, nproc=0, args=(str(listed), str(plain)))
    assert theirs.exit_status == 0, theirs.describe()

    before, after = (json.loads(each.read_text()) for each in (plain, checked))
    assert len(before) > 100
    assert before.keys() >= set(NAMED)
    pickled = [bytes.fromhex(each.pop("pickled")) for each in after.values() if "pickled" in each]
    for place, each in before.items():
        each.pop("pickled", None)
        # `getfullargspec` shows of a decorated function what the decorator takes: ours takes more.
        if each.pop("is decorated", False):
            each.pop("arguments"), after[place].pop("arguments")
        after[place].pop("is decorated", None)
    different = {place: after[place] for place in before if before[place] != after[place]}
    assert different == {}
    (tmp_path / "pickled").write_bytes(pickle.dumps(pickled))
    code = (
        "import pickle, sys, torch; data = pickle.load(open(sys.argv[1], 'rb')); "
        "print(len([pickle.loads(each) for each in data]), 'distdiag' in sys.modules)"
    )
    read = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pickled")],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert read.stdout.split() == [str(len(pickled)), "False"]
