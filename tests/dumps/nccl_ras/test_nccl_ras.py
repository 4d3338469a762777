"""NCCL's RAS, played by a real TCP server that speaks its protocol."""

import json
import os
import socket
import threading
from contextlib import contextmanager

import pytest

from distdiag.dumps.nccl_ras import client as nccl_ras
from distdiag.dumps.nccl_ras.client import NcclRas, ask
from distdiag.dumps.nccl_ras.json import parse_json
from distdiag.dumps.nccl_ras.text import parse_text
from tests.dumps.programs import running

COUNTS = {"Broadcast": 0, "Reduce": 0, "AllGather": 2, "ReduceScatter": 0, "AllReduce": 12}
RUNNING = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}


def rank(number, pid, *, status=None, host="127.0.0.1", **counts):
    return {
        "rank": number,
        "host": host,
        "pid": pid,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": RUNNING | (status or {}),
        "collective_counts": COUNTS | counts,
    }


def missing(number, pid, *, dead=False, unresponsive=True):
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    place = {"host": "10.0.0.2", "cuda_dev": number, "nvml_dev": number}
    return {"rank": number, "pid": pid, **place, "status": status}


def answer(*communicators, timeouts=0, version="2.29.2"):
    return {
        "nccl_version": version,
        "cuda_runtime_version": 13000,
        "communicators_count": len(communicators),
        "communicators": [
            {
                "hash": f"0xae{number}",
                "secondary_hash": "0x1:0x2",
                "size": len(ranks) + len(lost),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(lost),
                "ranks": ranks,
                "missing_ranks": lost,
            }
            for number, (ranks, lost) in enumerate(communicators)
        ],
        "ras": {"collection_time_sec": 0.001, "timeouts_count": timeouts},
    }


TEXT = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  INCOMPLETE,MISMATCH
    1         2         2         2         4         8  FINALIZE  MISMATCH
    2         1         1         2         2         2   RUNNING  ERROR

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 900 on node 10.0.0.2 managing GPU 3

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 901 on node 10.0.0.2 managing GPUs 0,1

#0-0 (fa93daea854b060b) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 7 -- GPU 3 (NVML 7) managed by process 900 on node 10.0.0.2

#2-0 (00000000000000aa) ERROR
  Asynchronous error on 1 rank
  Rank 1 reported Remote process error -- GPU 1 managed by process 812 on node 127.0.0.1

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  5 ranks have launched up to operation 640
  Rank 2 has launched up to operation 639 -- GPU 2 managed by process 813 on node 127.0.0.1
  Rank 3 has not launched any operations -- [process information not found]

  Communicator ranks have different AllReduce operation counts
  4 ranks have launched up to operation 3
  3 ranks have launched up to operation 5
  Rank 0 -- GPU 0 managed by process 811 on node 127.0.0.1
  Rank 1 -- GPU 1 managed by process 812 on node 127.0.0.1
  Rank 5 -- GPU 1 managed by process 915 on node 10.0.0.2

#1-1 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  2 ranks have status RUNNING
  Rank 0 -- GPU 0 managed by process 811 on node 127.0.0.1
  Rank 1 -- GPU 1 managed by process 812 on node 127.0.0.1
  Rank 3 has status FINALIZE -- GPU 3 managed by process 814 on node 127.0.0.1

"""

# NCCL 2.24 and 2.25 count all operations together, and list the missing by number.
OLD_TEXT = """
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
   10         1         4       7-8        32        32   RUNNING  INCOMPLETE

#10-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 21,22

#10-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different collective operation counts
  29 ranks have launched up to operation 6650
  Rank 4 has launched up to operation 6649 -- GPU 4 managed by process 507289 on node 10.0.0.9

