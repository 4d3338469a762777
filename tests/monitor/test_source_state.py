"""What is told of the source of a program."""

import subprocess

from distdiag.monitor.source_state import look_at_source


def git(folder, *words):
    settings = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(folder), *settings, *words], check=True, capture_output=True)


def test_commit_branch_and_changes_are_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("lr = 1\n")
    git(tmp_path, "init", "-b", "work")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "first")
    clean = look_at_source(str(script), str(tmp_path), 0)
    script.write_text("lr = 2\ntoken = 'hf_abcdefghijklmnop'\n")
    changed = look_at_source(str(script), str(tmp_path), 0)
    assert len(clean.commit) == 40
    assert (clean.branch, clean.changes) == ("work", "")
    assert "+lr = 2" in changed.changes
    assert changed.changes_digest != clean.changes_digest
    assert changed.script_digest != clean.script_digest
    assert "hf_abc" not in changed.changes + changed.script


def test_a_folder_without_git_and_a_script_that_is_none_are_no_error(tmp_path):
    seen = look_at_source(str(tmp_path / "nothing.py"), str(tmp_path), 0)
    assert (seen.commit, seen.script) == ("", "")
