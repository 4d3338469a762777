"""Several ranks, restarts, and the files of one run."""

import json
from pathlib import Path

import pytest

from distdiag.metrics.reading import Reading, read


def megatron_line(step: int, loss: float) -> str:
    return (
        f" iteration {step:8d}/     500 | elapsed time per iteration (ms): 10.0 | "
        f"lm loss: {loss:.6E} | loss scale: 1.0 |"
    )


def steps_of(reading: Reading, name: str = "lm loss") -> dict[tuple[int | None, int], list[float]]:
    return {
        (curves.rank, curves.attempt): curves.series[name].steps.tolist()
        for curves in reading.curves
        if name in curves.series
    }


def written(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "{}: ", "[default{}]:", "[1,{}]<stdout>:"])
def test_ranks_of_one_file_stand_apart(prefix: str, tmp_path: Path) -> None:
    lines = [
        prefix.format(rank) + megatron_line(step, rank + step)
        for step in range(1, 21)
        for rank in (2, 0, 3, 1)
    ]
    reading = read([written(tmp_path / "train.log", lines)])
    assert steps_of(reading) == {(rank, 0): list(range(1, 21)) for rank in range(4)}
    for curves in reading.curves:
        assert curves.rank is not None
        assert curves.series["lm loss"].values.tolist() == [curves.rank + s for s in range(1, 21)]


def test_the_last_rank_logs_and_others_say_other_things(tmp_path: Path) -> None:
    lines = ["[rank0]: building the model", "[rank3]: building the model"]
    lines += [f"[rank3]: {megatron_line(step, 2.0)}" for step in range(5)]
    assert steps_of(read([written(tmp_path / "a.log", lines)])) == {(3, 0): [0, 1, 2, 3, 4]}


def test_lines_of_one_process_from_several_places(tmp_path: Path) -> None:
    lines = []
    for step in range(1, 11):
        lines.append(f"trainer-7: step {step} train_loss 2.{step}")
        lines.append(f"optimizer-9: step {step} grad_norm 1.{step}")
        lines.append(f"evaluator-3: step {step} val_loss 3.{step}")
    (curves,) = read([written(tmp_path / "train.log", lines)]).curves
    assert curves.roles == {"loss": "train_loss", "val_loss": "val_loss", "grad_norm": "grad_norm"}
    for series in curves.series.values():
        assert series.steps.tolist() == list(range(1, 11))


def test_a_restart_is_an_attempt(tmp_path: Path) -> None:
    steps = [*range(1, 101), *range(51, 151), *range(101, 201)]
    lines = [megatron_line(step, 2.0) for step in steps]
    reading = read([written(tmp_path / "train.log", lines)])
    assert steps_of(reading) == {
        (None, 0): list(range(1, 101)),
        (None, 1): list(range(51, 151)),
        (None, 2): list(range(101, 201)),
    }


def test_each_rank_restarts_by_itself(tmp_path: Path) -> None:
    steps = [*range(1, 31), *range(11, 41)]
    lines = [f"[rank{rank}]: {megatron_line(s, 2.0)}" for s in steps for rank in (0, 1)]
    assert steps_of(read([written(tmp_path / "train.log", lines)])) == {
        (rank, attempt): list(part)
        for rank in (0, 1)
        for attempt, part in enumerate((range(1, 31), range(11, 41)))
    }


@pytest.mark.parametrize(
    "banner",
    [
        "> setting random seeds to 1234 ...",
        "W0801 07:19:37.123000 31 torch/distributed/elastic/agent/server/api.py:900] [default] "
        "Worker group FAILED. 3/3 attempts left; restarting worker group",
    ],
)
def test_a_banner_parts_attempts_whose_steps_go_on(banner: str, tmp_path: Path) -> None:
    lines = [banner, *(megatron_line(step, 2.0) for step in range(1, 51))]
    lines += [banner, banner, *(megatron_line(step, 2.0) for step in range(51, 101))]
    assert steps_of(read([written(tmp_path / "train.log", lines)])) == {
        (None, 0): list(range(1, 51)),
        (None, 1): list(range(51, 101)),
    }


def test_writers_whom_no_line_names_are_no_restarts(tmp_path: Path) -> None:
    steps = [step + shift for step in range(1, 50) for shift in (1, 0, 2, 0)]
    reading = read(
        [written(tmp_path / "train.log", [f"step {step} loss {step}.5" for step in steps])]
    )
    assert len(reading.curves) == 1
    assert reading.curves[0].series["loss"].steps.tolist() == sorted(steps)
    assert "no line names its rank" in str(reading.problems[0])


def test_numbers_that_count_lines_are_no_ranks(tmp_path: Path) -> None:
    lines = [f"{number:6d}: {megatron_line(number, 2.0)}" for number in range(1, 60)]
    assert steps_of(read([written(tmp_path / "train.log", lines)])) == {
        (None, 0): list(range(1, 60))
    }