"""


class Server:
    """One thread for each connection, as a process of the job would answer."""

    def __init__(self, report, *, knows_json=True, greeting="SERVER PROTOCOL 2", silent=0):
        self._report = report
        self._replies = {"client": greeting, "timeout": "OK", "set": "OK"}
        if not knows_json:
            self._replies["set"] = "ERROR: Unknown command SET FORMAT json"
        self._silent = silent
        self.commands = []

    @contextmanager
    def listening(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=self._accept, args=(server,))
            thread.start()
            try:
                yield f"127.0.0.1:{server.getsockname()[1]}"
            finally:
                server.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _accept(self, server):
        quiet = []
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                break
            if self._silent:
                self._silent -= 1
                quiet.append(connection)
                continue
            with connection, connection.makefile("rw") as lines:
                self._talk(lines)
        for connection in quiet:
            connection.close()

    def _talk(self, lines):
        for line in lines:
            self.commands.append(line.strip())
            if line.startswith("VERBOSE STATUS"):
                lines.write(self._report)
                return
            reply = self._replies[line.split()[0].lower()]
            if reply is None:
                return
            lines.write(f"{reply}\n")
            lines.flush()


@contextmanager
def process_of(address, **environment):
    code = "import time; print('ready', flush=True); time.sleep(100)"
    env = {**os.environ, "NCCL_RAS_ADDR": address, **environment}
    with running(code, env=env) as process:
        yield process.pid


def observe(server, pids_of, timeout_s=30.0):
    with server.listening() as address, process_of(address) as pid:
        return NcclRas().observe(pids_of(pid), timeout_s)


def test_the_rank_that_is_behind_is_named_from_json():
    with process_of("unused") as first, process_of("unused") as second:
        report = answer(([rank(0, first), rank(1, second, AllReduce=11)], []))
        server = Server(json.dumps(report))
        with server.listening() as address, process_of(address) as asked:
            pids = {4: asked, 5: first, 6: second}
            observed = {event.rank: event for event in NcclRas().observe(pids, 30.0)}
    assert server.commands == [
        "CLIENT PROTOCOL 2",
        "TIMEOUT 24",
        "SET FORMAT json",
        "VERBOSE STATUS",
    ]
    assert [event.error for event in observed.values()] == ["", "", ""]
    assert observed[6].summary == (
        "NCCL says that it has launched 11 AllReduce operations in communicator 0xae0, and "
        "others 12"
    )
    assert observed[6].values["operations_behind"] == 1
    assert observed[5].values["operations_behind"] == 0
    assert observed[5].summary == (
        "NCCL 2.29.2 sees 1 communicator; in communicator 0xae0 of 2 ranks, rank 6: "
        "11 AllReduce operations launched, others 12"
    )


def test_an_older_nccl_answers_in_text():
    server = Server(TEXT, knows_json=False)
    (observed,) = observe(server, lambda pid: {0: pid})
    assert observed.error == ""
    assert observed.values["nccl_version"] == "2.26.2"
    assert observed.values["num_communicators"] == 4
    assert observed.values["num_timeouts"] == 2
    assert observed.values["differences"].splitlines()[-1] == (
        "process 901 on 10.0.0.2 is considered dead"
    )
    assert server.commands[-1] == "VERBOSE STATUS"


def test_a_healthy_job_is_reported_to_be_healthy():
    report = answer(([rank(0, 0), rank(1, 0)], []), ([rank(0, 0)], []))
    (observed,) = observe(Server(json.dumps(report)), lambda pid: {0: pid})
    assert observed.summary == "NCCL 2.29.2 sees 2 communicators, all equal"
    assert observed.values["differences"] == ""


def test_what_the_text_says_of_communicators():
    status = parse_text(TEXT)
    first, error, closing = status.communicators
    assert (first.name, first.size, first.num_missing) == ("0xfa93daea854b060b", 8, 1)
    assert [(m.rank, m.pid, m.host) for m in first.missing] == [(7, 900, "10.0.0.2")]
    assert [
        (lag.op, lag.launched, lag.most, lag.num_members, [m.rank for m in lag.members])
        for lag in first.lags
    ] == [
        ("AllGather", 639, 640, 1, [2]),
        ("AllGather", 0, 640, 1, [3]),
        ("AllReduce", 3, 5, 4, []),  # NCCL names the three that are ahead
    ]
    assert [(m.rank, m.pid, m.note) for m in error.odd] == [(1, 812, "Remote process error")]
    assert [(m.rank, m.note) for m in closing.odd] == [(3, "status FINALIZE")]
    assert [(m.pid, m.host) for m in status.dead] == [(901, "10.0.0.2")]


def test_what_older_text_says():
    (communicator,) = parse_text(OLD_TEXT).communicators
    assert (communicator.size, communicator.num_missing) == (32, 2)
    assert [member.rank for member in communicator.missing] == [21, 22]
    (lag,) = communicator.lags
    assert (lag.op, lag.launched, lag.most) == ("collective", 6649, 6650)
    assert lag.members[0].pid == 507289


def test_what_json_says_of_communicators():
    told = answer(
        ([rank(0, 1, status={"init_state": 7}), rank(1, 2, status={"async_error": 6})], []),
        (
            [rank(0, 1, status={"abort_flag": True}), rank(1, 2, status={"destroy_flag": True})],
            [missing(2, 3), missing(3, 4, dead=True), missing(4, 5, unresponsive=False)],
        ),
        timeouts=3,
    )
    status = parse_json(json.dumps(told).encode())
    first, second = status.communicators
    assert [m.note for m in first.odd] == ["being initialized", "remote process error"]
    assert [m.note for m in second.odd] == ["aborted", "being finalized"]
    assert [m.note for m in second.missing] == [
        "unresponsive",
        "considered dead",
        "no member (any more, or yet)",
    ]
    assert [member.pid for member in status.dead] == [4]
    assert (status.num_timeouts, status.pids) == (3, {1, 2, 3, 4, 5})


def test_the_comma_that_some_versions_forget_is_put_in():
    told = json.dumps(answer(([rank(0, 1)], [missing(1, 2)]), version="2.28.9"), indent=2)
    broken = told.replace('"nvml_dev": 1,', '"nvml_dev": 1')
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    (communicator,) = parse_json(broken.encode()).communicators
    assert [member.note for member in communicator.missing] == ["unresponsive"]


def test_processes_of_another_job_are_not_believed():
    report = answer(([rank(0, 1), rank(1, 2, AllReduce=3)], []))
    (observed,) = observe(Server(json.dumps(report)), lambda pid: {0: pid})
    assert observed.error.endswith(" are of another job")


def test_a_process_that_does_not_greet_is_left_for_another(monkeypatch):
    monkeypatch.setattr(nccl_ras, "GREETING_S", 0.2)
    with Server(TEXT, knows_json=False, silent=2).listening() as address:
        assert ask(address, 30.0).nccl_version == "2.26.2"


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server("", greeting="HTTP/1.1 400"), "not NCCL, since it answers 'HTTP/1.1 400'"),
        (Server("{"), "Input data was truncated"),
        (Server('{"communicators": 3}'), "Expected `array`, got `int`"),
        (Server("", greeting=None), "the connection was closed in the middle of an answer"),
    ],
    ids=["somebody else", "cut", "foreign", "closed"],
)
def test_wrong_answers_are_reported(server, expected):
    (observed,) = observe(server, lambda pid: {0: pid})
    assert expected in observed.error
    assert observed.values == {}


def test_no_answer_is_reported(monkeypatch):
    monkeypatch.setattr(nccl_ras, "GREETING_S", 0.2)
    (observed,) = observe(Server("", silent=9), lambda pid: {0: pid}, timeout_s=0.5)
    assert observed.error.endswith(" gave no answer within 0.5 s")


def test_a_port_where_nobody_listens_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with process_of(address) as pid:
        errors = {event.error for event in NcclRas().observe({0: pid, 1: pid}, 5.0)}
    (error,) = errors
    assert error.startswith(f"nobody listens at {address}: NCCL is not in use")


def test_ras_that_is_switched_off_is_reported():
    with process_of("127.0.0.1:1", NCCL_RAS_ENABLE="0") as pid:
        (observed,) = NcclRas().observe({0: pid}, 5.0)
    assert observed.error == "NCCL RAS is off: NCCL_RAS_ENABLE is 0"


def test_an_address_that_is_none_is_reported():
    with process_of("nowhere") as pid:
        (observed,) = NcclRas().observe({0: pid}, 5.0)
    assert observed.error.startswith("NCCL at nowhere: ")


def test_no_rank_is_nothing_to_ask_for():
    assert NcclRas().observe({}, 5.0) == ()


def test_text_that_makes_no_sense_is_passed_over():
    status = parse_text("\x00#0-0 (zz) MISMATCH\n  Rank 5 -- GPU\n  3 ranks have\n" + "x" * 100_000)
    assert status.communicators == ()
