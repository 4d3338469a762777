"""Where a configuration comes from, which source wins, and how mistakes in it are reported."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from distdiag.cli.options import check_options, to_arguments
from distdiag.config import KEYS, TABLES, Config, load_config
from distdiag.config.placement_rules import rules_of
from distdiag.config.subjects import SequenceConfig
from distdiag.events.errors import DamagedFileError, UsageError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parse(*arguments):
    """Return what the options of a check run hand to its command."""
    seen = {}

    @click.command()
    @check_options
    def command(**flags):
        seen.update(flags)

    result = CliRunner().invoke(command, arguments)
    return result, seen


def write(text, name="some.toml"):
    Path(name).write_text(text)
    return {"config": name}


def test_without_any_source_the_defaults_hold():
    assert load_config({}) == Config()
    _, flags = parse()
    assert set(flags.values()) == {None}
    assert load_config(flags) == Config()


def test_the_file_overrules_the_defaults_and_flags_overrule_the_file():
    flags = write('profile = "light"\nselect = ["COL"]\nstrict = true\n')
    config = load_config(flags | {"profile": "light", "strict": None})
    assert config == Config(profile="light", select=("COL",), strict=True)


def test_a_flag_can_take_back_what_the_file_switched_on():
    assert load_config(write("strict = true") | {"strict": False}).strict is False


def test_the_file_in_the_current_directory_is_read_unless_another_is_named():
    write('profile = "light"', "distdiag.toml")
    assert load_config({}).profile == "light"
    assert load_config(write('profile = "light"')).profile == "light"


def test_every_key_can_be_set_with_either_spelling():
    text = """
        profile = "light"
        select = ["COL"]
        ignore = ["COL010"]
        run{s}dir = "runs/1"
        overwrite = true
        keep{s}runs = 3
        keep{s}events = 9
        report = ["json"]
        verbose = true
        quiet = true
        fail{s}on = "never"
        hang{s}timeout = 5
        on{s}hang = "abort"
        dump{s}transport = "tcp"
        strict = true
        strict{s}timeout = 2.5
        poison{s}empty = true
        verify{s}sequence = true
        parity{s}task = "task.json"
        routing{s}task = "routing.json"
        baseline = "/known.json"
    """
    expected = Config(
        profile="light",
        select=("COL",),
        ignore=("COL010",),
        run_dir=Path("runs/1"),
        overwrite=True,
        keep_runs=3,
        keep_events=9,
        report=("json",),
        verbose=True,
        quiet=True,
        fail_on="never",
        hang_timeout_s=5.0,
        on_hang="abort",
        dump_transport="tcp",
        strict=True,
        strict_timeout_s=2.5,
        poison_empty=True,
        verify_sequence=True,
        parity_task="task.json",
        routing_task="routing.json",
        baseline=Path("/known.json"),
    )
    assert text.count("=") == len(KEYS) == len(Config.__struct_fields__) - len(TABLES)
    assert load_config(write(text.format(s="_"))) == expected
    assert load_config(write(text.format(s="-"))) == expected


def test_the_table_of_placements_becomes_rules_in_their_order():
    text = "strict = true\n[plan]\n'b.*' = 'Shard(0) over ep'\n'a' = 'Replicate over *'\n"
    rules = load_config(write(text) | {"strict": False}).plan
    assert [(rule.pattern, str(rule)) for rule in rules] == [
        ("b.*", "Shard(0) over ep"),
        ("a", "Replicate over *"),
    ]


def test_the_table_of_sequences_names_functions():
    text = "verify_sequence = true\n[sequence]\nsplit = ['a.b:c']\ngather = ['a.b:D.e']\ndim = 0\n"
    config = load_config(write(text))
    assert config.active_modes == ("verify-sequence",)
    assert config.sequence == SequenceConfig(split=("a.b:c",), gather=("a.b:D.e",), dim=0)
    assert Config.from_json(config.to_json()) == config


def test_auto_stands_for_an_adapting_threshold():
    assert load_config(write('hang_timeout = "auto"')).hang_timeout_s is None
    assert load_config(write("hang_timeout = 9") | {"hang_timeout": "auto"}).hang_timeout_s is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("profil = 'deep'", "unknown key 'profil' (did you mean \"profile\"?)"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("[distdiag]\nprofile = 'deep'", "unknown key 'distdiag'"),
        ("'a\\nb' = 1", "unknown key 'a\\\\nb'"),
        ("profile = 'deepest'", 'key "profile": expected one of light, standard'),
        ("[sequence]\nsplit = ['a:b']", 'key "sequence": split names 1 and gather 0: each'),
        ("[sequence]\nsplit = ['ab']\ngather = ['a:b']", 'key "sequence": Expected `str` matching'),
        ("[sequence]\nlenght = 3", 'key "sequence": Object contains unknown field `lenght`'),
        ("profile = 3", 'key "profile": expected one of light, standard, got 3'),
        ("on-hang = true", 'key "on-hang": expected one of report, abort, got True'),
        ("select = 'COL'", 'key "select": Expected `array`, got `str`'),
        ("select = [1]", 'key "select": Expected `str`, got `int`'),
        ("strict = 1", 'key "strict": Expected `bool`, got `int`'),
        ("run_dir = 1", 'key "run_dir": Expected `str`, got `int`'),
        ("hang_timeout = 'soon'", 'key "hang_timeout": '),
        ("hang_timeout = 0", 'key "hang_timeout": Expected `float` > 0'),
        ("hang_timeout = true", 'key "hang_timeout": '),
        ("strict_timeout = -1", 'key "strict_timeout": Expected `float` > 0'),
        ("strict_timeout = nan", 'key "strict_timeout": Expected `float` > 0'),
        ("strict_timeout = inf", 'key "strict_timeout": Expected `float` <= 1'),
        ("on_hang = 'abort'\non-hang = 'abort'", 'key "on-hang" is given twice'),
        ("profile = ", "not valid TOML: Invalid value"),
        ("plan = 1", 'key "plan": expected a table of patterns and placements'),
        ("[plan]\na = 1", 'key "plan.a": expected "Shard(0) over ep" or "Replicate over *"'),
        (
            "[plan]\na.b = 'x'",
            'key "plan.a": expected text; write a pattern that has dots in quotes',
        ),
        ("[plan]\n'a.*' = 'Shard(0)'", 'key "plan.a.*": expected "Shard(0) over ep"'),
        ("[plan]\n'' = 'Replicate over *'", 'key "plan.": the pattern is empty'),
        ("[plan]\n'a\nb' = 1", "not valid TOML: "),
        ("[pan]\na = 1", "unknown key 'pan' (did you mean \"plan\"?)"),
        ("a = " + "[" * 100_000, "not valid TOML: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_file_and_key(text, problem):
    with pytest.raises(UsageError) as caught:
        load_config(write(text))
    assert str(caught.value).startswith(f"some.toml: {problem}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named():
    with pytest.raises(UsageError, match=r"^gone\.toml: cannot be read: No such file"):
        load_config({"config": "gone.toml"})
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"^binary\.toml: not valid TOML: "):
        load_config({"config": "binary.toml"})
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=r"^folder: cannot be read: Is a directory"):
        load_config({"config": "folder"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_are_valid(path):
    assert load_config({"config": str(path)}).report


def test_the_shipped_standard_file_says_what_the_defaults_are():
    (standard,) = (path for path in CONFIGS if path.name == "standard.toml")
    config = load_config({"config": str(standard)})
    assert config.selection.selects("COL001")
    assert config == Config(select=config.select)


def test_flags_survive_the_way_through_another_command_line():
    arguments = [
        *("--profile", "light", "--select", "COL,HNG001", "--ignore", "COL010", "--run-dir", "a b"),
        *("--no-overwrite", "--report", "json", "--fail-on", "never", "--hang-timeout", "7.5"),
        *("--on-hang", "abort", "--strict", "--strict-timeout", "3", "--config", "x.toml"),
    ]
    result, flags = parse(*arguments)
    assert result.exit_code == 0
    assert flags["select"] == ("COL", "HNG001")
    assert flags["hang_timeout"] == 7.5
    assert parse(*to_arguments(flags))[1] == flags
    assert parse(*to_arguments(parse("--hang-timeout=auto")[1]))[1]["hang_timeout"] == "auto"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--profile", "deepest"),
        ("--fail-on", "info"),
        ("--on-hang", "wait"),
        ("--dump-transport", "pigeon"),
        ("--hang-timeout", "0"),
        ("--hang-timeout", "nan"),
        ("--hang-timeout", "soon"),
        ("--strict-timeout", "auto"),
        ("--select", ","),
        ("--report", ""),
        ("--bogus",),
    ],
)
def test_a_wrong_flag_is_refused(arguments):
    result, _ = parse(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_every_flag_has_a_key_in_the_file():
    _, flags = parse()
    assert set(flags) == {*KEYS, "config"}


def test_names_of_checks_and_reports_are_validated():
    known = {"codes": ("COL001",), "reporters": ("json", "terminal")}
    Config(select=("COL",)).validate(**known)
    with pytest.raises(UsageError, match=r'^unknown code or prefix "XYZ"$'):
        Config(ignore=("XYZ",)).validate(**known)
    with pytest.raises(UsageError, match=r'^unknown report "pdf" \(there are: json, terminal\)$'):
        Config(report=("json", "pdf")).validate(**known)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(run_dir=Path("a/b"), hang_timeout_s=1.5, select=("COL",)),
        Config(plan=rules_of({"a.*": "Shard(0) over ep, Replicate over *"})),
    ],
)
def test_a_configuration_survives_the_way_to_another_process(config):
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", [b"", b"[]", b'{"profile": "x"}', b'{"a": 1}', b"\xff"])
def test_something_else_is_not_taken_for_a_configuration(text):
    with pytest.raises(DamagedFileError, match="not a distdiag configuration"):
        Config.from_json(text)


def test_the_configuration_imports_neither_torch_nor_rich():
    program = "import sys, distdiag.config; print({'torch', 'rich'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n"


def test_modules_that_route_can_be_named():
    config = load_config(write('[routing]\nmodules = ["*.dispatcher"]\n'))
    assert config.routing.modules == ("*.dispatcher",)
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("table", ["modules = [1]", 'modules = [""]', "module = []"])
def test_a_routing_table_that_is_none_is_refused(table):
    with pytest.raises(UsageError, match="routing"):
        load_config(write(f"[routing]\n{table}\n"))


@pytest.mark.parametrize("table", ["aux_loss", "aux-loss"])
def test_the_table_of_auxiliary_losses_declares_their_coefficient(table):
    config = load_config(write(f"[{table}]\ncoefficient = 0.01\n"))
    assert config.aux_loss.coefficient == 0.01
    assert Config.from_json(config.to_json()) == config
    assert load_config({}).aux_loss.coefficient == 0.0


@pytest.mark.parametrize("table", ['coefficient = "1"', "coefficient = -0.1", "coef = 0.1"])
def test_a_table_of_auxiliary_losses_that_is_none_is_refused(table):
    with pytest.raises(UsageError, match="aux_loss"):
        load_config(write(f"[aux_loss]\n{table}\n"))
