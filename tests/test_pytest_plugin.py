"""The pytest plugin as its user meets it: whole runs of pytest in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from distdiag.reports import read_report
from tests import forked

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.timeout(400)  # each starts several ranks, and machines are slow

ROOT = Path(__file__).parents[1]
IMPORTS = """
import os, signal, time, unittest
import pytest, torch
import torch.distributed as dist
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest on the text of a test file."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(sys, "executable", forked.stand_in())
    plugin = ("-p", "distdiag.pytest_plugin")  # as if installed, whatever this is run from

    def run_pytest(text, *arguments):
        pytester.makepyfile(test_ranks=IMPORTS + text)
        return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)

    return run_pytest


def left_behind():
    """Return the processes of tests on ranks that still run."""
    words = ("distdiag.testing.rank", "distdiag.monitor")
    return [
        command
        for process in psutil.process_iter(["cmdline", "environ"])
        if any(word in (command := process.info["cmdline"] or ()) for word in words)
        and "pytest-" in (process.info["environ"] or {}).get("TORCHELASTIC_RUN_ID", "")
        and str(os.getpid()) in (process.info["environ"] or {}).get("DISTDIAG_OUTER", "")
    ]


@pytest.fixture(autouse=True)
def leaves_no_process(monkeypatch):
    monkeypatch.setenv("DISTDIAG_OUTER", str(os.getpid()))
    yield
    assert left_behind() == []


PASSING = """
@pytest.fixture
def shared(tmp_path):
    (tmp_path / "made-by-the-parent").write_text(str(os.getpid()))
    return {"pid": os.getpid()}

@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    monkeypatch.setenv("SEEDED_IN", str(os.getpid()))

@pytest.mark.distdiag(world_size=[1, 2])
@pytest.mark.parametrize("factor", [3])
def test_ranks(factor, shared, tmp_path, distdiag_world_size, capsys):
    assert dist.get_world_size() == distdiag_world_size
    total = torch.full((2,), float(factor))
    dist.all_reduce(total)
    assert total.tolist() == [factor * distdiag_world_size] * 2
    assert shared["pid"] != os.getpid()
    assert os.environ["SEEDED_IN"] == str(os.getpid())
    (tmp_path / f"rank-{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 1 + distdiag_world_size
    print("out")
    assert capsys.readouterr().out == "out\\n"

@pytest.mark.distdiag(world_size=2, reuse="module")  # forked: both import torch once
class TestMarks:
    def test_skip(self):
        pytest.skip("not today")

    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    def test_expected_failure(self):
        1 / 0
"""


def test_a_marked_test_runs_once_for_each_world_size(run):
    result = run(PASSING, "-v", "-rs")
    result.assert_outcomes(passed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_ranks*3-world1* PASSED*",
            "*test_ranks*3-world2* PASSED*",
            "SKIPPED*test_ranks.py:*: not today",
        ]
    )


FAILING = """
@pytest.mark.distdiag(world_size=2, reuse="module")
def test_one_rank_fails():
    print("said by both")
    assert {"rank": dist.get_rank()} == {"rank": 0}

@pytest.mark.distdiag(world_size=2, reuse="module")
def test_one_rank_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.distdiag(world_size=2, reuse="module")
def test_finding():
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)

@pytest.mark.distdiag(world_size=2, reuse="module", fail_on="never")
def test_finding_that_may_be():
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
"""


RACES = """
HERE = os.path.dirname(__file__)

def write_and_read(name, wait):
    path = os.path.join(HERE, name)
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            file.write("whole")
    wait()
    if dist.get_rank() == 1:
        with open(path) as file:
            assert file.read() == "whole"

@pytest.mark.distdiag(world_size=2, reuse="module", fail_on="warning")
def test_unordered():
    write_and_read("unordered", lambda: time.sleep(2 * dist.get_rank()))

@pytest.mark.distdiag(world_size=2, reuse="module", fail_on="warning")
def test_ordered():
    write_and_read("ordered", dist.barrier)
"""


