import os
from pathlib import Path

import pytest

from distdiag.config.selection import Selection
from distdiag.events.errors import UsageError
from distdiag.lint.linting import lint_files
from tests.effort import is_linear

SICK = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier()\n"
ALL = Selection()


def test_folders_are_searched_and_files_are_taken_as_they_are_called(tmp_path):
    for name in ("a.py", "sub/b.py", "sub/c.txt", ".hidden/d.py", "__pycache__/e.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SICK)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "env" / "f.py").write_text(SICK)
    result = lint_files([tmp_path, tmp_path / "sub" / "c.txt", tmp_path / "a.py"], ALL)
    assert [Path(found.path).name for found in result.findings] == ["a.py", "b.py", "c.txt"]
    assert result.num_files == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"if rank == 0:\n", "not valid Python: "),
        (b"rank = '\0'\n", "not valid Python: "),
        (b"rank" + b"#" * 2_000_000, "larger than 2000000 bytes"),
        (b"rank = " + b"(" * 300 + b")" * 300, "not valid Python: too many nested"),
        (b"rank = " + b"-" * 100_000 + b"1", ": "),
    ],
)
def test_a_damaged_file_is_reported_and_the_others_are_looked_at(tmp_path, content, problem):
    (tmp_path / "bad.py").write_bytes(content)
    (tmp_path / "sick.py").write_text(SICK)
    result = lint_files([tmp_path], ALL)
    assert len(result.findings) == 1
    ((path, reported),) = result.not_checked.items()
    assert path == str(tmp_path / "bad.py")
    assert reported.startswith(f"{path}:")
    assert problem in reported


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert (
        "not a regular file" in lint_files([tmp_path], ALL).not_checked[str(tmp_path / "pipe.py")]
    )


def test_bytes_that_are_no_utf_8_are_no_obstacle(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" + SICK.encode())
    assert [found.line for found in lint_files([tmp_path], ALL).findings] == [4]


def test_what_does_not_exist_is_a_mistake_of_usage(tmp_path):
    with pytest.raises(UsageError, match="gone: no such file"):
        lint_files([tmp_path / "gone"], ALL)


def test_an_unknown_code_is_a_mistake_of_usage(tmp_path):
    with pytest.raises(UsageError, match="unknown code"):
        lint_files([tmp_path], Selection(select=("XYZ",)))


def test_rules_can_be_left_out(tmp_path):
    (tmp_path / "sick.py").write_text(SICK)
    assert lint_files([tmp_path], Selection(ignore=("COL",))).findings == ()
    assert len(lint_files([tmp_path], Selection(select=("COL009",))).findings) == 1


def test_names_that_double_one_another_cost_no_time(tmp_path):
    names = "\n".join(f"x{n} = x{n + 1} + x{n + 1}" for n in range(200))
    (tmp_path / "doubling.py").write_text(f"x200 = rank\n{names}\n{SICK.replace('rank', 'x0')}")
    assert lint_files([tmp_path], ALL).findings == ()


@pytest.mark.parametrize(
    "repeated",
    [
        "if rank == 0:\n    dist.barrier()\n",
        "if rank == 0:\n    dist.barrier()\nelse:\n    dist.all_reduce(x)\n",
    ],
)
def test_what_it_takes_grows_as_the_source_does(tmp_path, repeated):
    def lint(times):
        path = tmp_path / f"{times}.py"
        path.write_text("import torch\nimport torch.distributed as dist\n" + repeated * times)
        assert len(lint_files([path], ALL).findings) >= times

    assert is_linear(lint, 40)
