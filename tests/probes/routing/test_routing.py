from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.routing import Choice, CounterWritten, Routing
from distdiag.probes.routing.probe import RoutingProbe
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


class Layer(nn.Module):
    """Four experts; the two best ones get each token."""

    def __init__(self, jitter_noise: float = 0.0) -> None:
        super().__init__()
        self.jitter_noise = jitter_noise
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * weights.unsqueeze(-1)).sum(1)


class Best(Layer):
    """The best expert gets each token, by `max`."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.gate(tokens).amax()
        weights, _ = self.gate(tokens).max(dim=-1)
        return torch.stack([e(tokens) for e in self.experts], 1)[:, 0] * weights[:, None]


class Failing(Layer):
    def forward(self, tokens: Tensor) -> Tensor:
        raise ValueError("of the user's own")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.layer, tokens, use_reentrant=False)


def tokens() -> Tensor:
    return torch.randn(32, 4, requires_grad=True)


def train(model: nn.Module, num_steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        model(tokens()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reported(observed: Observed) -> list[Routing]:
    for probe in observed.probes:
        probe.flush()
    assert not observed.events(ProbeDisabled)
    return observed.events(Routing)


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_choice_of_experts_is_reported_with_its_load(observed: Observed) -> None:
    observed.install("steps", "routing")
    train(ddp(nn.Sequential(Layer())))
    (event,) = reported(observed)
    assert (event.model, event.layer, event.step) == ("Sequential", "0", 0)
    assert event.members == (0, 1)
    assert event.choice == Choice("topk", 32, 4, 2, "float32")
    assert not event.is_recompute
    assert not event.is_random
    assert event.given
    assert event.scores
    assert event.chosen
    assert event.tie_share == 0.0
    assert event.load is not None
    assert 1.0 <= event.load.peak <= 2.0
    assert event.site.location is not None
    assert event.site.location.function == "forward"


def test_a_choice_without_top_k_is_reported_if_it_is_among_all_experts(observed: Observed) -> None:
    observed.install("steps", "routing")
    train(ddp(nn.Sequential(Best())))
    assert [(e.choice.api, e.choice.k) for e in reported(observed)] == [("max", 1)]


def test_a_repeated_pass_is_reported_apart_and_chooses_alike(observed: Observed) -> None:
    observed.install("steps", "routing")
    train(ddp(Checkpointed()))
    first, again = reported(observed)
    assert (first.is_recompute, again.is_recompute) == (False, True)
    assert (first.given, first.scores, first.chosen) == (again.given, again.scores, again.chosen)


def test_gates_that_are_to_draw_or_do_so_are_known(observed: Observed) -> None:
    class Drawing(Layer):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens + torch.randn_like(tokens))

    observed.install("steps", "routing")
    train(ddp(nn.Sequential(Layer(), Drawing(), Layer(jitter_noise=0.1))))
    assert [event.is_random for event in reported(observed)] == [False, True, True]


def test_options_to_drop_at_random_say_nothing_of_choices_before_the_draw(
    observed: Observed,
) -> None:
    class TopKGate(nn.Module):
        """Chooses a second expert at random, if there is to be one, after the first."""

        def __init__(self, k: int) -> None:
            super().__init__()
            self.wg = nn.Linear(4, 4)
            self.k, self.random_seed = k, 7
            self.use_rts = self.top2_2nd_expert_sampling = True

        def forward(self, tokens: Tensor) -> Tensor:
            scores = self.wg(tokens)
            best = scores.argmax(-1)
            if self.k > 1:
                noisy = scores + torch.distributions.Gumbel(0.0, 1.0).rsample(scores.shape)
                best = noisy.argmax(-1)
            return scores * nn.functional.one_hot(best, 4)

    observed.install("steps", "routing")
    train(ddp(nn.Sequential(TopKGate(1), TopKGate(2))))
    assert [event.is_random for event in reported(observed)] == [False, False, True]


def test_ties_at_the_boundary_are_counted(observed: Observed) -> None:
    observed.install("steps", "routing")
    layer = Layer()
    nn.init.zeros_(layer.gate.weight)
    nn.init.zeros_(layer.gate.bias)
    train(ddp(nn.Sequential(layer)))
    assert reported(observed)[0].tie_share == 1.0


def test_hooks_are_gone_after_the_first_steps(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = ddp(nn.Sequential(Layer()))
    before = num_hooks(model)
    train(model, 8)
    assert before > 0
    assert num_hooks(model) == 0
    assert {event.step for event in reported(observed)} == {0, 1, 2, 3}


def test_the_light_profile_looks_at_fewer_steps_and_at_the_hundredth(observed: Observed) -> None:
    observed.install("steps", "routing", profile="light")
    model = ddp(nn.Sequential(Layer()))
    train(model, 3)
    assert num_hooks(model) == 0
    observed.recorder.step = 99
    train(model, 3)
    assert num_hooks(model) == 0
    assert [event.step for event in reported(observed)] == [0, 1, 100]


def test_beside_a_recording_of_all_choices_the_light_profile_needs_no_look(
    observed: Observed,
) -> None:
    assert observed.install("routing", profile="light", routing_task="task.json") == []
    assert len(observed.install("routing", profile="light")) == 1


def test_models_in_evaluation_are_not_reported(observed: Observed) -> None:
    observed.install("steps", "routing")
    ddp(nn.Sequential(Layer()).eval())(tokens())
    assert reported(observed) == []


def test_an_error_of_the_user_leaves_no_mode_behind(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = ddp(nn.Sequential(Failing()))
    with pytest.raises(ValueError, match="own"):
        model(tokens())
    assert torch._C._len_torch_function_stack() == 0


def test_a_failure_of_ours_leaves_no_mode_behind(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install("steps", "routing")

    def explode(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(RoutingProbe, "_note", explode)
    train(ddp(nn.Sequential(Layer())), 2)
    assert torch._C._len_torch_function_stack() == 0
    assert [event.probe for event in observed.events(ProbeDisabled)] == ["routing"]


def test_copies_of_a_model_have_hooks_that_do_nothing(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = nn.Sequential(Layer())
    ddp(model)
    copied = copy.deepcopy(model)
    read = pickle.loads(pickle.dumps(model))
    for each in (copied, read):
        each(tokens())
    assert b"distdiag" not in pickle.dumps(model[0]._forward_hooks)
    assert reported(observed) == []


class Counting(Checkpointed):
    """Counts tokens in the layer that is checkpointed."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tokens_per_expert", torch.zeros(4))
            self.last = torch.zeros(4)

        def forward(self, tokens: Tensor) -> Tensor:
            counts = self.gate(tokens).argmax(-1).bincount(minlength=4)
            self.tokens_per_expert += counts
            self.last = counts
            return super().forward(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.Layer()


def test_counters_that_a_pass_changes_are_reported_with_their_line(observed: Observed) -> None:
    observed.install("steps", "routing")
    train(ddp(Counting()))
    reported(observed)
    written = {
        name: [e for e in observed.events(CounterWritten) if e.name == name]
        for name in ("tokens_per_expert", "last")
    }
    assert [e.is_recompute for e in written["tokens_per_expert"]] == [False, True]
    assert len({e.after for e in written["tokens_per_expert"]}) == 2
    assert len({e.after for e in written["last"]}) == 1
    location = written["tokens_per_expert"][0].site.location
    assert location is not None
    assert location.function == "forward"
