"""Counts of parameters, the use of memory, and the scripts that print them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distdiag.events.errors import DamagedFileError
from distdiag.metrics.memory import memory_use
from distdiag.metrics.parameters import count_parameters, shapes_in_safetensors
from distdiag.metrics.runs import Run
from tests.metrics.judging.healthy import curves_of

ROOT = Path(__file__).parents[2]
MODEL = """
import torch

def small():
    return torch.nn.ModuleDict({
        "embedding": torch.nn.Embedding(50_000, 64),
        "block": torch.nn.Linear(64, 8192),
        "head": torch.nn.Linear(64, 4096, bias=False),
    })
"""


def script(name: str, *args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a file whose header promises these tensors, with none of their bytes."""
    header = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_the_largest_tensor_is_named_with_its_share():
    counted = count_parameters({"embedding.weight": (79, 100), "layers.0.mlp.weight": (21, 100)})
    assert counted.total == 10_000
    assert (counted.tensors[0].name, counted.tensors[0].share) == ("embedding.weight", 0.79)
    assert [c.name for c in counted.modules] == ["embedding", "layers.0"]


def test_headers_of_safetensors_are_read_without_weights(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a.weight": torch.zeros(3, 4), "b": torch.zeros(())}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert shapes_in_safetensors([tmp_path / "model.safetensors"]) == {"a.weight": (3, 4), "b": ()}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x05\x00\x00\x00\x00\x00\x00\x00hello",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b"\x0c\x00\x00\x00\x00\x00\x00\x00" + b'{"a":[1, 2]}',
    ],
)
def test_other_files_are_called_what_they_are(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(DamagedFileError, match="not a safetensors file"):
        shapes_in_safetensors([tmp_path / "x.safetensors"])


def test_a_model_is_built_on_the_meta_device_and_counted(tmp_path):
    (tmp_path / "models.py").write_text(MODEL)
    done = script("count_parameters.py", "models:small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3,994,624 parameters in 4 tensors")
    assert done.stdout.endswith("80% of the parameters are in embedding.weight\n")


def test_checkpoints_are_counted_and_strangers_refused(tmp_path):
    shapes = {"embed.weight": (790, 10), "layers.0.weight": (210, 10)}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    state = {"model": {name: torch.zeros(shape) for name, shape in shapes.items()}, "step": 3}
    torch.save(state, tmp_path / "checkpoint.pt")
    for target in ("model.safetensors", ".", "checkpoint.pt"):
        done = script("count_parameters.py", target, cwd=tmp_path)
        assert "79% of the parameters are in embed.weight" in done.stdout, done.stderr
    (tmp_path / "bad.pt").write_bytes(b"no checkpoint")
    done = script("count_parameters.py", "bad.pt", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def use_of(values: np.ndarray, limit: float | None = None):
    """Return the memory use of a run with these values."""
    run = Run("a", (curves_of({"memory": values}),))
    (track,) = run.tracks("memory")
    return memory_use(track, limit)


def test_a_leak_has_a_slope_and_a_step_at_which_the_device_is_full():
    rng = np.random.default_rng(0)
    values = 40 + 0.01 * np.arange(1000) + 0.1 * rng.normal(size=1000)
    use = use_of(values, limit=80.0)
    assert use.growth == pytest.approx(0.01, rel=0.05)
    assert use.full_at == pytest.approx(4000, rel=0.05)


@pytest.mark.parametrize("form", ["flat", "saw", "steps", "falling"])
def test_memory_that_fills_up_once_does_not_grow(form):
    rng = np.random.default_rng(0)
    x = np.arange(1000)
    values = {
        "flat": np.minimum(x, 40.0),
        "saw": 40 + (x % 50) * 0.1,
        "steps": 40 + 2.0 * (x > 400) + 1.0 * (x > 700),
        "falling": 60 - 0.01 * x,
    }[form] + 0.05 * rng.normal(size=1000)
    use = use_of(values, limit=80.0)
    assert (use.growth, use.full_at) == (0, None)


def test_the_memory_of_a_log_is_printed(tmp_path):
    lines = [
        f"step: {step}  loss: {5 - step / 500:.4f}  memory: {40 + 0.01 * step:.2f}GiB(50.00%)  "
        "tps: 1,000  mfu: 40.00%\n"
        for step in range(1, 1001)
    ]
    (tmp_path / "train.log").write_text("".join(lines))
    done = script("profile_memory.py", "train.log", "--limit", "80", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "peak    50 at step 1000 (train.log:1000)" in done.stdout
    assert "growth  10 in 1,000 steps, steadily" in done.stdout
    assert "full    at step 4" in done.stdout


def test_the_thin_scripts_are_the_command(tmp_path):
    rng = np.random.default_rng(0)
    norm = np.exp(0.1 * rng.normal(size=60))
    norm[40] = 90
    lines = [f"step {i + 1} loss {3 - i / 100:.3f} grad_norm {n:.3f}\n" for i, n in enumerate(norm)]
    (tmp_path / "train.log").write_text("".join(lines))
    done = script("check_gradients.py", "train.log", cwd=tmp_path)
    assert "grad_norm jumps to 90 at step 41" in done.stdout, done.stderr
    done = script("analyze_loss_curve.py", "train.log", "--format", "json", cwd=tmp_path)
    assert [row["role"] for row in json.loads(done.stdout)["series"]] == ["loss"]
