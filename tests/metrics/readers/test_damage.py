"""No text ends the reading, hangs it, or makes it take memory without bound."""

import gzip
import os
import resource
import socket
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.metrics.readers.language_logs
import tests.metrics.readers.other_logs  # noqa: F401
from distdiag.metrics.readers.formats import LINE_FORMATS
from distdiag.metrics.readers.generic import GENERIC
from distdiag.metrics.reading import Reading, read
from tests.metrics.readers.writing import FORMATS

SECONDS_PER_MB = 60.0
"""Of CPU time: measured are 0.1 to 0.6; a search that is not linear takes minutes."""

LINES = [line for form in FORMATS.values() for line in form.written().text.splitlines()[:12]]


def read_bytes(data: bytes, folder: Path, name: str = "train.log") -> Reading:
    """Read a file with these bytes, in a time that grows with its size only."""
    file = folder / name
    file.write_bytes(data)
    start = time.process_time()
    reading = read([file])
    spent = time.process_time() - start
    assert spent < 10.0 + SECONDS_PER_MB * len(data) / 2**20, f"{spent} s"
    for problem in reading.problems:
        assert str(problem).isprintable()
    for curves in reading.curves:
        for series in curves.series.values():
            sizes = {len(series.steps), len(series.values), len(series.lines)}
            assert sizes == {len(series)}
    return reading


any_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_folder
@given(st.binary(max_size=4096))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    read_bytes(data, tmp_path)


@any_folder
@given(st.data())
def test_lines_that_were_cut_joined_and_changed(tmp_path: Path, data: st.DataObject) -> None:
    parts = []
    for line in data.draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=20)):
        start = data.draw(st.integers(0, len(line)))
        end = data.draw(st.integers(start, len(line)))
        inserted = data.draw(st.text(max_size=8))
        parts.append(line[:start] + inserted + line[end:])
    text = data.draw(st.sampled_from(["\n", "\r", "", "\r\n", " "])).join(parts)
    read_bytes(text.encode("utf-8", "surrogatepass"), tmp_path)


