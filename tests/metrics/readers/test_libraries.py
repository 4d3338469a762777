"""Files and lines that the libraries themselves write."""

import io
import math
import os
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdiag.metrics.readers.event_files import masked_crc
from distdiag.metrics.readers.messages import message_class
from distdiag.metrics.reading import read

LOSSES = [3.0 / (1 + step) for step in range(40)]


def test_the_csv_logger_of_lightning(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path, name="run")
    for step, loss in enumerate(LOSSES):
        logger.log_metrics({"train_loss": loss, "epoch": step // 20}, step=step * 10)
        if step % 10 == 9:
            logger.log_metrics({"val_loss": loss + 1, "epoch": step // 20}, step=step * 10)
    logger.save()
    (curves,) = read([tmp_path]).curves
    assert curves.format == "csv"
    assert curves.series["train_loss"].values.tolist() == LOSSES
    assert curves.series["train_loss"].steps.tolist() == [step * 10 for step in range(40)]
    assert curves.series["val_loss"].steps.tolist() == [90, 190, 290, 390]
    assert curves.roles == {"loss": "train_loss", "val_loss": "val_loss"}


def test_what_transformers_print_and_save(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("transformers.trainer_callback")
    state = callbacks.TrainerState(max_steps=40, is_world_process_zero=True)
    control = callbacks.TrainerControl()
    bar, printer = callbacks.ProgressCallback(), callbacks.PrinterCallback()
    shown, printed = io.StringIO(), io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        bar.on_train_begin(None, state, control)
        for step, loss in enumerate(LOSSES, 1):
            state.global_step, epoch = step, step / 40
            logs = {"loss": loss, "grad_norm": 1.5, "learning_rate": 1e-4 / step, "epoch": epoch}
            bar.on_step_end(None, state, control)
            bar.on_log(None, state, control, logs=dict(logs))
            with redirect_stdout(printed):
                printer.on_log(
                    None, SimpleNamespace(is_local_process_zero=True), control, logs=logs
                )
            state.log_history.append({**logs, "step": step})
        bar.on_train_end(None, state, control)
    (tmp_path / "bars.log").write_text(shown.getvalue())
    (tmp_path / "plain.log").write_text(printed.getvalue())
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    by_name = {curves.source.name: curves for curves in read([tmp_path]).curves}
    for name in ("bars.log", "plain.log"):
        loss = by_name[name].series["loss"]
        assert loss.values.tolist() == pytest.approx(LOSSES, rel=1e-3)
        assert loss.steps.tolist() == pytest.approx([step / 40 for step in range(1, 41)])
    saved = by_name["trainer_state.json"]
    assert saved.format == "trainer-state"
    assert saved.series["loss"].values.tolist() == LOSSES
    assert saved.series["loss"].steps.tolist() == list(range(1, 41))
    assert saved.roles == {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}


def test_a_bar_of_tqdm(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm")
    shown = io.StringIO()
    for epoch in range(2):
        bar = tqdm.tqdm(LOSSES, desc=f"Epoch {epoch}", file=shown, mininterval=0, ascii=True)
        for loss in bar:
            bar.set_postfix(loss=loss, refresh=True)
    (tmp_path / "train.log").write_text(shown.getvalue())
    (curves,) = read([tmp_path]).curves
    steps, values = curves.series["loss"].steps, curves.series["loss"].values
    assert steps[-1] == 80
    assert sorted(steps.tolist()) == steps.tolist()
    assert values[-1] == pytest.approx(LOSSES[-1], rel=1e-2)


# The library runs in a process of its own: it warns at its import, which ends a test here.
TENSORBOARD = """
import sys
from torch.utils.tensorboard import SummaryWriter
for part in range(2):
    with SummaryWriter(sys.argv[1], filename_suffix=f".{part}") as writer:
        for step in range(part * 20, 40):
            writer.add_scalar("train/loss", 3.0 / (1 + step), step)
            writer.add_scalar("lr", float("nan") if step == 30 else 0.5, step, new_style=True)
"""


def run(program: str, *arguments: object) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    # What is importable here is importable there.
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_summary_writer_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(TENSORBOARD, tmp_path)
    first, second = read([tmp_path]).curves
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.series["train/loss"].values.tolist() == pytest.approx(LOSSES)
    assert first.series["train/loss"].steps.tolist() == list(range(40))
    assert second.series["train/loss"].steps.tolist() == list(range(20, 40))
    assert math.isnan(second.series["lr"].values[10])
    assert first.series["train/loss"].times is not None
    assert first.roles == {"loss": "train/loss", "lr": "lr"}


WANDB = """
import os, sys
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=sys.argv[1])
import wandb
run = wandb.init(project="test")
for step in range(40):
    run.log({"train/loss": 3.0 / (1 + step), "train/global_step": step * 10, "note": "text"})
run.log({"eval/loss": float("inf"), "large": [list(range(20_000))]})
run.finish()
"""


@pytest.mark.slow
def test_a_run_of_wandb_that_is_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run(WANDB, tmp_path)
    (curves,) = [each for each in read([tmp_path]).curves if each.format == "wandb"]
    assert curves.series["train/loss"].values.tolist() == LOSSES
    assert curves.series["train/loss"].steps.tolist() == [step * 10 for step in range(40)]
    assert curves.series["eval/loss"].values.tolist() == [math.inf]
    assert curves.series["eval/loss"].steps.tolist() == [390]


def event_file(*, cut: int = 0, step: int = 40) -> bytes:
    """Return an event file, made by hand."""
    data = b""
    for number in range(step):
        event = message_class("Event")(wall_time=1.7e9 + number, step=number)
        event.summary.value.add(tag="loss", simple_value=LOSSES[number])
        event.summary.value.add(tag="lr").tensor.double_val.append(number)
        text = event.summary.value.add(tag="text").tensor
        text.tensor_shape.dim.add(size=2)
        message = event.SerializeToString()
        length = struct.pack("<Q", len(message))
        data += length + struct.pack("<I", masked_crc(length)) + message
        data += struct.pack("<I", masked_crc(message))
    return data[: len(data) - cut]


def test_event_files(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    file = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    file.write_bytes(event_file())
    (curves,) = read([file]).curves
    assert curves.format == "tensorboard"
    assert curves.series["loss"].values.tolist() == pytest.approx(LOSSES)
    assert curves.series["lr"].values.tolist() == list(range(40))
    assert list(curves.series) == ["loss", "lr"]
    assert curves.series["loss"].times.tolist() == [1.7e9 + step for step in range(40)]


def test_event_files_that_are_cut_or_damaged(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    file = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    whole = event_file()
    size = len(whole) // 40
    for data, why in (
        (event_file(cut=5), "is cut within a record"),
        (event_file(cut=size - 6), "is cut within a record"),
        (whole[: 20 * size] + b"\xff" * size + whole[21 * size :], "its checksum denies"),
        (whole[: 20 * size + 12] + b"\xff" * (size - 16) + whole[21 * size - 4 :], "are damaged"),
    ):
        file.write_bytes(data)
        reading = read([file])
        assert len(reading.curves[0].series["loss"]) >= 20
        assert why in reading.problems[0].why


def test_event_files_without_the_library_name_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    length = struct.pack("<Q", 4)
    file.write_bytes(length + struct.pack("<I", masked_crc(length)) + b"\0" * 8)
    (tmp_path / "run-abc.wandb").write_bytes(b":W&B\xe1\xbe\x00" + b"\0" * 64)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    message_class.cache_clear()
    problems = read([tmp_path]).problems
    assert len(problems) == 2
    assert all("pip install 'distdiag[metrics]'" in problem.why for problem in problems)
