import pytest

from distdiag.checks.moe.aux_loss_scale import coefficients_in
from distdiag.events.base import Frame


def found(path, text):
    path.write_text(text)
    return coefficients_in([Frame(str(path), 1, "main")])


@pytest.mark.parametrize(
    "text",
    [
        "AUX_COEF = 0.01",
        "steps, balance = 10, 0.01",
        "router_aux_loss_coef: float = 0.01",
        'parser.add_argument("--aux-loss-coef", type=float, default=0.01)',
        "model = Model(aux_alpha=0.01)",
        'config = {"router_aux_loss_coef": 0.01}',
        "def main(coef=0.01): pass",
        "def main(*, coef=0.01): pass",
        "loss = loss + 0.01 * out.aux_loss",
        "loss += balance * 0.01",
        "Model(aux_loss_coef=0.01 / world)",
    ],
)
def test_a_coefficient_is_named_by_the_source(text, tmp_path):
    assert found(tmp_path / "train.py", text) == {0.01}


@pytest.mark.parametrize(
    "text",
    [
        "AdamW(model.parameters(), lr=0.01, weight_decay=0.01)",
        "dropout = 0.01",
        "router_jitter_noise = 0.01",
        "loss = 0.01 * entropy",
        "aux_loss_coef = 1",
        "not python",
    ],
)
def test_other_numbers_are_none(text, tmp_path):
    assert found(tmp_path / "train.py", text) == set()
