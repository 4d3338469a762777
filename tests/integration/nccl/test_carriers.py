"""The stacks of a hang come over NCCL, by processes of their own, or by the next best way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from distdiag.events.stacks import Stacks
from distdiag.record.wire import Interner
from distdiag.transports.carriers import Carriers, plan_carriage
from distdiag.transports.journal import read_journal
from tests.integration.launch import REPOSITORY, run_checked

WAITING = Path(__file__).with_name("waiting.py")
OPTIONS = ("--hang-timeout", "5", "--on-hang", "abort")

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(240),
]


def line_of(text: str) -> int:
    lines = WAITING.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def assert_explained(report, described):
    """The missing rank is named with its line, which only its stack can tell."""
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert [f["ranks"] for f in errors] == [[1]], described
    places = [e["location"] for e in errors[0]["evidence"] if e["location"]]
    assert line_of("time.sleep(600)") in [place["line"] for place in places], described


def test_carriers_bring_what_they_are_given_over_nccl(tmp_path):
    carriage, meeting = plan_carriage("127.0.0.1", [(0,), (1,)], backend="nccl", deadline_s=60.0)
    carriers = Carriers(tmp_path, carriage, (0, 1), meeting=meeting)
    payloads = {0: b"zero", 1: os.urandom(3_000_000)}
    carriers.load(payloads)
    while not carriers.is_over:
        time.sleep(0.01)
    assert carriers.result() == payloads


def test_one_node_may_take_the_way_of_several(tmp_path):
    run = run_checked(WAITING, options=(*OPTIONS, "--dump-transport", "nccl"))
    assert run.report is not None, run.describe()
    assert run.report["run"]["dump_transport"] == "nccl", run.describe()
    assert not run.leftovers, run.describe()
    assert_explained(run.report, run.describe())


def test_with_full_gpus_the_verdict_comes_all_the_same(tmp_path):
    run = run_checked(WAITING, ["--fill"], options=(*OPTIONS, "--dump-transport", "nccl"))
    assert run.report is not None, run.describe()
    assert run.report["run"]["dump_transport"].startswith("none (carriers: "), run.describe()
    assert_explained(run.report, run.describe())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def run_two_nodes(folder: Path, *args: str, options: tuple[str, ...] = ()) -> tuple[dict, str]:
    """Run two ranks as if each were alone on its machine; return the report and what was said."""
    port, processes = free_port(), []
    for rank in (0, 1):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": str(rank),
        }
        tool = ["-m", "distdiag.check", "--run-dir", str(folder / f"run-{rank}")]
        command = [sys.executable, *tool, *OPTIONS, *options, str(WAITING), *args]
        with (folder / f"output-{rank}").open("w") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
    try:
        for process in processes:
            process.wait(150)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join((folder / f"output-{rank}").read_text() for rank in (0, 1))
    path = folder / "run-0" / "report.json"
    deadline = time.monotonic() + 20
    while not (report := msgspec.json.decode(path.read_bytes()))["complete"]:
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return report, said


@pytest.mark.parametrize(
    ("args", "options", "way"),
    [
        ((), (), "nccl"),
        ((), ("--dump-transport", "tcp"), "tcp"),
        (("--fill",), (), "tcp (carriers: "),
    ],
)
def test_two_nodes_send_their_stacks_to_one(tmp_path, args, options, way):
    report, said = run_two_nodes(tmp_path, *args, options=options)
    assert report["run"]["dump_transport"].startswith(way), said
    assert_explained(report, said)
    path = tmp_path / "run-1" / "attempt-0" / "monitor.journal"
    assert any(isinstance(event, Stacks) for event in read_journal(path, Interner()))
