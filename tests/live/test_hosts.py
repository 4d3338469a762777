"""Asking other nodes, with shell scripts of this machine in the place of ssh."""

import shlex
import time
from pathlib import Path

import psutil
import pytest

from distdiag.events.errors import UsageError
from distdiag.live.hosts import ask_hosts, split_hosts, way_to
from distdiag.live.job_dump import NodeDump

DUMP = NodeDump(hostname="far", ranks=())


@pytest.fixture
def via(tmp_path):
    """Return a function that makes a fake ssh out of the body of a shell script."""

    def make(body):
        script = tmp_path / "via.sh"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return shlex.quote(str(script))

    return make


def ask(hosts, via, *, timeout_s=60.0, command=("distdiag", "dump")):
    said = []
    answers = ask_hosts(hosts, via=via, command=command, timeout_s=timeout_s, say=said.append)
    return answers, said


def test_each_host_gets_the_command_and_answers_with_its_dump(via, tmp_path):
    (tmp_path / "dump").write_bytes(DUMP.to_json())
    script = via(f'echo "$@" > {tmp_path}/"$1.words"; echo Welcome to $1; cat {tmp_path}/dump')
    answers, said = ask(["a", "b"], script)
    assert [(answer.host, answer.dump) for answer in answers] == [("a", DUMP), ("b", DUMP)]
    assert (tmp_path / "b.words").read_text() == "b distdiag dump\n"
    assert len(said) == 2
    assert said[1].endswith("(2 of 2 hosts): 0 ranks")


def test_a_host_that_fails_is_one_line_and_the_rest_goes_on(via, tmp_path):
    (tmp_path / "dump").write_bytes(DUMP.to_json())
    cases = "a) cat dump;; b) echo why >&2; echo 'distdiag: no rank' >&2; exit 2;; c) exit 255;;"
    script = via(f"cd {tmp_path}; case $1 in {cases} d) echo hello;; e) cat dump; exit 1;; esac")
    answers, said = ask(["a", "b", "c", "d", "e"], script)
    assert [answer.error for answer in answers] == [
        "",
        "no rank",
        "ended with status 255",
        "the answer holds no dump",
        "",
    ]
    assert len(said) == 5
    assert not any("\n" in line for line in said)


def is_dead(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_host_that_does_not_answer_in_time_is_given_up_with_all_it_started(via, tmp_path):
    script = via(f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    answers, _ = ask(["a"], script, timeout_s=5.0)
    assert answers[0].error == "no answer within 5 s"
    child = int(Path(tmp_path, "pid").read_text())
    while not is_dead(child):  # pytest-timeout ends a test that waits for ever
        time.sleep(0.05)


def test_a_way_that_does_not_exist_is_reported():
    answers, _ = ask(["a"], "/no/such/ssh {host} --")
    assert answers[0].error == "/no/such/ssh cannot be run: No such file or directory"


@pytest.mark.parametrize("word", ["a b", "$(rm)", "a;b", "'"])
def test_words_that_a_shell_would_change_are_not_sent(word):
    with pytest.raises(UsageError, match="cannot be passed on"):
        ask(["a"], "true", command=("x", word))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ssh", ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "n1"]),
        ("srun", ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n1"]),
        ("srun --jobid 7 -w", ["srun", "--jobid", "7", "-w", "n1"]),
        ("kubectl exec {host} --", ["kubectl", "exec", "n1", "--"]),
        ("'my ssh' -p 22", ["my ssh", "-p", "22", "n1"]),
    ],
)
def test_the_way_to_a_host(given, expected):
    assert way_to("n1", given) == expected


@pytest.mark.parametrize("given", ["", " ", "ssh 'unclosed"])
def test_a_way_that_is_no_command_is_a_mistake_of_usage(given):
    with pytest.raises(UsageError, match="--via"):
        way_to("n1", given)


def test_hosts_are_split_and_named_once():
    assert split_hosts("a, b,a,user@c.d,") == ("a", "b", "user@c.d")


@pytest.mark.parametrize("given", ["", ",", "-oProxyCommand=x", "a,b c", "a;b", "a\nb"])
def test_what_is_no_host_is_a_mistake_of_usage(given):
    with pytest.raises(UsageError, match="host"):
        split_hosts(given)
