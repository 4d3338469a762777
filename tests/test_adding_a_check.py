"""docs/adding-a-check.md, followed word for word in a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.reports import read_report

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding-a-check.md").read_text()
FILES = dict(re.findall(r"^`(distdiag/\S+\.py)`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S))
ON_A_VIEW = ("distdiag/checks/shd/many_parameters.py",)
NEW_FACT = tuple(path for path in FILES if path not in ON_A_VIEW)
PROGRAM = re.search(r"^```python\n(# train\.py\n.*?)^```", PAGE, re.M | re.S)[1]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the package, which the ranks import instead of this one."""
    shutil.copytree(
        ROOT / "distdiag",
        tmp_path / "copy" / "distdiag",
        ignore=shutil.ignore_patterns("*.pyc.*"),  # what is compiled now, under its first name
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "copy"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "copy"


def write(copy, paths):
    for path in paths:
        (copy / path).parent.mkdir(exist_ok=True)
        assert not (copy / path).exists(), f"{path} is no new file"
        (copy / path).write_text(FILES[path])


def distdiag(*arguments):
    command = [sys.executable, "-m", "distdiag.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def report_of(tmp_path, program, *options):
    (tmp_path / "train.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "distdiag.check", *options, "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    reports = list(tmp_path.glob("**/report.json"))
    assert reports, ended.stderr
    return read_report(reports[0])


def test_a_check_takes_one_file_and_a_new_fact_four():
    assert len(ON_A_VIEW) == 1 and set(ON_A_VIEW) <= FILES.keys()
    assert len(NEW_FACT) == 4


def test_the_files_are_formatted_and_linted_as_all_others(copy):
    write(copy, FILES)
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        pytest.skip("ruff is not installed")
    for command in (["check"], ["format", "--check"]):
        paths = [str(copy / path) for path in FILES]
        ended = subprocess.run(
            [ruff, *command, "--config", str(ROOT / "pyproject.toml"), *paths],
            capture_output=True,
            text=True,
            cwd=copy,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_check_on_a_view_is_listed_explained_and_finds_and_of_no_fact_is_said_so(copy, tmp_path):
    write(copy, ON_A_VIEW)
    assert "SHD901" in distdiag("list").stdout
    assert "foreach=True" in distdiag("explain", "SHD901").stdout
    write(copy, NEW_FACT)
    program = PROGRAM.replace(
        "torch.set_default_dtype(torch.float64 if dist.get_rank() == 0 else torch.float32)",
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()",
    )
    report = report_of(tmp_path, program, "--select", "SHD901,REP901")
    assert [finding.code for finding in report.findings] == ["SHD901"]
    assert report.findings[0].why.startswith("Each step of the optimizer starts one kernel")
    assert report.not_checked["REP901"] == "no default dtype was set"


def test_a_new_fact_is_observed_aligned_and_judged(copy, tmp_path):
    write(copy, NEW_FACT)
    report = report_of(tmp_path, PROGRAM, "--select", "REP901")
    (finding,) = report.findings
    assert (finding.code, finding.ranks, finding.location.line) == ("REP901", {0}, 6)
    assert finding.message == "the default dtype is float64 on rank 0 and float32 on rank 1"
    assert "REP901" not in report.not_checked


def test_checks_of_another_package_are_loaded_and_judge(tmp_path, monkeypatch):
    package = tmp_path / "site" / "mypackage"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    body = FILES[ON_A_VIEW[0]].replace("SHD901", "XXX901")
    (package / "many_parameters.py").write_text(body)
    info = tmp_path / "site" / "mypackage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    declared = re.search(r"^many-parameters = \"(\S+)\"", PAGE, re.M)[1]
    (info / "entry_points.txt").write_text(f"[distdiag.checks]\nmany-parameters = {declared}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    monkeypatch.chdir(tmp_path)
    assert "XXX901" in distdiag("list").stdout
    assert "foreach=True" in distdiag("explain", "XXX901").stdout
