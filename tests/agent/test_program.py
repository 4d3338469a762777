"""What runs as ``__main__`` is what Python itself would run, and sees what it would see."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distdiag.agent.program import find_script
from distdiag.events.errors import UsageError

REPOSITORY = Path(__file__).parents[2]

# Rank 1 starts no monitor and waits for no verdict: each run takes only what Python takes.
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

TELL = """
import sys
import sibling
spec = __spec__ and (__spec__.name, __spec__.origin, __spec__.cached)
print(__file__, sys.argv, sys.path[0], sibling.__file__)
print(__name__, spec, repr(__package__), type(__loader__).__name__, __cached__)
raise ValueError("the end")
"""


def python(folder, *arguments):
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | RANK_1 | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    # Python starts folders and zip files by a module of its own; the tool shows no such frames.
    return done.stdout, re.sub(r' *File "<frozen runpy>".*\n', "", done.stderr), done.returncode


@pytest.fixture
def project(tmp_path):
    """Make a folder of links, copies and an application, where ``link/..`` is not this folder."""
    elsewhere, work = tmp_path / "elsewhere", tmp_path / "here"
    for folder in (elsewhere, elsewhere / "sub", work, work / "app"):
        folder.mkdir(parents=True)
        (folder / "sibling.py").touch()
    (elsewhere / "train.py").write_text(TELL)
    (work / "train.py").write_text("# Another one.\n" + TELL)
    (work / "app" / "__main__.py").write_text(TELL)
    (work / "link").symlink_to(elsewhere / "sub")
    (work / "folder").symlink_to(elsewhere)
    (work / "linked.py").symlink_to(elsewhere / "train.py")
    (work / "again.py").symlink_to("linked.py")
    with zipfile.ZipFile(work / "app.zip", "w") as archive:
        archive.writestr("__main__.py", TELL)
        archive.writestr("sibling.py", "")
    return work


@pytest.mark.parametrize(
    "script",
    [
        "train.py",
        "./train.py",
        ".//./train.py",
        "link/../train.py",
        "folder/train.py",
        "folder/../here/train.py",
        "linked.py",
        "again.py",
        "app",
        "app/",
        "app.zip",
        "{}/link/../train.py",
    ],
)
def test_a_script_is_found_and_sees_itself_as_under_python(project, script):
    script = script.format(project)
    expected = python(project, script, "--lr", "1")
    assert "ValueError: the end" in expected[1]
    options = ("-m", "distdiag.check", "--run-dir", "run")
    assert python(project, *options, script, "--lr", "1") == expected


def test_a_folder_comes_first_on_a_safe_path_too(project):
    expected = python(project, "-P", "app")
    assert "ValueError: the end" in expected[1]
    assert python(project, "-P", "-m", "distdiag.check", "--run-dir", "run", "app") == expected


def test_a_compiled_script_runs(project):
    python(project, "-c", "import py_compile; py_compile.compile('train.py', 'train.pyc')")
    expected = python(project, "train.pyc")
    assert "ValueError: the end" in expected[1]
    assert python(project, "-m", "distdiag.check", "--run-dir", "run", "train.pyc") == expected


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("-", "stdin"),
        ("gone.py", "does not exist"),
        ("train.py/", "does not exist"),
        ("link", "without a __main__.py"),
        ("pipe", "is not a file"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(project, monkeypatch, script, problem):
    monkeypatch.chdir(project)
    os.mkfifo("pipe")
    with pytest.raises(UsageError, match=problem):
        find_script(script, ())
