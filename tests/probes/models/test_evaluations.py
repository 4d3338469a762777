"""What of a wrapped model counts as an evaluation, and what as training."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.data import ModelFed
from distdiag.events.models import ModelState, Moment
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp, network, train

pytestmark = pytest.mark.usefixtures("fake_group")


def evaluations(observed: Observed) -> list[int]:
    """The steps after which statistics were looked at."""
    states = observed.events(ModelState)
    return [state.step for state in states if state.moment is Moment.EVALUATION]


def trained(observed: Observed) -> DistributedDataParallel:
    observed.install()
    model = ddp(network())
    train(model, 2)
    return model


def num_fed(observed: Observed) -> int:
    """How many passes of training were seen that were given inputs."""
    for probe in observed.probes:
        probe.flush()
    return len(observed.events(ModelFed))


def test_an_evaluation_is_looked_at(observed: Observed) -> None:
    model = trained(observed)
    assert evaluations(observed) == []
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 2))
    assert evaluations(observed) == [2]


def test_what_trains_inside_a_wrapper_in_the_mode_of_an_evaluation(observed: Observed) -> None:
    model = trained(observed)
    before = num_fed(observed)
    model.eval()
    model.module.train()
    train(model, 2)
    assert evaluations(observed) == []
    assert num_fed(observed) == before + 2


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_what_looks_for_samples_to_train_on_is_no_evaluation(observed: Observed) -> None:
    observed.install()
    model = ddp(network(), broadcast_buffers=False)
    train(model, 2)
    model.eval()
    model.module(torch.randn(4, 2).requires_grad_())
    model.module(torch.randn(4, 2))
    assert evaluations(observed) == []
    model.train()
    train(model, 1)
    model.eval()
    model.module(torch.randn(4, 2))
    assert evaluations(observed) == [3]