def test_failures_name_ranks_with_introspection_signals_findings_and_races(run, tmp_path):
    xml = tmp_path / "junit.xml"
    result = run(FAILING + RACES, f"--junitxml={xml}")  # in one run: torch is imported once
    result.assert_outcomes(failed=4, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*rank 1 of 2*",
            "E*assert {'rank': 1} == {'rank': 0}",
            "E*Differing items:",
            "*output of rank*",
            "said by both",
            "*rank 1: killed by SIGKILL*",
            "ERROR COL005 reduce-op-mismatch",
            "*test_unordered*",
            "WARNING BAR001 unordered-file-access",
        ]
    )
    cases = {case.get("name"): case for case in ElementTree.parse(xml).iter("testcase")}
    failed = cases["test_one_rank_fails[world2]"]
    properties = {each.get("name"): each.get("value") for each in failed.iter("property")}
    assert properties == {"world_size": "2", "backend": "gloo"}
    assert cases["test_ordered[world2]"].find("failure") is None
    assert "{'rank': 1} == {'rank': 0}" in failed.find("failure").text
    assert "rank 1 of 2" in failed.find("failure").text


HANGING = """
@pytest.mark.distdiag(world_size=2, timeout=8)
def test_hang():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.barrier()
        time.sleep(600)
"""


def test_a_hang_ends_with_the_stacks_of_all_ranks_and_a_verdict(run):
    result = run(HANGING)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*ranks 0-1 of 2 had not ended after 8 s*",
            "*2 of 2 ranks, 2 distinct stacks",
            "*rank 0: *test_ranks.py:* in test_hang",
            "*all_reduce(torch.ones(4))",
            "*rank 1: *test_ranks.py:* in test_hang",
            "*dist.barrier()",
            "ERROR COL002 collective-kind-mismatch",
        ]
    )


def test_a_stronger_timeout_ends_the_ranks_too(run):
    text = """
@pytest.mark.timeout(4)
@pytest.mark.distdiag(world_size=2, timeout=100)
def test_sleeps():
    time.sleep(600)
"""
    run(text).assert_outcomes(failed=1)


@pytest.mark.slow
def test_under_xdist_a_failure_keeps_the_message_and_the_line_of_the_rank(run, tmp_path):
    pytest.importorskip("xdist")
    xml = tmp_path / "junit.xml"
    text = """
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.distdiag(world_size=2)
def test_ranks(number):
    dist.barrier()
    assert number == 1
"""
    result = run(text, "-n", "2", f"--junitxml={xml}")
    result.assert_outcomes(passed=1, failed=1)
    line = (IMPORTS + text).strip().splitlines().index("    assert number == 1") + 1
    result.stdout.fnmatch_lines(
        [
            "*ranks 0-1 of 2*",
            "E*assert 2 == 1",
            f"test_ranks.py:{line}: AssertionError",
            "FAILED *test_ranks*2-world2* - rank ?: assert 2 == 1*",
        ]
    )
    (failure,) = ElementTree.parse(xml).iter("failure")
    assert failure.get("message") in ("rank 0: assert 2 == 1", "rank 1: assert 2 == 1")
    assert f"test_ranks.py:{line}: AssertionError" in failure.text
    assert "distdiag/" not in failure.text


REFUSED = """
@pytest.mark.distdiag(world_size=2, backend="nccl")
def test_gpus():
    assert False, "never started"

@pytest.mark.distdiag(world_size=2)
class TestCase(unittest.TestCase):
    def test_of_unittest(self):
        assert False, "never started"
"""


def test_what_cannot_run_on_ranks_says_why(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run(REFUSED, "-rs")
    result.assert_outcomes(skipped=1, errors=1)
    result.stdout.fnmatch_lines(["*not for unittest.TestCase*", "*nccl needs 2 GPUs*are 0"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("world_size=0", "world_size is 0, not a number of ranks"),
        ("world_sizes=2", "unknown argument 'world_sizes' (did you mean world_size?)"),
    ],
)
def test_a_wrong_mark_is_an_error_of_collection(run, arguments, problem):
    result = run(f"@pytest.mark.distdiag({arguments})\ndef test_ranks(): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{problem.replace('[', '[[]')}*"])


