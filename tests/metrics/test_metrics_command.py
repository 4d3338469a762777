"""``distdiag metrics`` on logs of real form: what it prints, draws, asserts, and exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distdiag.cli import main

ROOT = Path(__file__).parents[2]


def write_megatron(path: Path, *, seed: int = 0, spike: int | None = None, size: int = 600) -> Path:
    """Write a log as Megatron-LM does; after `spike` the loss diverges."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, size + 1)
    loss = 2.0 + 6.0 * steps**-0.3 + 0.02 * rng.normal(size=size)
    norm = 0.8 * np.exp(0.15 * rng.normal(size=size))
    if spike is not None:
        norm[spike - 1] = 47.3
        loss[spike + 2 :] += np.minimum(0.15 * np.arange(1, size - spike - 1), 6.0)
    lines = [
        f" iteration {step:8d}/{size:8d} | consumed samples: {16 * step:12d} | elapsed time per "
        f"iteration (ms): {200 + 3 * rng.normal():.1f} | learning rate: "
        f"{1e-3 * min(step / 50, 1):.6E} | global batch size:    16 | lm loss: {loss[i]:.6E} | "
        f"loss scale: 1.0 | grad norm: {norm[i]:.3f} | number of skipped iterations:   0 |\n"
        for i, step in enumerate(steps)
    ]
    path.write_text("".join(lines))
    return path


