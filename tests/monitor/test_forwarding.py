"""Two nodes beside real processes: one report of all ranks, also when a node is cut off."""

import re

import msgspec
import psutil
import pytest

from distdiag.events.lifecycle import Exited
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Outcome
from distdiag.monitor.peers import listen_for_others
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import Launch, RunDir
from distdiag.record.wire import Interner
from distdiag.transports.journal import read_journal
from tests.fake_nodes import FakeCluster

FINISH = "rank.all_reduce(); rank.finish()\n"
ALIVE = "while True: time.sleep(0.1)\n"
WAIT = f"rank.all_reduce(); rank.all_reduce(done=False)\n{ALIVE}"
WORK_ON = "rank.all_reduce()\nwhile not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.05)\n"


def codes(report):
    return {finding.code for finding in report.findings if finding.severity != "info"}


def statuses(report):
    return {info.rank: info.fate for info in report.run.ranks}


def go(cluster):
    for node in cluster.nodes:
        (node.run_dir.root / "go").touch()


def test_a_healthy_job_has_one_silent_report_of_all_ranks(tmp_path):
    with FakeCluster(tmp_path, [FINISH] * 4) as cluster:
        said = cluster.wait()
        assert [rank.wait(10) for rank in cluster.ranks] == [0] * 4
    report = cluster.report()
    assert report.complete
    assert report.run.outcome is Outcome.FINISHED
    assert report.findings == ()
    assert "ENV005" not in report.not_checked  # the clocks of both nodes were compared
    assert statuses(report) == dict.fromkeys(range(4), "finished")
    assert unseen_ranks(report) == set()
    assert [info.local_rank for info in report.run.ranks] == [0, 1, 2, 3]
    assert "nothing found" in said[0]
    assert said[1] == ""
    assert len(list(tmp_path.rglob("*report*.json"))) == 1 + len(list(tmp_path.rglob("reporter.*")))


def test_ranks_of_different_nodes_that_contradict_one_another_are_reported_at_once(tmp_path):
    bodies = [f"rank.all_reduce({size}, done=False)\n{ALIVE}" for size in (4, 4, 4, 5)]
    with FakeCluster(tmp_path, bodies) as cluster:
        cluster.until_report(lambda report: "COL003" in codes(report))
    (finding,) = cluster.report().findings
    assert list(finding.ranks) == [3]
    assert finding.location.line == 10


def test_the_stacks_of_a_hang_come_from_both_nodes(tmp_path):
    missing = f"rank.all_reduce()\ndef stuck():\n    {ALIVE}stuck()\n"
    bodies = [WAIT, WAIT, WAIT, missing]
    with FakeCluster(tmp_path, bodies, hang_timeout_s=3.0) as cluster:
        cluster.until_report(lambda report: report.run.outcome is Outcome.HUNG)
    (finding,) = [f for f in cluster.report().findings if f.severity == "error"]
    assert list(finding.ranks) == [3]
    assert "rank3.py" in msgspec.json.encode(finding, enc_hook=list).decode()
    for number, node in enumerate(cluster.nodes):
        seen = [e for e in read_journal(node.run_dir.journal, Interner()) if isinstance(e, Stacks)]
        # When the ranks are killed at the end, they are looked at once more, perhaps in vain.
        well = {event.rank for event in seen if not event.error}
        assert well == {2 * number, 2 * number + 1}


@pytest.mark.parametrize(
    ("choice", "ways"),
    [
        ("auto", "tcp"),
        ("tcp", "tcp"),
        ("files", "files: it is kept in the run directories of the nodes"),
        # Whether carriers are in time on a busy machine is no question of right or wrong.
        ("nccl", r"gloo|nccl|tcp \(carriers: .+\)"),
    ],
)
def test_the_report_says_which_way_the_dumps_came(tmp_path, choice, ways):
    missing = f"rank.all_reduce()\ndef stuck():\n    {ALIVE}stuck()\n"
    with FakeCluster(
        tmp_path, [WAIT, missing], hang_timeout_s=3.0, dump_transport=choice
    ) as cluster:
        cluster.until_report(lambda report: report.run.outcome is Outcome.HUNG)
        report = cluster.report()
    assert re.fullmatch(ways, report.run.dump_transport)
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert list(finding.ranks) == [1]
    has_stack = "rank1.py" in msgspec.json.encode(finding, enc_hook=list).decode()
    assert has_stack == (choice != "files")
    journal = read_journal(cluster.nodes[1].run_dir.journal, Interner())
    assert [event.error for event in journal if isinstance(event, Stacks)] == [""]


def test_a_rank_that_dies_on_the_other_node_is_the_first_cause(tmp_path):
    with FakeCluster(tmp_path, [WAIT] * 4) as cluster:
        cluster.until_report(lambda r: all("#1" in info.last for info in r.run.ranks))
        cluster.kill(3)
        cluster.until_report(lambda report: "HNG002" in codes(report))
        for rank in (0, 1, 2):
            cluster.kill(rank)
        cluster.wait()
    report = cluster.report()
    assert report.run.outcome is Outcome.KILLED
    (finding,) = [f for f in report.findings if f.code == "HNG002"]
    assert list(finding.ranks) == [3]
    journal = list(read_journal(cluster.nodes[1].run_dir.journal, Interner()))
    assert {e.rank for e in journal if isinstance(e, Exited)} == {2, 3}