def test_steps_within_epochs_are_counted_on(tmp_path: Path) -> None:
    lines = [
        f"epoch {epoch} batch {batch} loss 2.{batch}"
        for epoch in range(3)
        for batch in range(0, 100, 10)
    ]
    curves = read([written(tmp_path / "train.log", lines)]).curves
    assert [c.attempt for c in curves] == [0]
    steps = curves[0].series["loss"].steps.tolist()
    assert steps == sorted(set(steps))
    assert len(steps) == 30


def test_names_of_files_tell_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        written(tmp_path / f"log_rank{rank}.txt", [megatron_line(s, rank) for s in range(5)])
    assert steps_of(read([tmp_path])) == {(rank, 0): [0, 1, 2, 3, 4] for rank in range(3)}


def test_folders_of_torchrun_tell_ranks_and_attempts(tmp_path: Path) -> None:
    for attempt in range(2):
        for rank in range(2):
            folder = tmp_path / "none_abc" / f"attempt_{attempt}" / str(rank)
            written(folder / "stdout.log", [megatron_line(s, 1.0) for s in range(attempt, 5)])
    assert steps_of(read([tmp_path])) == {
        (rank, attempt): [float(s) for s in range(attempt, 5)]
        for rank in range(2)
        for attempt in range(2)
    }


def state(steps: range, shift: float = 0.0) -> str:
    history = [
        {"epoch": step / 100, "grad_norm": 1.0, "loss": step + shift, "step": step}
        for step in steps
    ]
    return json.dumps({"best_metric": None, "global_step": steps[-1], "log_history": history})


def test_states_of_checkpoints_are_one_run(tmp_path: Path) -> None:
    for last in (100, 200, 300):
        folder = tmp_path / f"checkpoint-{last}"
        written(folder / "trainer_state.json", [state(range(10, last + 1, 10))])
    written(tmp_path / "trainer_state.json", [state(range(10, 301, 10))])
    reading = read([tmp_path])
    assert steps_of(reading, "loss") == {(None, 0): list(range(10, 301, 10))}
    assert len(reading.files) == 4
    assert reading.curves[0].roles == {"loss": "loss", "grad_norm": "grad_norm"}


def test_a_state_that_another_contradicts_is_an_attempt(tmp_path: Path) -> None:
    written(tmp_path / "checkpoint-100" / "trainer_state.json", [state(range(10, 101, 10))])
    written(tmp_path / "checkpoint-200" / "trainer_state.json", [state(range(10, 201, 10), 0.5)])
    assert steps_of(read([tmp_path]), "loss") == {
        (None, 0): list(range(10, 101, 10)),
        (None, 1): list(range(10, 201, 10)),
    }


def test_metrics_of_mlflow_are_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "mlruns" / "0" / "abc" / "metrics"
    for name in ("loss", "val/loss"):
        written(folder / name, [f"17000000{s:02d}123 {s}.5 {s * 10}" for s in range(20)])
    (curves,) = read([tmp_path]).curves
    assert (curves.format, curves.source) == ("mlflow", folder)
    assert curves.series["val/loss"].steps.tolist() == [s * 10 for s in range(20)]
    assert curves.series["loss"].times is not None
    assert curves.series["loss"].times[1] == 1700000001.123
    assert curves.roles == {"loss": "loss", "val_loss": "val/loss"}


def test_a_table_that_was_written_on_has_attempts(tmp_path: Path) -> None:
    rows = ["step,loss", "1,2.5", "2,2.4", "step,loss", "3,2.3", "4,2.2"]
    assert steps_of(read([written(tmp_path / "metrics.csv", rows)]), "loss") == {
        (None, 0): [1, 2],
        (None, 1): [3, 4],
    }


@pytest.mark.parametrize(
    ("text", "name", "steps", "values"),
    [
        ('{"step": [1, 2, 3], "loss": [3.0, 2.5, 2.0]}', "loss", [1, 2, 3], [3.0, 2.5, 2.0]),
        ('{"loss": [3.0, 2.5], "val_loss": [3.1, 2.6]}', "loss", [1, 2], [3.0, 2.5]),
        ('[{"step": 5, "loss": 3.0},\n {"step": 6, "loss": NaN}]', "loss", [5, 6], [3.0, None]),
        ("[[1.7e9, 5, 3.0], [1.7e9, 6, 2.5]]", "values", [5, 6], [3.0, 2.5]),
        ("[3.0, 2.5, 2.0]", "values", [1, 2, 3], [3.0, 2.5, 2.0]),
        ('{\n  "history": {\n    "loss": [3.0, 2.5]\n  }\n}', "loss", [1, 2], [3.0, 2.5]),
    ],
)
def test_documents(text: str, name: str, steps: list, values: list, tmp_path: Path) -> None:
    (curves,) = read([written(tmp_path / "history.json", [text])]).curves
    assert curves.series[name].steps.tolist() == steps
    read_values = [None if v != v else v for v in curves.series[name].values.tolist()]
    assert read_values == values
