"""What the source of a program tells of the factor of its loss."""

import pytest

from distdiag.checks.par.loss_counts_model_ranks import is_number_of_ranks
from distdiag.events.base import Frame

COUNTS = [
    "loss = loss * dist.get_world_size()",
    "loss *= self.num_processes",
    "loss = total / count * int(os.environ['WORLD_SIZE'])",
    "n = dist.get_world_size(group)\nloss = n * loss",
    "(loss * mesh['dp'].size()).backward()",
    "loss = loss.mul(cp_size)",
    "loss = output.mean() * (args.world_size // args.tp_size)",
]
OTHERS = [
    "loss = 2 * loss",
    "loss = loss * weight",
    "loss = loss * self.config.ce_weight",
    "loss = loss * labels.size(0)",
    "loss = loss * accumulation_steps",
    "loss = loss / dist.get_world_size()",
    "rate = rate * dist.get_world_size()",
    "loss = 2 * loss\nlogged = loss * world_size",
    "loss = (",
]


def reported(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    return is_number_of_ranks([Frame(str(path), 1, "main")], 2.0)


@pytest.mark.parametrize("text", COUNTS)
def test_a_count_of_ranks_is_seen(text, tmp_path):
    assert reported(tmp_path, text)


@pytest.mark.parametrize("text", OTHERS)
def test_other_factors_count_nothing(text, tmp_path):
    assert not reported(tmp_path, text)


def test_what_a_file_imports_from_beside_it_is_read(tmp_path):
    (tmp_path / "losses.py").write_text("def of(loss):\n    return loss * world_size\n")
    assert reported(tmp_path, "from losses import of\n")


def test_torch_is_not_read(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    assert not reported(folder, "loss = loss * world_size")
