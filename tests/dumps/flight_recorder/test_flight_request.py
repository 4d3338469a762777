"""Flight recorders of real processes, on request."""

import pytest

from distdiag.dumps.flight_recorder.request import FlightRequest
from distdiag.record.run_dir import RunDir
from tests.dumps.observed_script import observed_script

HANG = """import torch, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    peer = os.fork()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store if peer else dist.TCPStore("127.0.0.1",
        store.port, 2, is_master=False), rank=0 if peer else 1, world_size=2)
    dist.all_reduce(torch.ones(3))
    if not peer:
        time.sleep(100)
    print("stuck", flush=True)
    dist.broadcast(torch.ones(5), 1)"""


def test_pending_calls_of_a_stuck_rank_are_reported(tmp_path):
    with observed_script(tmp_path, HANG) as (process, run_dir, _):
        assert process.stdout.readline() == "stuck\n"
        request = FlightRequest(run_dir)
        observed = request.observe_rank(0, process.pid, 60.0)
        while "broadcast" not in str(observed.values.get("oldest_pending")):  # not yet issued
            observed = request.observe_rank(0, process.pid, 60.0)
        assert (observed.error, observed.source) == ("", "flight-recorder")
        assert observed.summary == (
            "1 of 2 recorded calls are pending, the oldest is "
            "gloo:broadcast 2 of default_pg (scheduled)"
        )
        assert observed.values["path"] == str(run_dir.flight(0))
        assert b"gloo:" in run_dir.flight(0).read_bytes()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("time.sleep(100)", "torch.distributed is not imported"),
        (
            "ctypes.PyDLL(None).sleep(100)",
            "the rank's background thread does not answer: "
            "the GIL is held, or the process stands still",
        ),
    ],
)
def test_why_there_is_no_answer_is_reported(tmp_path, body, expected):
    with observed_script(tmp_path, body) as (process, run_dir, _):
        is_held = "PyDLL" in body
        observed = FlightRequest(run_dir).observe_rank(0, process.pid, 1.0 if is_held else 30.0)
        while is_held and observed.error == "torch.distributed is not imported":
            # The main thread has not yet come to the call that holds the GIL.
            observed = FlightRequest(run_dir).observe_rank(0, process.pid, 1.0)
        assert (observed.error, observed.values) == (expected, {})
        assert not run_dir.wanted(0, "flight").exists()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("{", "is damaged: Input data was truncated"),
        ('{"entries": [{"state": 3}]}', "is damaged: Expected `str`, got `int`"),
        ('{"entries": [' + "[" * 5000 + "]" * 5000 + "]}", "is damaged: "),
    ],
)
def test_damaged_answers_are_reported(tmp_path, answer, expected):
    run_dir = RunDir(tmp_path, 0)
    run_dir.folder.mkdir()
    run_dir.flight(0).write_text(answer)
    error = FlightRequest(run_dir)._told(0, run_dir.flight(0)).error
    assert error.startswith(f"{run_dir.flight(0)} ")
    assert expected in error


def test_what_is_pending_is_what_neither_completed_nor_was_retired(tmp_path):
    run_dir = RunDir(tmp_path, 0)
    run_dir.folder.mkdir()
    group = '"process_group": ["0", "default_pg"]'
    run_dir.flight(0).write_text(
        f"""{{"version": "2.10", "entries": [
        {{{group}, "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
          "state": "completed", "retired": false}},
        {{{group}, "collective_seq_id": 2, "profiling_name": "nccl:all_gather",
          "state": "started", "retired": false}},
        {{{group}, "p2p_seq_id": 7, "is_p2p": true, "profiling_name": "nccl:send 0->1",
          "state": "scheduled", "retired": true}}]}}"""
    )
    observed = FlightRequest(run_dir)._told(0, run_dir.flight(0))
    assert observed.summary == (
        "1 of 3 recorded calls are pending, the oldest is nccl:all_gather 2 of default_pg (started)"
    )
    assert observed.values["num_pending"] == 1
    assert observed.values["last"] == "nccl:send 0->1 7 of default_pg (scheduled)"


def test_a_run_directory_that_is_gone_is_reported(tmp_path):
    observed = FlightRequest(RunDir(tmp_path / "gone", 0)).observe_rank(0, 1, 1.0)
    assert "does not answer" in observed.error


def test_an_answer_that_cannot_be_written_is_reported(tmp_path):
    with observed_script(tmp_path, "run_dir.flight(0).mkdir(); time.sleep(100)") as (
        process,
        run_dir,
        _,
    ):
        # The rank cannot write its answer: its probe is off, and the request stays.
        observed = FlightRequest(run_dir).observe_rank(0, process.pid, 5.0)
        assert "does not answer" in observed.error
        assert not run_dir.wanted(0, "flight").exists()
