"""Programs that shard by a plan, under a real launcher: what contradicts the plan is named."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("planned.py")

pytestmark = pytest.mark.timeout(300)

slow = pytest.mark.slow


def findings(way, *args, table=None, tmp_path=None):
    """Run one way of the script to its end; return the findings about plans, and all alarms."""
    options = ["--fail-on", "never"]
    if table is not None:
        config = tmp_path / "plan.toml"
        config.write_text("[plan]\n" + table)
        options += ["--config", str(config)]
    outcome = run_checked(SCRIPT, [way, *args], options=options)
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("trained") == 2, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    plans = {"SHD014", "SHD015", "SHD016", "SHD017"}
    found = [f for f in outcome.report["findings"] if f["code"] in plans]
    return found, [f["code"] for f in outcome.alarms]


def line_of(text):
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


EXPERTS = '"layers.*.weight" = "Shard(0) over ep"'


@pytest.mark.parametrize(
    ("way", "table", "code", "subject", "words"),
    [
        ("whole_experts", EXPERTS, "SHD015", "layers.0.weight", "there is R over ep"),
        pytest.param(
            *("fsdp_only", '"*.up.weight" = "Shard(0) over tp"'),
            *("SHD015", "layers.0.up.weight", "S(0)"),
            marks=slow,
        ),
        pytest.param(
            *("sharded_experts", EXPERTS.replace("lay", "model.lay")),
            *("SHD014", "model.layers.*.weight", '"layers.*.weight" is there'),
            marks=slow,
        ),
        pytest.param(
            *("sharded_experts", EXPERTS + '\n"*" = "Replicate over *"'),
            *("SHD016", "layers.0.weight", "over ep"),
            marks=slow,
        ),
    ],
    ids=["replicated", "no axis", "prefix", "ambiguous"],
)
def test_what_contradicts_the_users_table(tmp_path, way, table, code, subject, words):
    (finding,), alarms = findings(way, table=table, tmp_path=tmp_path)
    assert alarms == [finding["code"]] == [code]
    assert finding["subjects"][0] == subject
    assert words in finding["message"]
    assert finding["ranks"] == [0, 1]


def test_a_model_that_is_as_the_table_says(tmp_path):
    table = EXPERTS + '\n"layers.0.*" = "Shard(0) over ep, Replicate over *"'
    assert findings("sharded_experts", table=table, tmp_path=tmp_path) == ([], [])


def test_a_mistake_in_the_table_is_an_error_of_usage(tmp_path):
    config = tmp_path / "plan.toml"
    config.write_text('[plan]\n"layers.*" = "Shard(0)"\n')
    outcome = run_checked(SCRIPT, ["split"], options=["--config", str(config)], nproc=0)
    assert outcome.exit_status == 2, outcome.describe()
    assert 'key "plan.layers.*": expected "Shard(0) over ep"' in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("way", "code", "subject", "line"),
    [
        ("misspelt", "SHD014", "layers.*.upp", "parallelize_module(Model()"),
        pytest.param(
            *("reloaded", "SHD015", "layers.0.up.weight", "parallelize_module(Model()"), marks=slow
        ),
        ("veomni_prefix", "SHD014", "model.layers.*.weight", "ParallelPlan({"),
        pytest.param("veomni_uneven", "SHD017", "layers.0.weight", "ParallelPlan({", marks=slow),
    ],
)
def test_what_contradicts_the_programs_own_plan(way, code, subject, line):
    (finding,), alarms = findings(way)
    assert alarms == [finding["code"]] == [code]
    assert finding["subjects"][0] == subject
    assert finding["location"]["line"] == line_of(line)


@pytest.mark.parametrize("way", [pytest.param("split", marks=slow), "staged"])
def test_plans_that_fit_are_silent(way):
    assert findings(way) == ([], [])


def test_what_veomni_splits_fits_a_table_though_the_parts_are_plain(tmp_path):
    assert findings("veomni", table=EXPERTS, tmp_path=tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("way", "subjects"),
    [
        pytest.param("transformers", [], marks=slow),
        ("transformers_general", [["model.layers.*.mlp.router"]]),
    ],
)
def test_rules_of_transformers_that_a_model_lacks_are_a_note(tmp_path, way, subjects):
    pytest.importorskip("transformers.distributed")
    found, alarms = findings(way, str(tmp_path / "llama"))
    assert alarms == []
    assert [finding["subjects"] for finding in found] == subjects
    assert all(finding["code"] == "SHD014" for finding in found)