HOSTILE = {
    "digits": "1" * 60_000,
    "a step of many digits": "step " + "9" * 60_000 + " loss 2.0",
    "blanks": "step" + " " * 60_000 + "loss",
    "colons": "loss:" * 12_000,
    "equals": "loss=" * 12_000,
    "commas": "step 1 loss " + "1," * 30_000,
    "thousands": "step 1 loss " + "1,000" * 12_000,
    "words": "step 1 " + "loss " * 12_000,
    "brackets": "[" * 60_000,
    "braces": '{"a":' * 12_000,
    "braces of Python": "{'a': " * 10_000,
    "quotes": "{'" * 30_000,
    "bars": "%|" * 30_000,
    "more bars": "5%|##| 1/2 [" * 5_000,
    "pipes": "iteration 1/ 5 |" + "|" * 60_000,
    "names": "iteration 1/ 5 |" + "a: " * 20_000,
    "iterations": "iteration " * 6_000,
    "epochs": "Epoch [1][" * 6_000,
    "epochs of text": "Epoch: [" * 7_000,
    "trains": "Train: 1 [ " * 5_000,
    "lists": "step=1, skipped=0, lr=[" + "1, " * 20_000,
    "dashes": "step:1 - " + "a - " * 15_000,
    "keras": "1/1 [" + "=" * 60_000,
    "more keras": "1/1 [" * 12_000 + " - loss: ",
    "exponents": "step 1 loss 1e" + "9" * 1_000 + " lr 1e" + "e" * 50_000,
    "dots": "step 1 loss 1" + ".1" * 30_000,
    "signs": "step 1 loss " + "-+" * 30_000,
    "steps in brackets": "[step=" * 10_000,
    "olmo": "[step=1]\n" + "a b" * 20_000,
    "eta": "eta: " + "1 day, " * 8_000 + "iter: 5",
    "clocks": "step 1 loss " + "12:34:56" * 7_000,
    "dates": "2025-01-01 " * 6_000 + "step 1 loss 2",
    "escapes": "\x1b[" * 30_000,
    "titles": "\x1b]" * 30_000,
    "commas of a table": "a,b\n" + "1," * 30_000,
    "quotes of a table": 'a,b\n1,"' + "x" * 60_000,
    "names of a table": ",".join(f"n{i}" for i in range(9_000)) + "\n" + "1," * 8_999 + "1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_lines_that_make_searches_slow(name: str, tmp_path: Path) -> None:
    text = HOSTILE[name]
    read_bytes((f"{text}\n" * 4).encode(), tmp_path)
    start = time.process_time()
    for form in (*LINE_FORMATS, GENERIC):  # whatever sign a line holds
        form.read(text)
    assert time.process_time() - start < 20.0  # measured is 0.1


def test_a_line_of_ten_megabytes_is_passed_over(tmp_path: Path) -> None:
    lines = [f"step {step} loss {step}.5" for step in range(20)]
    data = "\n".join([*lines[:10], "x" * (10 << 20), *lines[10:]]).encode()
    (curves,) = read_bytes(data, tmp_path).curves
    loss = curves.series["loss"]
    assert loss.steps.tolist() == list(range(20))
    assert loss.lines.tolist() == [*range(1, 11), *range(12, 22)]


def test_memory_does_not_grow_with_what_is_no_curve(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    with file.open("w") as out:
        for number in range(300_000):
            out.write(f"INFO worker {number % 8} loaded shard {number} of a data set, all well\n")
            if number % 30_000 == 0:
                out.write(f"step {number} loss 2.5\n")
    read([file])  # what is imported and compiled once
    tracemalloc.start()
    (curves,) = read([file]).curves
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(curves.series["loss"]) == 10
    assert file.stat().st_size > 16 << 20
    assert peak < 8 << 20  # some chunks of 1 MiB


def test_names_and_speakers_without_end_are_bounded(tmp_path: Path) -> None:
    lines = [f"pod-{n}x: step 1 loss 2.5 metric_{n}_loss 3" for n in range(30_000)]
    reading = read_bytes("\n".join(lines).encode(), tmp_path)
    assert sum(len(curves.series) for curves in reading.curves) <= 20_002


def test_steps_at_random_are_no_thousands_of_attempts(tmp_path: Path) -> None:
    import random

    steps = random.Random(1).sample(range(100_000), 20_000)
    data = "\n".join(f"step {step} loss 2.5" for step in steps).encode()
    reading = read_bytes(data, tmp_path)
    assert len(reading.curves) <= 1_000
    assert sum(len(curves.series["loss"]) for curves in reading.curves) == 20_000


def test_a_line_of_json_that_is_cut_is_told(tmp_path: Path) -> None:
    reading = read_bytes(b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo', tmp_path, "log.jsonl")
    (curves,) = reading.curves
    assert len(curves.series["loss"]) == 1
    (problem,) = reading.problems
    assert (problem.line, problem.path.name) == (2, "log.jsonl")
    assert "no whole JSON" in problem.why


@pytest.mark.parametrize(
    "text",
    [
        "steps: 1 loss: 2.5 iter time (s): 1,234 samples/sec: 2",
        '{"step": 1, "loss": 2.5, "rank": Infinity}',
        '{"step": 1e999, "loss": 2.5, "rank": -1}',
        "{'loss': 2.5, 'rank': inf, 'epoch': nan}",
        "step inf loss nan rank inf",
    ],
)
def test_values_where_counts_should_be(text: str, tmp_path: Path) -> None:
    (curves,) = read_bytes(f"{text}\n".encode(), tmp_path).curves
    assert curves.rank is None
    assert curves.roles["loss"] == "loss"


def test_many_damaged_lines_are_told_once(tmp_path: Path) -> None:
    data = b'{"step": 1, "loss": 2.5}\n' + b'{"step": 2, "lo\n' * 5000
    problems = read_bytes(data, tmp_path, "log.jsonl").problems
    assert len(problems) == 11
    assert "4,990 more" in problems[-1].why


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NaN", "nan"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("-inf", "-inf"),
        ("Infinity", "inf"),
        ("-Infinity", "-inf"),
        ("1e-05", "1e-05"),
        ("1E+05", "100000.0"),
        ("1,234,567.5", "1234567.5"),
        (".5", "0.5"),
        ("5.", "5.0"),
        ("+1.5", "1.5"),
        ("1.2K", "1200.0"),
        ("3.4 GiB", "3.4"),
        ("512 MiB", "0.5"),
        ("12 %", "12.0"),
        ("5.3s", "5.3"),
        ("250ms", "0.25"),
        ("0,5", None),
        ("1,23", None),
        ("12:30", None),
        ("1e5x", None),
        ("infinite", None),
        ("", None),
        ("tensor(0.25, device='cuda:0')", "0.25"),
        ("np.float64(0.25)", "0.25"),
        ("12/100", "12.0"),
    ],
)
def test_numbers(text: str, value: str | None) -> None:
    from distdiag.metrics.readers.numbers import number_in

    found = number_in(text)
    assert (None if found is None else repr(found)) == value


def test_what_is_no_file_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    good = tmp_path / "good.log"
    good.write_text("step 1 loss 2.5\nstep 2 loss 2.4\n")
    pipe, bound = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(bound))
        damaged = tmp_path / "cut.log.gz"
        damaged.write_bytes(gzip.compress(good.read_bytes() * 1000)[:-20])
        empty = tmp_path / "empty.log"
        empty.touch()
        paths = [pipe, tmp_path / "missing", bound, damaged, empty, Path("/dev/zero"), good]
        reading = read(paths)
    assert good in reading.files
    said = {problem.path: problem.why for problem in reading.problems}
    assert set(said) == set(paths) - {good}
    assert "not a regular file" in said[pipe]
    assert "No such file" in said[tmp_path / "missing"]
    assert "damaged" in said[damaged]
    assert said[empty] == "is empty"