def run(capsys, *args: object) -> tuple[int, str, str]:
    """Run the command in this process; return its status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["metrics", *map(str, args)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_divergence_is_told_with_the_step_of_the_spike_and_its_lines(tmp_path, capsys):
    log = write_megatron(tmp_path / "train.log", spike=400)
    status, out, _ = run(capsys, log)
    told = " ".join(out.split())
    assert status == 1
    assert "distdiag: 1 error, 1 warning in 1 run." in told
    assert "ERROR divergence: lm loss" in told
    assert "grad norm spiked to 47.3 at step 400, before the loss rose" in told
    assert f"grad norm = 47.3 at step 400 ({log}:400)" in told


def test_a_healthy_log_gives_a_table_and_status_0(tmp_path, capsys):
    log = write_megatron(tmp_path / "train.log")
    status, out, _ = run(capsys, log)
    assert status == 0
    assert "distdiag: nothing found in 1 run." in out
    (row,) = [line for line in out.splitlines() if line.startswith("  grad norm")]
    assert row.split()[2:4] == ["600", "1-600"]
    assert "▁" in out


def test_json_holds_rows_observations_and_assertions(tmp_path, capsys):
    log = write_megatron(tmp_path / "train.log", spike=400)
    status, out, _ = run(capsys, log, "--format", "json", "--assert", "no-nan")
    shown = json.loads(out)
    assert status == 1
    assert {row["role"] for row in shown["series"]} >= {"loss", "grad_norm", "lr"}
    kinds = {seen["kind"] for seen in shown["judgement"]["observations"]}
    assert kinds >= {"divergence", "spike"}
    assert shown["assertions"] == [
        {"assertion": "no-nan", "run": "train.log", "holds": True, "why": ""}
    ]


@pytest.mark.parametrize(
    ("assertion", "holds"),
    [
        ("no-nan", True),
        ("no-collapse:100", True),
        ("no-collapse", False),
        ("no-collapse:1000", False),
        ("no-divergence", False),
        ("no-spike", False),
        ("no-warning", False),
        ("no-slowdown", True),
        ("loss<20", True),
        ("lm loss<3", False),
        ("grad_norm>0", True),
    ],
)
def test_assertions_hold_or_do_not(tmp_path, capsys, assertion, holds):
    log = write_megatron(tmp_path / "train.log", spike=400)
    status, out, _ = run(capsys, log, "--format", "json", "--assert", assertion)
    (verdict,) = json.loads(out)["assertions"]
    assert verdict["holds"] is holds
    assert bool(verdict["why"]) is not holds
    assert status == 1  # the divergence


def test_an_assertion_that_is_not_met_makes_the_status_1(tmp_path, capsys):
    log = write_megatron(tmp_path / "train.log")
    assert run(capsys, log, "--assert", "no-collapse:100", "--assert", "loss<4")[0] == 0
    status, out, _ = run(capsys, log, "--assert", "loss<1")
    assert status == 1
    assert "assertion loss<1 NOT MET: train.log" in out
    assert run(capsys, log, "--assert", "no-collapse:601")[0] == 1


def test_a_loss_above_its_start_has_collapsed(tmp_path, capsys):
    lines = [f"step {step} loss {1 + 0.05 * step:.3f}\n" for step in range(1, 16)]
    (tmp_path / "train.log").write_text("".join(lines))
    status, out, _ = run(capsys, tmp_path / "train.log", "--assert", "no-collapse:15")
    assert status == 1
    assert "above the 1.15 that it began with" in " ".join(out.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name at least one log"),
        (["missing.log"], "no curve was found in missing.log"),
        (["{log}", "--assert", "no-worry"], 'unknown assertion "no-worry"'),
        (["{log}", "--assert", "no-collapse:x"], "after the colon stands a number of steps"),
        (["{log}", "--assert", "loss<low"], "'low' is not a number"),
        (["{log}", "--assert", "bleu>3"], 'has no series "bleu"'),
        (["{log}", "--series", "bleu"], "no run has a series bleu"),
        (["{log}", "--compare", "{log}", "{log}"], "no others stand beside them"),
        (["{log}", "--picture", "curves.bmp"], "a picture ends in .png or .svg"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(tmp_path, capsys, args, said):
    log = write_megatron(tmp_path / "train.log", size=30)
    status, _, err = run(capsys, *(arg.format(log=log) for arg in args))
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_one_series_is_shown_and_judged_alone(tmp_path, capsys):
    log = write_megatron(tmp_path / "train.log", spike=400)
    status, out, _ = run(capsys, log, "--series", "grad_norm")
    assert status == 0
    assert "lm loss" not in out
    assert "WARNING spike: grad norm" in out


def test_runs_with_the_same_seed_part_at_the_first_digit(tmp_path, capsys):
    good = write_megatron(tmp_path / "good.log")
    bad = write_megatron(tmp_path / "bad.log", spike=400)
    status, out, _ = run(capsys, "--compare", good, bad)
    told = " ".join(out.split())
    assert status == 1
    first = told.index("grad norm is equal to the last digit up to step 399")
    second = told.index("lm loss is equal to the last digit up to step 402")
    assert first < second
    assert "differs first at step 403, for good" in told


def test_folders_of_ranks_are_one_run(tmp_path, capsys):
    for rank in range(4):
        write_megatron(tmp_path / f"rank{rank}.log", seed=rank)
    status, out, _ = run(capsys, tmp_path)
    assert status == 0
    assert "in 1 run." in out
    assert "4 ranks" in out


def test_a_picture_is_drawn_with_matplotlib(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write_megatron(tmp_path / "train.log", spike=400)
    png, svg = tmp_path / "curves.png", tmp_path / "curves.svg"
    assert run(capsys, log, "--picture", png)[0] == 1
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run(capsys, log, "--picture", svg)[0] == 1
    first = svg.read_text()
    assert "<svg" in first
    run(capsys, log, "--picture", svg)
    assert svg.read_text() == first


def test_without_matplotlib_one_line_names_what_to_install(tmp_path):
    log = write_megatron(tmp_path / "train.log", size=30)
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "metrics", str(log), "--picture", "curves.png"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "distdiag: a picture needs matplotlib: python -m pip install 'distdiag[metrics]'"
    )


def test_the_width_and_the_encoding_of_a_terminal_are_obeyed(tmp_path):
    log = write_megatron(tmp_path / "train.log", spike=400)
    environment = {**os.environ, "COLUMNS": "60", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "metrics", str(log)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    paths = [line for line in done.stdout.splitlines() if str(log) not in line]
    assert max(map(len, paths)) <= 60
