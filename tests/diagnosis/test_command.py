import json

import pytest

from distdiag.cli import main
from distdiag.diagnosis.context import read_context
from tests.diagnosis.curves import falling
from tests.diagnosis.sick_runs import OOM


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *map(str, arguments)])
    return ended.value.code


def written(folder, **context):
    path = folder / "context.json"
    path.write_text(json.dumps(context))
    return path


def test_the_answer_has_the_documented_fields(tmp_path, capsys):
    (tmp_path / "train.log").write_text(OOM)

    status = run(written(tmp_path, artifacts={"training_logs": "train.log"}, symptoms=["it died"]))

    answer = json.loads(capsys.readouterr().out)
    assert status == 1
    assert answer["status"] == "diagnosed"
    (cause,) = answer["root_causes"]
    assert cause["id"] == "cuda-out-of-memory"
    assert cause["evidence"][0] == {
        "artifact": "training_logs",
        "source": "train.log",
        "line": 8,
        "quote": " ".join(OOM.strip().split("\n")[-1].split()),
        "value": None,
    }
    assert {"issue", "severity", "fix", "confidence", "reason"} <= cause.keys()
    assert {"quick_fixes", "missing_artifacts", "analysis_artifacts", "possible"} <= answer.keys()


@pytest.mark.parametrize("name", ["markdown", "terminal"])
def test_other_formats_say_the_same_and_steer_no_terminal(name, tmp_path, capsys):
    (tmp_path / "x.log").write_text(OOM.replace("GPU 0", "GPU \x1b[31m<b>0`"))
    constraints = {"output_format": name}

    run(written(tmp_path, artifacts={"training_logs": "x.log"}, constraints=constraints))

    text = capsys.readouterr().out
    assert "x.log:8" in text.replace("\\", "")
    assert "CUDA out of memory" in text
    assert "\x1b" not in text
    assert "training_logs" in text.replace("\\", "")


def test_output_goes_to_a_file_and_the_format_of_the_command_goes_first(tmp_path, capsys):
    target = tmp_path / "answer.md"
    context = written(tmp_path, artifacts={"loss_curves": falling(), "model_code": "x = 1\n"})

    status = run(context, "--output", target, "--format", "markdown")

    assert status == 0
    assert target.read_text().startswith("# Diagnosis: inconclusive")
    assert capsys.readouterr().out.startswith("inconclusive: nothing wrong was found")


def test_unknown_keys_are_one_warning_each(tmp_path, capsys):
    status = run(
        written(
            tmp_path,
            artifacts={"traning_logs": "x.log"},
            notes="hello",
            constraints={"max_analysis_time": "soon", "output_format": "pdf"},
        )
    )

    answer = json.loads(capsys.readouterr().out)
    assert status == 3
    assert answer["status"] == "insufficient"
    assert len(answer["warnings"]) == 4
    assert "`artifacts.traning_logs` is not known" in " ".join(answer["warnings"])


def test_a_context_that_is_not_there_is_wrong_usage(tmp_path, capsys):
    assert run(tmp_path / "no.json") == 2
    assert "cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5 minutes", 300), (12, 12), ("90s", 90), ("1.5 h", 5400), ("2min", 120), ("7", 7)],
)
def test_times(text, seconds, tmp_path):
    context = read_context(written(tmp_path, constraints={"max_analysis_time": text}))

    assert context.limit_s == seconds
    assert context.warnings == ()