def test_what_a_damaged_file_holds_before_the_damage_is_kept(tmp_path: Path) -> None:
    text = "".join(f"step {step} loss 2.{step}\n" for step in range(2000))
    file = tmp_path / "cut.log.gz"
    file.write_bytes(gzip.compress(text.encode())[:-200])
    reading = read([file])
    assert len(reading.curves[0].series["loss"]) > 1000
    assert "damaged" in reading.problems[0].why


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(b"\0" * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reading = read([file])
    assert "archive bomb" in reading.problems[0].why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_folders_hold_much_that_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 2.5\nstep 2 loss 2.4\n")
    (tmp_path / "config.json").write_text('{"learning_rate": 0.1, "hidden_size": 64}')
    (tmp_path / "train.py").write_text("print(f'step {step} loss {loss}')\n")
    (tmp_path / "notes.txt").write_text("we stop at step 5 when the loss is below 2.0\n")
    (tmp_path / "weights.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (tmp_path / "loop").symlink_to(tmp_path)
    reading = read([tmp_path])
    assert reading.problems == ()
    assert reading.files == (tmp_path / "train.log",)


def test_a_document_on_one_long_line(tmp_path: Path) -> None:
    history = ", ".join(f'{{"step": {step}, "loss": 2.5}}' for step in range(80_000))
    data = f'{{"log_history": [{history}]}}'.encode()
    assert len(data) > 2 << 20
    (curves,) = read_bytes(data, tmp_path, "trainer_state.json").curves
    assert len(curves.series["loss"]) == 80_000


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1 loss 2.5\n" * 100)
    archive = tmp_path / "logs.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(log)
    reading = read([archive])
    assert reading.curves == ()
    assert "unpack it first" in reading.problems[0].why
