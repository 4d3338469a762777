from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distdiag
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.logged import Logged, Warned
from distdiag.probes.logged import PROBES
from distdiag.probes.logged.loggers import LoggerCalls
from distdiag.probes.logged.shown_warnings import ShownWarnings
from tests.probes.conftest import Observed


@pytest.fixture(autouse=True)
def installed(observed: Observed) -> Iterator[None]:
    (probe,) = PROBES[0].make(observed.wiring)
    probe.install()
    observed.probes.append(probe)
    yield
    assert not observed.events(ProbeDisabled)


def watch(observed: Observed, module: str) -> None:
    probe = LoggerCalls(observed.recorder, module)
    probe.install()
    observed.probes.append(probe)


class TestLog:
    def test_numbers_and_tensors_are_written_by_name(self, observed: Observed) -> None:
        loss = torch.ones((), requires_grad=True) * 2
        distdiag.log(loss_ce=loss, kl=0.5, count=3, step=7, name="run", many=torch.ones(3))
        loss.detach().zero_()
        (event,) = observed.events(Logged)
        assert event.values == (("loss_ce", 2.0), ("kl", 0.5), ("count", 3.0))
        assert (event.logger, event.logged_step) == ("distdiag.log", 7)
        assert event.site.location is not None
        assert event.site.location.function == "test_numbers_and_tensors_are_written_by_name"

    def test_the_place_is_written_once(self, observed: Observed) -> None:
        for step in range(3):
            distdiag.log(kl=step)
        sites = [event.site.location is not None for event in observed.events(Logged)]
        assert sites == [True, False, False]

    def test_many_calls_are_thinned_out(self, observed: Observed) -> None:
        for step in range(1024):
            distdiag.log(kl=step)
        assert len(observed.events(Logged)) == 512 + 32

    def test_nothing_happens_without_an_agent(self, observed: Observed) -> None:
        observed.uninstall()
        distdiag.log(kl=1.0)
        assert observed.events(Logged) == []


class TestLibraries:
    def test_accelerate(self, observed: Observed) -> None:
        accelerate = pytest.importorskip("accelerate")
        watch(observed, "accelerate.accelerator")
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.log({"loss": torch.tensor(1.5), "kl": 0.0}, step=3)
        accelerator.log(values={"loss": 2.0}, step=4)
        first, second = observed.events(Logged)
        assert (first.logger, first.values) == ("Accelerator.log", (("loss", 1.5), ("kl", 0.0)))
        assert (second.values, second.logged_step) == ((("loss", 2.0),), 4)

    def test_transformers(self, observed: Observed, tmp_path: Any) -> None:
        transformers = pytest.importorskip("transformers")
        trainer_of = transformers.Trainer  # which imports the module
        watch(observed, "transformers.trainer")
        arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        trainer = trainer_of(torch.nn.Linear(2, 2), arguments)
        trainer.state.global_step = 12
        trainer.log({"loss": 0.25, "grad_norm": 1.0})
        (event,) = observed.events(Logged)
        assert (event.logger, event.logged_step) == ("Trainer.log", 12)
        assert event.values == (("loss", 0.25), ("grad_norm", 1.0))

    @pytest.mark.filterwarnings("ignore:You are trying to")
    @pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
    def test_lightning(self, observed: Observed, package: str) -> None:
        library = pytest.importorskip(package)
        watch(observed, f"{package}.core.module")
        module = library.LightningModule()
        module.log("loss_ce", torch.tensor(0.5))
        module.log_dict({"kl": 0.0})
        assert [event.values for event in observed.events(Logged)] == [
            (("loss_ce", 0.5),),
            (("kl", 0.0),),
        ]

    def test_tensorboard(self, observed: Observed, tmp_path: Any) -> None:
        pytest.importorskip("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        watch(observed, "torch.utils.tensorboard.writer")
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("loss/ce", 0.5, 3)
            writer.add_scalars("loss", {"ce": 0.5, "kl": torch.tensor(0.0)}, global_step=4)
        first, second = observed.events(Logged)
        assert (first.values, first.logged_step) == ((("loss/ce", 0.5),), 3)
        assert (second.values, second.logged_step) == ((("loss/ce", 0.5), ("loss/kl", 0.0)), 4)

    def test_mlflow(
        self, observed: Observed, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = pytest.importorskip("mlflow")
        watch(observed, "mlflow.tracking.fluent")
        fluent = mlflow.tracking.fluent
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        with mlflow.start_run():
            fluent.log_metric("kl", 0.5, step=2)
            fluent.log_metrics({"loss": 1.0}, step=3)
        assert [event.values for event in observed.events(Logged)] == [
            (("kl", 0.5),),
            (("loss", 1.0),),
        ]

    def test_wandb(self, observed: Observed, tmp_path: Any) -> None:
        wandb = pytest.importorskip("wandb")
        watch(observed, "wandb.sdk.wandb_run")
        run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
        wandb.log({"kl": 0.5}, step=2)
        run.finish()
        (event,) = observed.events(Logged)
        assert (event.values, event.logged_step) == ((("kl", 0.5),), 2)


class TestWarnings:
    @pytest.fixture(autouse=True)
    def shown(self, observed: Observed) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            original = warnings.showwarning
            warnings.showwarning = lambda *_, **__: None
            probe = ShownWarnings(observed.recorder)
            probe._shown_by = vars(warnings)["_showwarnmsg_impl"]
            probe.install()
            observed.probes.append(probe)
            yield
            warnings.showwarning = original

    def test_a_warning_of_c_is_written_once_with_its_line(self, observed: Observed) -> None:
        for _ in range(3):
            torch.randn(1).std()
        (event,) = observed.events(Warned)
        assert event.topic == "one-sample-variance"
        assert event.site.location is not None
        assert event.site.location.file == __file__

    def test_what_the_program_catches_is_its_own(self, observed: Observed) -> None:
        with warnings.catch_warnings(record=True):
            torch.randn(1).std()
        assert observed.events(Warned) == []

    def test_what_torch_hides_while_it_compiles_is_not_the_programs(
        self, observed: Observed
    ) -> None:
        made = torch.ones(1, requires_grad=True) * 2
        hide, leaf = torch._logging.hide_warnings, torch._logging._internal.safe_grad_filter
        with hide(leaf):
            assert made.grad is None
        assert observed.events(Warned) == []
        assert made.grad is None
        assert [event.topic for event in observed.events(Warned)] == ["gradient-of-no-leaf"]

    def test_other_warnings_are_left_alone(self, observed: Observed) -> None:
        warnings.warn("something else", stacklevel=1)
        assert observed.events(Warned) == []
