import json

import pytest

from distdiag.diagnosis.documents import Document
from distdiag.diagnosis.files import Piece
from distdiag.diagnosis.program import read_program
from distdiag.diagnosis.settings import Settings


def document(text, path, artifact="config"):
    return Document(artifact, path.name, path, (Piece(1, tuple(text.split("\n"))),))


def settings(tmp_path, text, name):
    return Settings([document(text, tmp_path / name)], [])


YAML = """\
# learning_rate: 9
model:
  hidden_size: 512   # dim: 3
  num_layers: 6
optimizer:
  type: AdamW
  params:
    lr: 3e-4
train: {batch_size: 32, fp16: true}
"""
TOML = '[optimizer]\nname = "AdamW"\nlr = 0.0003\n[training]\nlocal_batch_size = 32\nfp16 = true\n'
FLAGS = "torchrun --nproc-per-node 8 train.py --lr=3e-4 --batch-size 32 --fp16=true --seed 1"
NAMESPACE = "Namespace(lr=0.0003, batch_size=32, fp16=True, weight_decay=0.1)"


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [(YAML, "c.yaml", 8), (TOML, "c.toml", 3), (FLAGS, "run.sh", 1), (NAMESPACE, "c.log", 1)],
)
def test_values_are_read_with_their_lines(text, name, line, tmp_path):
    found = settings(tmp_path, text, name)

    (rate,) = found.of("lr")
    assert rate.number == pytest.approx(3e-4)
    assert (rate.evidence.source, rate.evidence.line) == (name, line)
    assert found.only_number("batch_size").number == 32
    assert found.is_on("fp16") is not None


def test_json_is_read_with_what_holds_a_value(tmp_path):
    text = json.dumps({"a": {"lr": 0.1}, "b": [{"lr": 0.2}], "c": {"warmup_steps": None}}, indent=1)

    found = settings(tmp_path, text, "c.json")

    assert [(each.value, each.inside, each.evidence.line) for each in found.of("lr")] == [
        (0.1, ("a",), 3),
        (0.2, ("b",), 7),
    ]
    assert found.only_number("lr") is None
    assert found.smallest("lr").number == 0.1
    assert found.of("warmup") == []


def test_sentences_set_nothing(tmp_path):
    text = "the lr 3 times\nthis dim light is half precision\nwarmup and clip it\n"

    assert settings(tmp_path, text, "notes.txt").config == []


CODE = """
from dataclasses import dataclass

parser.add_argument("--lr", "--learning-rate", type=float, default=1e-3)
BATCH_SIZE = 8
model = GPT(vocab_size=50257, n_embd=768)


@dataclass
class Config:
    n_layer: int = 12
    dropout: float = compute()


args = dict(max_grad_norm=1.0, **{"warmup_steps": 100})
"""


def test_code_sets_values_and_the_configuration_goes_before_it(tmp_path):
    code = document(CODE, tmp_path / "train.py", "model_code")
    program = read_program([code])
    modules = [(each.document, each.module) for each in program.codes]

    alone = Settings([], modules)
    beside = Settings([document("lr: 0.5", tmp_path / "c.yaml")], modules)

    values = {role: alone.only_number(role).number for role in ("lr", "batch_size", "vocab")}
    assert values == {"lr": 1e-3, "batch_size": 8, "vocab": 50257}
    assert alone.only_number("hidden").evidence.line == 6
    assert alone.only_number("layers").number == 12
    assert alone.only_number("clip").number == 1.0
    assert alone.only_number("warmup").number == 100
    assert [each.value for each in beside.of("lr")] == [0.5]
