from distdiag.checks.dat.best_by_local_metric import BestByLocalMetric
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.data import LocalEvaluationView
from tests.checks.feeds import epoch_fed
from tests.checks.races import access
from tests.checks.streams import Program
from tests.checks.verdicts import findings

CODE = """
    def main():
        loss = evaluate(model, loader)
        if rank == 0 and loss < best:
            best = loss
            save("best.pt")
        if rank == 0 and epoch % 2 == 0:
            save("last.pt")
"""


def judged(tmp_path, text):
    program = Program(tmp_path, CODE)
    write = access(0, "write", program.site(f'save("{text}")'), path=f"/d/{text}").event
    passes = {rank: epoch_fed(rank, range(rank, 32, 2), num_backwards=0) for rank in (0, 1)}
    return findings(BestByLocalMetric, LocalEvaluationView(passes, {0: write}, 3))


def test_the_best_by_the_part_of_one_rank_is_named(tmp_path):
    (finding,) = judged(tmp_path, "best.pt")
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0]))
    assert finding.location.source == "if rank == 0 and loss < best:"
    assert "rank 0 keeps best.pt as the best by the samples of one rank" in finding.message
    assert "16 on rank 0, 16 on rank 1" in finding.evidence[0].summary
    assert finding.evidence[1].summary.endswith("3 times")


def test_what_is_written_at_times_is_silent(tmp_path):
    assert not judged(tmp_path, "last.pt")
