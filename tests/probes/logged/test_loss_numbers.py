from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.logged import CodesChosen, LossNumbers, LossTerm, MemoryUse
from distdiag.probes.logged import PROBES
from tests.probes.conftest import Observed

VOCAB = 8


@pytest.fixture(autouse=True)
def installed(observed: Observed) -> Iterator[None]:
    observed.install("steps")
    for spec in PROBES[:5]:
        for probe in spec.make(observed.wiring):
            probe.install()
            observed.probes.append(probe)
    torch.manual_seed(0)
    yield
    assert not observed.events(ProbeDisabled)


def train(loss_of, model: nn.Module, steps: int = 1) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def terms(observed: Observed, loss_of, **values) -> tuple[LossTerm, ...]:  # type: ignore[no-untyped-def]
    train(loss_of, nn.Linear(3, VOCAB))
    (event,) = observed.events(LossNumbers)
    return event.terms


INPUTS = torch.linspace(-1, 1, 18).reshape(6, 3)
LABELS = torch.tensor([0, 1, 2, 3, 4, 5])


def cross_entropy(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(INPUTS), LABELS)


class TestTerms:
    def test_each_addend_has_its_factor_and_its_gradient(self, observed: Observed) -> None:
        found = terms(observed, lambda m: cross_entropy(m) + 0.5 * m(INPUTS).square().mean() / 4)
        assert [term.factor for term in found] == [1.0, 0.125]
        assert found[0].gradient == pytest.approx(1 / 6)
        assert found[1].gradient == pytest.approx(0.125 / 48)

    @pytest.mark.parametrize(
        "masked",
        [
            lambda x: (x * torch.zeros(6, VOCAB)).sum() / 3,
            lambda x: x.masked_fill(torch.ones(6, VOCAB, dtype=torch.bool), 0.0).mean(),
            lambda x: torch.where(torch.zeros(6, VOCAB, dtype=torch.bool), x, 0.0).sum(),
            lambda x: F.cross_entropy(x, LABELS * 0 - 100, reduction="sum") / 6,
        ],
    )
    def test_a_mask_of_nothing_leaves_no_gradient(self, observed: Observed, masked) -> None:  # type: ignore[no-untyped-def]
        found = terms(observed, lambda m: cross_entropy(m) + masked(m(INPUTS)))
        assert found[0].gradient > 0
        assert found[1].gradient == 0
        assert found[1].factor != 0

    def test_a_factor_of_zero_is_known(self, observed: Observed) -> None:
        found = terms(observed, lambda m: cross_entropy(m) + 0.0 * m(INPUTS).mean())
        assert found[1].factor == 0

    def test_a_hinge_that_is_satisfied_still_gets_a_gradient(self, observed: Observed) -> None:
        found = terms(observed, lambda m: (m(INPUTS) - 100).clamp(min=0).mean())
        assert found[0].gradient > 0

    def test_a_loss_that_is_checkpointed(self, observed: Observed) -> None:
        train(lambda m: checkpoint(cross_entropy, m, use_reentrant=False), nn.Linear(3, VOCAB))
        (event,) = observed.events(LossNumbers)
        assert math.isfinite(event.loss)


