"""The examples of docs/diagnose.md."""

import json

import pytest

from tests.diagnosis.curves import diverging, exploding, falling, log
from tests.diagnosis.running import causes, diagnosed
from tests.diagnosis.scripts import line_of
from tests.diagnosis.sick_runs import GRPO, VARIANCE

EPOCH = 250


def test_divergence_after_an_epoch_names_the_step_of_the_gradient_spike(tmp_path):
    text = log(diverging(num=400, at=EPOCH + 3))
    (tmp_path / "train.log").write_text(text)
    context = {
        "artifacts": {"training_logs": ["train.log"]},
        "symptoms": ["training diverges after the first epoch"],
        "constraints": {"max_analysis_time": "2 minutes"},
    }

    diagnosis = diagnosed(tmp_path, context)

    assert list(causes(diagnosis)) == ["divergence"]
    cause = diagnosis.root_causes[0]
    assert f"spiked to 87.5 at step {EPOCH + 3}" in cause.issue
    spike = next(each for each in cause.evidence if each.value == "87.5")
    assert (spike.source, spike.line) == ("train.log", line_of(text, "grad_norm: 87.5"))
    assert spike.quote == text.split("\n")[spike.line - 1]
    assert cause.confidence == pytest.approx(0.76)  # the run shows it, the symptoms say it
    assert "clip" in cause.fix
    assert {each.artifact for each in diagnosis.missing_artifacts} == {"model_code", "config"}


def test_one_token_with_79_percent_of_the_parameters_in_the_embedding(tmp_path):
    # 50257 * 288 = 14.47 million; 4 layers of 4 * 288 ** 2 + 2 * 288 * 1094 = 3.85 million
    config = {"vocab_size": 50257, "hidden_size": 288, "num_layers": 4, "intermediate_size": 1094}
    config |= {"tie_word_embeddings": True}
    (tmp_path / "model.json").write_text(json.dumps(config, indent=2))
    context = {
        "artifacts": {"config": "model.json", "loss_curves": falling(300, start=10.8, end=6.9)},
        "symptoms": ["the output has collapsed to one token"],
    }

    diagnosis = diagnosed(tmp_path, context)

    assert list(causes(diagnosis)) == ["parameters-in-the-embedding"]
    cause = diagnosis.root_causes[0]
    assert cause.issue.startswith("79% of the parameters (14.5 of 18.3 million) are in the emb")
    vocabulary = next(each for each in cause.evidence if each.value == 50257)
    assert (vocabulary.artifact, vocabulary.source, vocabulary.line) == ("config", "model.json", 2)
    assert cause.confidence == pytest.approx(0.52)
    assert "smaller vocabulary" in cause.fix


def test_a_variance_of_one_value_has_its_line_and_its_reason(tmp_path):
    context = {
        "artifacts": {
            "error_messages": VARIANCE,
            "model_code": {"grpo.py": GRPO},
            "config": "num_generations: 1\n",
        },
        "symptoms": [],
    }

    diagnosis = diagnosed(tmp_path, context)

    assert list(causes(diagnosis)) == ["variance-of-one-value"]
    cause = diagnosis.root_causes[0]
    assert "a group holds one sample (num_generations is 1)" in cause.issue
    line = next(each for each in cause.evidence if each.artifact == "model_code")
    assert (line.source, line.line) == ("grpo.py", 14)
    assert line.quote == "std = rewards.view(-1, group).std(dim=1)"
    assert cause.confidence == pytest.approx(0.95)
    assert diagnosis.quick_fixes == ("use at least two samples, or std(correction=0) + eps",)


def test_exploding_gradients(tmp_path):
    context = {"artifacts": {"training_logs": log(exploding())}, "symptoms": ["loss is NaN"]}

    diagnosis = diagnosed(tmp_path, context)

    assert list(causes(diagnosis)) == ["gradient-explosion"]
    cause = diagnosis.root_causes[0]
    assert "step 61" in cause.issue
    assert any("loss: nan" in each.quote for each in cause.evidence)
    assert diagnosis.quick_fixes == ("clip gradients at 1.0",)


@pytest.mark.parametrize(
    ("artifacts", "wanted"),
    [
        ({}, ["training_logs", "loss_curves", "model_code", "error_messages", "config"]),
        (
            {"model_code": "model = 1\n"},
            ["training_logs", "loss_curves", "error_messages", "config"],
        ),
        (
            {"training_logs": "gone.log"},
            ["training_logs", "loss_curves", "model_code", "error_messages", "config"],
        ),
    ],
)
def test_missing_artifacts_are_asked_for(artifacts, wanted, tmp_path):
    context = {"artifacts": artifacts, "symptoms": ["the loss does not go down"]}

    diagnosis = diagnosed(tmp_path, context)

    assert diagnosis.status == "insufficient"
    assert diagnosis.root_causes == ()
    assert [each.artifact for each in diagnosis.missing_artifacts] == wanted
    assert all(each.why for each in diagnosis.missing_artifacts)
