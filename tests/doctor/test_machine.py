"""What is told of a machine, and what to do."""

import json
import resource
import socket

import pytest
from click.testing import CliRunner

from distdiag.cli.doctor import command
from distdiag.doctor import machine
from distdiag.doctor.answers import Answer, State, joined, lines, worst


def one(answers, subject):
    (found,) = [answer for answer in answers if answer.subject == subject]
    return found


def test_each_line_names_its_subject_and_what_to_do(tmp_path):
    done = CliRunner().invoke(command, ["--run-dir", str(tmp_path)], standalone_mode=False)
    assert done.return_value in (0, 1)
    assert any(line.startswith("ok       torch ") for line in done.stdout.splitlines())
    assert "stacks" in done.stdout
    assert str(tmp_path) in done.stdout


def test_the_same_is_there_for_programs(tmp_path):
    done = CliRunner().invoke(command, ["--json", "--run-dir", str(tmp_path / "new" / "runs")])
    rows = json.loads(done.stdout)
    assert {"torch", "/dev/shm", "open files"} <= {row["subject"] for row in rows}


def test_few_open_files_are_told_with_the_command():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = one(machine._limits(), "open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.state, found.advice) == (State.DOUBTFUL, "ulimit -n 65536")


@pytest.mark.parametrize(
    ("value", "state"),
    [("nothing0", State.BAD), ("lo", State.GOOD), ("=lo", State.GOOD), ("nothing0,lo", State.GOOD)],
)
def test_an_interface_that_is_not_there_is_a_problem(value, state):
    found = one(machine._network({"NCCL_SOCKET_IFNAME": value}), "NCCL_SOCKET_IFNAME")
    assert found.state is state


def test_interfaces_that_are_left_out_are_not_looked_for():
    subjects = [each.subject for each in machine._network({"NCCL_SOCKET_IFNAME": "^docker0"})]
    assert subjects == ["interfaces"]


def test_a_master_that_nobody_knows_is_a_problem():
    found = one(machine._master({"MASTER_ADDR": "nobody.invalid"}), "MASTER_ADDR")
    assert found.state is State.BAD
    assert "has no address" in found.seen


def test_a_master_that_answers_and_one_that_does_not_yet_are_good():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert "answers" in one(machine._master(environ), "MASTER_ADDR").seen
    later = one(machine._master(environ), "MASTER_ADDR")
    assert (later.state, "nobody listens" in later.seen) == (State.GOOD, True)
    assert list(machine._master({})) == []


def test_the_size_of_the_flight_recorder_is_asked_for():
    assert one(machine._recorder({}), "flight recorder").state is State.DOUBTFUL
    given = machine._recorder({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"})
    assert one(given, "flight recorder").state is State.GOOD


def test_the_folder_of_runs_is_looked_at_where_it_will_be(tmp_path):
    found = one(machine._disk(tmp_path / "not" / "there"), "run directory")
    assert str(tmp_path) in found.seen


def test_what_all_nodes_say_is_said_once_and_what_differs_with_its_ranks():
    same = Answer("torch", State.GOOD, "2.9")
    good, bad = Answer("/dev/shm", State.GOOD, "9"), Answer("/dev/shm", State.DOUBTFUL, "1", "more")
    found = joined({0: [same, good], 8: [same, bad]})
    assert [each.seen for each in found] == ["2.9", "9 (rank 0)", "1 (rank 8)"]
    assert worst(found) is State.DOUBTFUL
    assert lines(found)[-1].endswith("-> more")


def test_nothing_of_a_stranger_reaches_the_terminal():
    assert "\x1b" not in "\n".join(lines([Answer("x", State.BAD, "\x1b[31mred", "do")]))