class TestPolicies:
    def passes(self, observed: Observed, *, steps: int = 2) -> list[LossNumbers]:
        policy = nn.Linear(3, VOCAB)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        for _ in range(2):
            with torch.no_grad():
                scores = policy(INPUTS).log_softmax(-1)
                actions = torch.multinomial(scores.exp(), 1)
                old = scores.gather(1, actions)
            for _ in range(steps):
                ratio = (policy(INPUTS).log_softmax(-1).gather(1, actions) - old).exp()
                gain = torch.linspace(-1, 1, 6).unsqueeze(1)
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return observed.events(LossNumbers)

    def test_the_ratio_is_known_and_the_first_after_samples(self, observed: Observed) -> None:
        ratios = [event.ratio for event in self.passes(observed) if event.ratio is not None]
        assert [ratio.has_sampled for ratio in ratios] == [True, False, True, False]
        assert [ratio.deviation < 1e-5 for ratio in ratios] == [True, False, True, False]
        assert all(ratio.gradient > 0 for ratio in ratios)

    @pytest.mark.parametrize(
        "loss",
        [
            lambda score, prior: ((prior - score).exp() - (prior - score) - 1).mean(),
            lambda score, prior: (score - 1.0).exp().mean(),
            lambda score, prior: (score.exp() * (score - prior)).sum(-1).mean(),
        ],
    )
    def test_other_exponentials_are_no_ratio(self, observed: Observed, loss) -> None:  # type: ignore[no-untyped-def]
        prior = torch.randn(6, VOCAB).log_softmax(-1)
        train(lambda m: loss(m(INPUTS).log_softmax(-1), prior), nn.Linear(3, VOCAB))
        (event,) = observed.events(LossNumbers)
        assert event.ratio is None


def test_what_logits_predict(observed: Observed) -> None:
    model = nn.Linear(3, VOCAB)
    train(cross_entropy, model)
    (event,) = observed.events(LossNumbers)
    found = event.prediction
    assert found is not None
    assert (found.num_classes, found.num_rows, found.targets) == (VOCAB, 6, tuple(range(6)))
    assert found.cross_entropy == pytest.approx(event.loss, rel=1e-5)
    assert 0 < found.entropy <= math.log(VOCAB)


def test_clamps_are_read_in_every_sixteenth_step(observed: Observed) -> None:
    train(
        lambda m: m(INPUTS).clamp(-0.01, 0.01).square().mean() + m.bias.sum(), nn.Linear(3, 4), 18
    )
    clamped = [event for event in observed.events(LossNumbers) if event.clamps]
    assert [event.step for event in clamped] == [16]
    (clamp,) = clamped[0].clamps
    assert (clamp.least, clamp.greatest, clamp.num_elements) == (-0.01, 0.01, 24)
    assert clamp.outside > 0.5


def test_sixty_four_steps_then_every_sixteenth(observed: Observed) -> None:
    train(cross_entropy, nn.Linear(3, VOCAB), 100)
    steps = [event.step for event in observed.events(LossNumbers)]
    assert steps == [*range(64), 64, 80, 96]
    assert [event.site.location is not None for event in observed.events(LossNumbers)][:2] == [
        True,
        False,
    ]
    assert {event.step % 8 for event in observed.events(MemoryUse)} == {0}


def test_the_run_is_the_same_to_the_last_bit(observed: Observed) -> None:
    def weights() -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Linear(3, VOCAB)
        train(lambda m: cross_entropy(m) + (m(INPUTS) * torch.rand(6, VOCAB)).mean(), model, 5)
        return torch.cat([model.weight.detach().flatten(), torch.rand(1)])

    watched = weights()
    observed.uninstall()
    assert torch.equal(watched, weights())


@pytest.mark.parametrize("choose", [torch.argmin, lambda distances, dim: distances.argmin(dim)])
def test_codes_that_are_chosen_are_counted_for_a_codebook(observed: Observed, choose) -> None:  # type: ignore[no-untyped-def]
    codes = nn.Embedding(16, 3)

    def quantized(model: nn.Module) -> torch.Tensor:
        hidden = model(torch.randn(32, 3))
        code = codes(choose(torch.cdist(hidden, codes.weight), 1))
        assert choose(torch.randn(32, 16, 5), 2).shape == (32, 16)
        return F.mse_loss(hidden, code.detach())

    train(quantized, nn.Linear(3, 3), 40)
    (event, *_) = observed.events(CodesChosen)
    assert (event.codebook, event.num_codes, event.num_choices) == ("weight", 16, 256)
    assert 1 <= event.num_used <= 16
    assert event.site.location is not None and event.site.location.file == __file__
