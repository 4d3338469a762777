"""What is read of a log is what was written to it, to the digits that are printed."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import tests.metrics.readers.language_logs
import tests.metrics.readers.other_logs  # noqa: F401
from distdiag.metrics.reading import read
from distdiag.metrics.series import Curves
from tests.metrics.readers.writing import FORMATS, Log


def only(*paths: Path) -> Curves:
    reading = read(paths)
    assert [str(problem) for problem in reading.problems] == []
    assert len(reading.curves) == 1, [(c.rank, c.attempt) for c in reading.curves]
    return reading.curves[0]


def check(curves: Curves, log: Log) -> None:
    for name, points in log.points.items():
        series = curves.series[name]
        assert [tuple(point) for point in zip(series.steps, series.values, strict=True)] == [
            (step, pytest.approx(value, rel=1e-12, nan_ok=True)) for step, value in points
        ], name


@pytest.mark.parametrize("name", FORMATS)
def test_values_and_steps_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    log = form.written()
    file = tmp_path / form.file
    file.write_text(log.text)
    curves = only(file)
    check(curves, log)
    assert curves.format == form.name
    assert curves.attempt == 0
    assert curves.roles | form.roles == curves.roles


def test_the_line_of_each_value_is_told(tmp_path: Path) -> None:
    log = FORMATS["megatron"].written()
    file = tmp_path / "train.log"
    file.write_text(log.text)
    lines = log.text.split("\n")
    loss = only(file).series["lm loss"]
    for line, value in zip(loss.lines, loss.values, strict=True):
        assert f"lm loss: {value:.6E}" in lines[line - 1]


def test_times_before_lines_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(FORMATS["torchtitan"].written().text)
    loss = only(file).series["loss"]
    assert loss.times is not None
    assert np.all(loss.times == loss.times[0])
    assert 1.754e9 < loss.times[0] < 1.755e9  # 1 August 2025


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: b"\0" * 5000 + text.encode(),
    ],
    ids=["crlf", "utf-16 with a mark", "utf-16", "utf-8 with a mark", "gzip", "truncated"],
)
@pytest.mark.parametrize("name", ["megatron", "own_jsonl", "lightning_csv", "by_epoch"])
def test_encodings(name: str, encode, tmp_path: Path) -> None:
    form = FORMATS[name]
    log = form.written()
    file = tmp_path / form.file
    file.write_bytes(encode(log.text))
    check(only(file), log)


PREFIXES = {
    "[rank3]: ": 3,
    "[rank3]:[titan] 2025-01-01 00:00:00 - root - INFO - ": 3,
    "3: ": 3,
    "2025-01-01T10:00:00Z [INFO] rank 3: ": 3,
    "[default3]:": 3,
    "[1,3]<stdout>:": 3,
    "(RayTrainWorker pid=3123, ip=10.0.0.1) ": None,
    "2025-01-01 10:00:00,123 INFO train.py:12: ": None,
    "2025-01-01 10:00:00.123 | INFO     | __main__:train:33 - ": None,
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["megatron_of_2020", "tutorial", "torchtune", "ms_swift"])
def test_what_launchers_put_before_lines(name: str, prefix: str, tmp_path: Path) -> None:
    log = FORMATS[name].written()
    file = tmp_path / "train.log"
    file.write_text("".join(f"{prefix}{line}\n" for line in log.text.splitlines()))
    curves = only(file)
    check(curves, log)
    assert curves.rank == PREFIXES[prefix]


@pytest.mark.parametrize("name", ["megatron", "tutorial", "own_jsonl", "transformers_of_2026"])
def test_lines_of_text_in_records_of_a_container(name: str, tmp_path: Path) -> None:
    log = FORMATS[name].written()
    records = (
        {"log": f"{line}\n", "stream": "stdout", "time": "2025-01-01T10:00:00.123456789Z"}
        for line in log.text.splitlines()
    )
    file = tmp_path / "container.log"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    check(only(file), log)
