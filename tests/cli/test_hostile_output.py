"""No command lets a name or a text of a stranger steer the terminal that it writes to."""

import gc
import json

import pytest

from distdiag.cli import main

NAME = "a\x1b]0;owned\x07\x9b31m\u202egnp\ud800.py"
TEXT = "\x1b[2J\x9b31m \u202ereversed\u2066 \x07"


def write(path, text):
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def sick(folder):
    path = folder / NAME.replace("\ud800", "\udcff")
    return write(
        path,
        f"import torch.distributed as dist\nif rank == '{TEXT}' or rank == 0:\n"
        "    dist.barrier()\n",
    )


def context(folder, **artifacts):
    return write(folder / "context.json", json.dumps({"artifacts": artifacts}))


def facts(folder, name, value):
    return write(folder / name, json.dumps({"environment": {"variable": {TEXT: value}}}))


COMMANDS = {
    "lint": lambda folder: ["lint", sick(folder)],
    "lint as json": lambda folder: ["lint", sick(folder), "--format", "json"],
    "lint as sarif": lambda folder: ["lint", sick(folder), "--format", "sarif"],
    "lint for github": lambda folder: ["lint", sick(folder), "--format", "github"],
    "lint of what is no source": lambda folder: ["lint", write(folder / "\x1b.py", "rank = (")],
    "lint of nothing": lambda folder: ["lint", folder / f"{TEXT}.py"],
    "analyze": lambda folder: ["analyze", write(folder / f"{TEXT}.log", LOG)],
    "analyze of details": lambda folder: ["analyze", write(folder / "log", LOG), "--verbose"],
    "metrics": lambda folder: ["metrics", write(folder / f"{TEXT}.jsonl", CURVES)],
    "metrics as json": lambda folder: [
        "metrics",
        write(folder / f"{TEXT}.jsonl", CURVES),
        "--format",
        "json",
    ],
    "metrics of nothing": lambda folder: ["metrics", folder / TEXT],
    "diagnose": lambda folder: ["diagnose", context(folder, error_messages=LOG)],
    "diagnose as text": lambda folder: [
        "diagnose",
        context(folder, error_messages=LOG, training_logs=[TEXT]),
        "--format",
        "text",
    ],
    "diagnose of nothing": lambda folder: ["diagnose", folder / TEXT],
    "compare of nothing": lambda folder: ["compare", folder / TEXT, folder / TEXT],
    "report of nothing": lambda folder: ["report", folder / TEXT],
    "an unknown option": lambda folder: ["lint", f"--{TEXT}"],
    "an unknown command": lambda folder: [TEXT],
    "an unknown code": lambda folder: ["explain", TEXT],
}
LOG = f"""[rank1]: Traceback (most recent call last):
[rank1]:   File "/{TEXT}/train.py", line 3, in {TEXT}
[rank1]:     {TEXT}
[rank1]: RuntimeError: {TEXT} CUDA out of memory <b>{TEXT}
"""
CURVES = "".join(
    json.dumps({"step": step, f"loss {TEXT}": 2.0 / (step + 1), "loss": float("nan")}) + "\n"
    for step in range(30)
)


@pytest.fixture(autouse=True)
def collected():
    """Begin to collect garbage again, which a command that ends soon leaves to the end."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("case", COMMANDS)
def test_nothing_that_a_command_writes_steers_a_terminal(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(list(map(str, COMMANDS[case](tmp_path))))
    shown = "".join(capsys.readouterr())
    assert shown.strip()
    assert [line for line in shown.split("\n") if not line.isprintable()] == []
