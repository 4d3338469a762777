"""Contexts that want to hang, crash or run something."""

import json
import os
from pathlib import Path

import pytest

from distdiag.diagnosis.context import read_context
from distdiag.diagnosis.diagnose import diagnose
from distdiag.events.errors import UsageError
from tests.diagnosis.curves import falling, log
from tests.diagnosis.running import diagnosed


def artifacts(**given: object) -> dict[str, object]:
    return {"artifacts": given, "symptoms": ["the loss is stuck"]}


def test_code_is_never_run(tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\nraise SystemExit(3)\n"
    (tmp_path / "train.py").write_text(code)

    diagnosis = diagnosed(tmp_path, artifacts(model_code="train.py", config="train.py"))

    assert not mark.exists()
    assert [each.used for each in diagnosis.analysis_artifacts] == [("code",), ("text",)]


def test_files_that_would_keep_a_reader_waiting_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.log")
    paths = ["pipe.log", "/dev/zero", "/proc/kmsg", "/dev/tty", "nothing.log", "bad\x00name.log"]

    diagnosis = diagnosed(tmp_path, artifacts(training_logs=paths, model_code="/dev/stdin"))

    assert diagnosis.status == "insufficient"
    problems = [each.problem for each in diagnosis.analysis_artifacts]
    assert sum("not a regular file" in each for each in problems) >= 4
    assert "nothing.log: no such file or folder" in problems


def test_a_folder_with_a_loop_of_links_ends(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "again").symlink_to(logs)
    (logs / "train.log").write_text(log({"step": list(range(100)), "loss": falling(100)}))

    diagnosis = diagnosed(tmp_path, {"artifacts": {"training_logs": "logs"}})

    assert [each.source for each in diagnosis.analysis_artifacts] == ["logs/train.log"]
    assert diagnosis.analysis_artifacts[0].used == ("curves", "text")


@pytest.mark.parametrize(
    "code",
    [
        "(" * 5_000 + ")" * 5_000,
        "-" * 100_000 + "1",
        "x = " + "f(" * 80 + ")" * 80,
        "x" + ".y" * 20_000,
        "if x:\n pass\n" + "elif x:\n pass\n" * 3_000,
        "def f(:\n",
        "\x00\x01",
        "é" * 1_000_000,
        "a = 1\n" * 500_000,
    ],
    ids=["parentheses", "signs", "calls", "attributes", "elif", "syntax", "nul", "wide", "long"],
)
def test_hostile_code_is_survived(code, tmp_path):
    (tmp_path / "train.py").write_text(code)

    diagnosis = diagnosed(tmp_path, artifacts(model_code="train.py", loss_curves=falling(50)))

    assert diagnosis.root_causes == ()


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10_000_000,
        "lr" * 2_000_000,
        ("x " * 2_000 + "\n") * 50,
        "lr: " + "9" * 100_000,
        "--lr=" * 100_000,
        "\ufeff\r\n\r\r\n\x1b[31m\x00",
        "the the the " * 100_000,
        '"' * 1_000_000,
    ],
    ids=["word", "key", "words", "digits", "flags", "signs", "repeats", "quotes"],
)
def test_hostile_text_takes_bounded_time(text, tmp_path):
    (tmp_path / "text.log").write_text(text)
    given = artifacts(training_logs="text.log", config="text.log", error_messages="text.log")
    context = given | {"constraints": {"max_analysis_time": 60}}

    diagnosis = diagnosed(tmp_path, context)

    assert not any("time was up" in each for each in diagnosis.left_out)


@pytest.mark.parametrize(
    "curves",
    [
        [[[[[1]]]]],
        {"loss": {"loss": {"loss": {"loss": [1, 2]}}}},
        {"loss": ["x", "y"], "val": []},
        [1, None, "nan", 2],
        [1.0, float("nan"), 1.0],
        {"loss": [10**400, 1]},
        [{"step": "a", "loss": 1}, {"loss": "b"}, {}],
        True,
        {"": []},
    ],
    ids=str,
)
def test_odd_curves_are_no_crash(curves, tmp_path):
    path = tmp_path / "context.json"
    path.write_text(json.dumps(artifacts(loss_curves=curves)))

    assert diagnose(read_context(path)).root_causes == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a JSON document"),
        ("[1, 2]", "a context is a JSON object"),
        ("[" * 100_000, "not a JSON document"),
        ('{"a": 1', "not a JSON document"),
        ("\xff\xfe", "not a JSON document"),
    ],
)
def test_what_is_no_context_is_one_clear_error(text, problem, tmp_path):
    path = tmp_path / "context.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(UsageError, match=problem):
        read_context(path)


def test_a_context_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "context.json")

    with pytest.raises(UsageError, match="not a regular file"):
        read_context(tmp_path / "context.json")


def test_the_time_is_kept_and_what_is_left_out_is_said(tmp_path):
    many = "".join(f"step: {n}, loss: {2 + 1 / (n + 1)}\n" for n in range(400_000))
    (tmp_path / "train.log").write_text(many)
    context = artifacts(training_logs="train.log") | {"constraints": {"max_analysis_time": 0.05}}

    diagnosis = diagnosed(tmp_path, context)

    assert diagnosis.root_causes == ()
    assert any("the time was up" in each for each in diagnosis.left_out)


def test_nothing_that_is_given_is_changed(tmp_path):
    (tmp_path / "train.log").write_text(log({"step": list(range(50)), "loss": falling(50)}))
    (tmp_path / "train.py").write_text("import torch\n")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(tmp_path)}

    diagnosed(tmp_path, artifacts(training_logs="train.log", model_code="train.py"))

    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in before} == before
    assert {path.name for path in files(tmp_path)} == {"train.log", "train.py", "context.json"}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
