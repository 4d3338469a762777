"""Training on two hosts: one report of all ranks, whatever happens to the cable between them."""

import time
from pathlib import Path

import pytest

from distdiag.events.stacks import Stacks
from distdiag.monitor.monitor import REWRITE_EVERY_S
from distdiag.record.event_reader import EventReader
from distdiag.record.wire import Interner
from distdiag.transports.journal import read_journal
from tests.integration.nodes.hosts import Hosts, NotPermittedError

TRAINING = Path(__file__).with_name("training.py")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def hosts(tmp_path):
    try:
        hosts = Hosts(tmp_path).__enter__()
    except NotPermittedError as error:
        pytest.skip(f"no hosts can be made of network namespaces: {error}")
    yield hosts
    hosts.__exit__()


def line_of(text):
    lines = TRAINING.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def loud(report):
    return {f["code"]: f for f in report["findings"] if f["severity"] != "info"}


def last_calls(report):
    return [info["last"] for info in report["run"]["ranks"]]


def is_training(report):
    return all("#" in last for last in last_calls(report))


def assert_healthy(hosts):
    report = hosts.report()
    assert report["complete"], hosts.describe()
    assert report["run"]["outcome"] == "finished", hosts.describe()
    assert not loud(report), hosts.describe()
    return report


def unseen_ranks(report):
    """The ranks that were not observed."""
    return {key for key in report["not_checked"] if key.startswith("rank")}


def test_healthy_training_has_one_silent_report_of_all_ranks(hosts):
    hosts.start_torchrun(TRAINING, "--kind", "healthy")
    assert hosts.wait() == [0, 0], hosts.describe()
    report = assert_healthy(hosts)
    assert report["findings"] == []
    assert unseen_ranks(report) == set()
    assert [info["fate"] for info in report["run"]["ranks"]] == ["finished", "finished"]
    assert len(list(hosts.folder.rglob("report.json"))) == 1
    assert "distdiag" not in hosts.output(1), hosts.describe()


def test_a_hang_across_the_hosts_is_explained_with_the_stacks_of_both(hosts):
    options = ("--hang-timeout", "5", "--on-hang", "abort")
    hosts.start_ranks(TRAINING, "--kind", "guarded", options=options)
    hosts.wait()
    report = hosts.report()
    assert report["run"]["outcome"] == "aborted", hosts.describe()
    assert set(loud(report)) == {"COL009"}, hosts.describe()
    finding = loud(report)["COL009"]
    assert finding["ranks"] == [0]
    assert finding["location"]["line"] == line_of("dist.all_reduce(torch.ones(1))")
    places = [e["location"]["line"] for e in finding["evidence"] if e["location"]]
    assert line_of("time.sleep(600)") in places, hosts.describe()
    for host in (0, 1):
        path = hosts.run_dir(host) / "attempt-0" / "monitor.journal"
        (stacks,) = [e for e in read_journal(path, Interner()) if isinstance(e, Stacks)]
        assert (stacks.rank, stacks.error) == (host, "")
        lines = {frame.line for thread in stacks.threads for frame in thread.frames}
        assert line_of("time.sleep(600)" if host else "dist.all_reduce(torch.ones(1))") in lines


@pytest.mark.slow
def test_a_mismatch_between_the_hosts_is_named_with_its_line(hosts):
    hosts.start_torchrun(TRAINING, "--kind", "sizes")
    hosts.wait()
    report = hosts.report()
    assert set(loud(report)) == {"COL003"}, hosts.describe()
    finding = loud(report)["COL003"]
    assert finding["ranks"] == [0, 1]
    assert finding["location"]["line"] == line_of("4 + dist.get_rank()")


@pytest.mark.slow
def test_a_cable_that_is_cut_for_a_while_costs_nothing(hosts, tmp_path):
    hosts.start_ranks(TRAINING, "--kind", "healthy", "--pause", "0.1", "--go", str(tmp_path / "go"))
    hosts.until_report(is_training)
    hosts.cut()
    time.sleep(REWRITE_EVERY_S + 1)
    before = last_calls(hosts.report())
    time.sleep(REWRITE_EVERY_S + 1)
    during = last_calls(hosts.report())
    assert during[0] != before[0], hosts.describe()
    assert during[1] == before[1], hosts.describe()
    hosts.mend()
    hosts.until_report(lambda report: last_calls(report)[1] != during[1])
    (tmp_path / "go").touch()
    assert hosts.wait() == [0, 0], hosts.describe()
    report = assert_healthy(hosts)
    assert unseen_ranks(report) == set()
    assert report["findings"] == []


@pytest.mark.slow
def test_a_slow_cable_costs_nothing(hosts):
    try:
        hosts.delay(150)
    except NotPermittedError as error:
        pytest.skip(f"the cable cannot be made slow: {error}")
    hosts.start_torchrun(TRAINING, "--kind", "healthy", "--pause", "0.1")
    assert hosts.wait() == [0, 0], hosts.describe()
    report = assert_healthy(hosts)
    assert unseen_ranks(report) == set()


@pytest.mark.slow
def test_a_monitor_that_is_killed_disturbs_nobody_and_its_rank_is_not_observed(hosts, tmp_path):
    hosts.start_ranks(TRAINING, "--kind", "healthy", "--pause", "0.1", "--go", str(tmp_path / "go"))
    hosts.until_report(is_training)
    hosts.monitor(1).kill()
    hosts.until_report(unseen_ranks)
    (tmp_path / "go").touch()
    assert hosts.wait() == [0, 0], hosts.describe()
    report = assert_healthy(hosts)
    assert unseen_ranks(report) == {"rank 1"}
    assert "not heard of any more" in report["not_checked"]["rank 1"]


@pytest.mark.slow
def test_without_any_connection_both_hosts_keep_all_on_their_disks(hosts, tmp_path):
    hosts.start_ranks(TRAINING, "--kind", "healthy", "--pause", "0.1", "--go", str(tmp_path / "go"))
    monitor = hosts.monitor(1)
    monitor.suspend()
    hosts.until(lambda: "step 1" in hosts.output(1))
    hosts.until((hosts.run_dir(1) / "attempt-0" / "reporter.json").exists)
    hosts.cut()
    monitor.resume()
    time.sleep(5)
    (tmp_path / "go").touch()
    assert hosts.wait() == [0, 0], hosts.describe()
    report = hosts.report()
    assert report["silent_ranks"] == [1], hosts.describe()
    assert set(loud(report)) <= {"DIA002"}, hosts.describe()
    assert "rank 1 did could not all be sent" in hosts.output(1)
    for host in (0, 1):
        folder = hosts.run_dir(host) / "attempt-0"
        assert len(list(EventReader(folder, host).payloads())) > 50