def test_a_rank_that_raises_on_the_other_node_waits_only_for_the_dump_of_its_peers(tmp_path):
    raising = WORK_ON + "rank.fail('no such batch')\n"
    with FakeCluster(tmp_path, [WAIT, WAIT, WAIT, raising]) as cluster:
        cluster.until_report(lambda r: all("#" in info.last for info in r.run.ranks))
        go(cluster)
        assert cluster.ranks[3].wait(30) == 1
        for rank in (0, 1, 2):
            cluster.kill(rank)
        cluster.wait()
    assert float((tmp_path / "node-1" / "waited-3").read_text()) < 3
    report = cluster.report()
    assert "HNG001" in codes(report)
    assert "no such batch" in report.run.ranks[3].last


def test_on_hang_abort_kills_the_ranks_of_both_nodes(tmp_path):
    bodies = [WAIT, WAIT, WAIT, "rank.all_reduce()\n" + ALIVE]
    with FakeCluster(tmp_path, bodies, hang_timeout_s=2.0, on_hang="abort") as cluster:
        cluster.wait()
        assert [rank.wait(5) for rank in cluster.ranks] == [-9] * 4
    report = cluster.report()
    assert report.complete
    assert report.run.outcome is Outcome.ABORTED
    assert "HNG002" not in codes(report)


def unseen_ranks(report):
    """The ranks that were not observed."""
    return {key for key in report.not_checked if key.startswith("rank")}


@pytest.mark.slow  # it waits until the node is given up
def test_a_node_whose_monitor_is_killed_is_not_observed_any_more_and_nothing_else(tmp_path):
    with FakeCluster(tmp_path, [WORK_ON + FINISH] * 4) as cluster:
        cluster.until_report(lambda r: all("#0" in info.last for info in r.run.ranks))
        cluster.nodes[1].monitor.kill()
        cluster.nodes[1].wait()
        cluster.until_report(lambda r: unseen_ranks(r) == {"rank 2", "rank 3"}, timeout_s=40)
        go(cluster)
        cluster.nodes[0].wait()
        assert [rank.wait(10) for rank in cluster.ranks] == [0] * 4
    report = cluster.report()
    assert report.complete
    assert report.run.outcome is Outcome.FINISHED
    assert codes(report) == set()
    assert unseen_ranks(report) == {"rank 2", "rank 3"}
    assert "not heard of any more" in report.not_checked["rank 3"]


@pytest.mark.slow
def test_a_node_that_is_lost_with_its_ranks_is_reported_as_that_and_not_what_comes_of_it(tmp_path):
    closed = "rank.fail('Connection closed by peer', inside_torch=True)\n"
    bodies = [WORK_ON + closed, WORK_ON + closed, WAIT, WAIT]
    with FakeCluster(tmp_path, bodies) as cluster:
        cluster.until_report(lambda r: all("#" in info.last for info in r.run.ranks))
        cluster.nodes[1].monitor.kill()
        for rank in (2, 3):
            cluster.kill(rank)
        go(cluster)
        cluster.nodes[0].wait()
    report = cluster.report()
    assert report.complete
    assert codes(report) == {"HNG018"}
    (finding,) = [each for each in report.findings if each.code == "HNG018"]
    assert list(finding.ranks) == [2, 3]
    assert finding.severity == "error"
    assert report.run.outcome is Outcome.FAILED


def test_a_node_that_cannot_reach_the_reporter_keeps_all_on_its_disk_and_says_so(tmp_path):
    with FakeCluster(tmp_path, [FINISH] * 4, is_connected=False) as cluster:
        said = cluster.wait()
    assert "ranks 2-3 did could not all be sent" in said[1]
    assert str(cluster.nodes[1].run_dir.folder) in said[1]
    report = cluster.report()
    assert list(report.silent_ranks) == [2, 3]
    assert codes(report) <= {"DIA002"}
    for rank in (2, 3):
        assert len(list(EventReader(cluster.nodes[1].run_dir.folder, rank).payloads())) > 5


def test_where_nobody_can_listen_the_others_are_not_observed_and_it_is_said(tmp_path, capsys):
    launch = Launch(
        rank=0,
        local_rank=0,
        world_size=4,
        local_world_size=2,
        attempt=0,
        max_attempts=1,
        parent_pid=1,
        identity="x",
        started_s=0.0,
        master_addr="192.0.2.1",
    )
    others = listen_for_others(RunDir(tmp_path, 0), launch, Interner())
    assert others.source is None
    assert list(others.ranks) == []
    assert "cannot listen at MASTER_ADDR '192.0.2.1'" in others.problem
    assert "ranks 2-3 cannot be compared" in capsys.readouterr().err


def test_a_node_that_connects_late_has_lost_nothing(tmp_path):
    bodies = [WORK_ON + FINISH] * 4
    with FakeCluster(tmp_path, bodies, is_connected=False) as cluster:
        cluster.until_report(lambda r: "#0" in r.run.ranks[0].last)
        cluster.introduce()
        cluster.until_report(lambda r: "#0" in r.run.ranks[3].last)
        go(cluster)
        cluster.wait()
    report = cluster.report()
    assert report.run.outcome is Outcome.FINISHED
    assert report.findings == ()


def test_the_monitors_end_by_themselves_when_the_other_node_is_gone(tmp_path):
    with FakeCluster(tmp_path, [WAIT] * 4) as cluster:
        cluster.until_report(lambda r: all("#1" in info.last for info in r.run.ranks))
        cluster.nodes[0].monitor.kill()
        for rank in range(4):
            cluster.kill(rank)
        pid = cluster.nodes[1].monitor.pid
        assert "could not all be sent" in cluster.nodes[1].wait()
        assert not psutil.pid_exists(pid)
