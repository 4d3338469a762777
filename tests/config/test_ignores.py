"""The key `ignore` of a configuration: checks to leave out, and rules for findings."""

import pytest

from distdiag.config import Config, load_config
from distdiag.config.ignores import IgnoreRule
from distdiag.events.errors import UsageError

CODES = ("COL003", "REP001")


def load(tmp_path, text, **flags):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load_config({"config": path, **flags})


@pytest.mark.parametrize(
    ("text", "codes", "rules"),
    [
        ('ignore = ["COL"]', ("COL",), ()),
        ("ignore = []", (), ()),
        (
            '[ignore]\ncodes = ["REP001"]\nreason = "x"',
            (),
            (IgnoreRule(codes=("REP001",), reason="x"),),
        ),
        (
            '[[ignore]]\ncodes = ["REP001"]\nreason = "x"\n'
            '[[ignore]]\ncodes = ["COL"]\npath = "a/*.py"\nsubject = "ema"\nreason = "y"',
            (),
            (
                IgnoreRule(codes=("REP001",), reason="x"),
                IgnoreRule(codes=("COL",), path="a/*.py", subject="ema", reason="y"),
            ),
        ),
        (
            'ignore = ["COL", {codes = ["REP001"], reason = "x"}]',
            ("COL",),
            (IgnoreRule(codes=("REP001",), reason="x"),),
        ),
    ],
)
def test_codes_and_rules_may_stand_in_one_list(tmp_path, text, codes, rules):
    config = load(tmp_path, text)
    assert (config.ignore, config.ignored) == (codes, rules)
    assert Config.from_json(config.to_json()) == config


def test_the_flag_replaces_the_codes_and_leaves_the_rules(tmp_path):
    text = 'ignore = ["COL", {codes = ["REP001"], reason = "x"}]'
    config = load(tmp_path, text, ignore=("NUM",))
    assert (config.ignore, len(config.ignored)) == (("NUM",), 1)


@pytest.mark.parametrize(
    "text",
    [
        "ignore = 3",
        "ignore = [3]",
        "[ignore]\ncodes = []\nreason = 'x'",
        "[ignore]\ncodes = ['REP001']",
        "[ignore]\ncodes = ['REP001']\nreason = ''",
        "[ignore]\ncodes = ['REP001']\nreason = ' '",
        "[ignore]\nreason = 'x'",
        "[ignore]\ncodes = ['REP001']\nreason = 'x'\nfile = 'y'",
    ],
)
def test_a_rule_without_codes_or_reason_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match=r'x\.toml: key "ignore": expected codes, or tables'):
        load(tmp_path, text)


def test_a_rule_of_an_unknown_check_is_refused():
    config = Config(ignored=(IgnoreRule(codes=("REP00",), reason="x"),))
    config.validate(codes=CODES, reporters=("terminal", "json"))
    config = Config(ignored=(IgnoreRule(codes=("REP9",), reason="x"),))
    with pytest.raises(UsageError, match='unknown code or prefix "REP9"'):
        config.validate(codes=CODES, reporters=("terminal", "json"))


@pytest.mark.parametrize("report", [None, ("sarif", "json"), ("github",)])
def test_a_step_of_github_actions_shows_its_own_form_once(monkeypatch, report):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    shown = load_config({"report": report}).report
    assert shown.count("github") == 1
    monkeypatch.setenv("GITHUB_ACTIONS", "false")
    assert load_config({"report": report}).report == (report or ("terminal", "json"))


def test_who_asks_for_json_alone_wants_nothing_shown_in_github_actions(monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert load_config({"report": ("json",)}).report == ("json",)


def test_a_baseline_is_named_from_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_config({"baseline": "known.json"}).baseline == tmp_path / "known.json"