def test_without_the_mark_nothing_is_imported():
    code = (
        "import sys, distdiag.pytest_plugin\n"
        "loaded = {'torch', 'msgspec', 'psutil', 'distdiag.config'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environ)


PARITY = """
def train(world_size, scale):
    total = torch.ones(1) / world_size
    dist.all_reduce(total)
    return {"loss": [total * scale], "weight": total}

def test_equal(assert_parity):
    assert_parity(lambda rank, world_size: train(world_size, 1), reuse="module")

def test_sum(assert_parity):
    assert_parity(
        lambda rank, world_size: train(world_size, world_size), rtol=1e-3, reuse="module"
    )

@pytest.mark.distdiag(world_size=2, reuse="module")
def test_of_a_model(assert_parity):
    def step(rank, world_size):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model[1].parameters():
            dist.all_reduce(parameter.grad)  # a sum that nobody divides
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return model

    assert_parity(step, rtol=1e-3)  # the line of the test
"""


def test_parity_of_a_closure_is_measured_on_real_ranks(run):
    result = run(PARITY)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*world size 2 against 1: loss at step 0 is 2 on 2 ranks and 1 on one*the world size*",
            ">*assert_parity(step, rtol=1e-3)  # the line of the test",
            "E*world size 2 against 1: 2 of 4 names differ, the first is 1.weight*",
            "test_ranks.py:*: Failed",
        ]
    )


SCRIPT = ROOT / "tests" / "parity" / "programs" / "language_model.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_is_compared_by_the_command_and_the_failure_is_its_report(run):
    result = run(f"""
def test_right(assert_parity):
    assert_parity({str(SCRIPT)!r}, steps=2)

def test_summed(assert_parity):
    arguments = ["--wrapper", "hand", "--bug", "summed"]
    assert_parity({str(SCRIPT)!r}, world_sizes=[1, 2], args=arguments, steps=2)
""")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*PAR011*", "*times the number of ranks (2)*"])


def test_a_script_that_cannot_be_compared_fails_with_the_reason(run):
    result = run("""
def test_absent(assert_parity):
    assert_parity("absent.py", timeout=30)

def test_own_bound(assert_parity):
    assert_parity("absent.py", rtol=1e-3)
""")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*absent.py cannot be compared:", "*does not exist*"])
    result.stdout.fnmatch_lines(["*a script takes no rtol*"])


REUSE = """
pytestmark = pytest.mark.distdiag(world_size=2, reuse="module")
SEEN = []

def note():
    assert not SEEN and "SPOILT" not in os.environ
    SEEN.append(1)
    os.environ["SPOILT"] = "1"
    with open(os.path.join(os.path.dirname(__file__), "processes"), "a") as file:
        file.write(f"{os.getppid()} {os.getpid()}\\n")

def test_fails():
    note()
    assert dist.get_rank() == 1

def test_leaves_a_collective_open():
    note()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)

@pytest.mark.distdiag(world_size=2, reuse="module", timeout=4)
def test_hangs():
    note()
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(600)

def test_is_killed():
    note()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_healthy():
    note()
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [2.0, 2.0]

MET = os.path.join(os.path.dirname(__file__), "met")
init_process_group = dist.init_process_group

def late(*args, **kwargs):
    init_process_group(*args, **kwargs)
    if dist.get_rank() == 0 and "all_have_met" in os.environ["PYTEST_CURRENT_TEST"]:
        time.sleep(0.5)
        open(MET, "a").close()

dist.init_process_group = late

def test_begins_when_all_have_met():
    note()
    assert os.path.exists(MET)
"""


def test_no_test_spoils_the_next_one_of_its_module_and_reports_are_kept(run, pytester):
    result = run(REUSE, "--distdiag-report-dir", "kept")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "FAILED*test_fails* - rank 0: *",
            "FAILED*test_leaves_a_collective_open* COL0*",
            "FAILED*test_hangs* - ranks 0-1 of 2 had not ended*",
            "FAILED*test_is_killed* - rank 1: killed by*",
        ]
    )
    # All were forked from one process, and each was a process of its own.
    lines = (pytester.path / "processes").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 12
    assert len({line.split()[0] for line in lines}) == 1
    kept = {path.name: path for path in (pytester.path / "kept").iterdir()}
    names = ("fails", "hangs", "is_killed", "leaves_a_collective_open")
    assert sorted(kept) == [f"test_ranks.py--test_{name}[world2]" for name in names]
    fails = kept["test_ranks.py--test_fails[world2]"]
    assert [f.code for f in read_report(fails).findings] == ["HNG001"]
    assert "assert 0 == 1" in (fails / "failure.txt").read_text()
    assert "HNG001" in (fails / "report.txt").read_text()
    assert (fails / "rank-1.log").exists()


@pytest.mark.slow
def test_ranks_are_forked_from_another_process_when_the_first_is_gone(run):
    result = run("""
pytestmark = pytest.mark.distdiag(world_size=2, reuse="module")

def test_loses_its_parent():
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def test_healthy():
    dist.barrier()
""")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ranks 0-1: killed by SIGKILL*"])
