"""The page that a monitor writes when its run ends."""

import re

from tests.fake_ranks import FakeJob

FINISH = "rank.all_reduce()\nrank.finish()\n"


def test_the_monitor_leaves_the_page_in_the_run_directory(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, FINISH], report=("html", "terminal")) as job:
        stderr = job.wait()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "html report: " in stderr
    verdict = re.search(r"<h1>(.*?)</h1>", page).group(1)
    assert verdict.startswith("OK: ") and verdict.endswith("nothing found; the run finished")
    assert f"distdiag: {verdict}\n" in stderr
    assert "all_reduce of default_pg at train.py:10" in page
    assert (tmp_path / "run" / "report.html").stat().st_mode & 0o777 == 0o600
