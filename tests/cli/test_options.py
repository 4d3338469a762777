"""All options of all commands are called alike, and say what they do and their defaults."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from distdiag.cli import _distdiag
from distdiag.cli.show import format_option, report_option


def commands_of(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{prefix}{name} ")


COMMANDS = dict(commands_of(_distdiag))


def options_of(command: click.Command) -> Iterator[click.Option]:
    yield from (p for p in command.params if isinstance(p, click.Option) and not p.hidden)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_says_its_default(name):
    for option in options_of(COMMANDS[name]):
        assert option.help, option.opts
        if isinstance(option.default, str | int | float) and option.default and not option.is_flag:
            assert re.search(r"\[.+\]", option.help), (option.opts, option.default)


@pytest.mark.parametrize("name", COMMANDS)
def test_forms_of_output_are_asked_for_alike(name):
    spelled = [set(option.opts) for option in options_of(COMMANDS[name])]
    assert any({"--format"} <= each for each in spelled) is ({"--json"} in spelled)
    assert all("-o" in each for each in spelled if "--output" in each)


@click.command()
@format_option(["text", "json"], "text")
def _one(name: str) -> None:
    click.echo(name)


@click.command()
@report_option("pytest")
def _several(report_formats: tuple[str, ...]) -> None:
    click.echo(",".join(report_formats))


@pytest.mark.parametrize(
    ("command", "arguments", "shown"),
    [
        (_one, [], "text"),
        (_one, ["--json"], "json"),
        (_one, ["--format", "json"], "json"),
        (_several, [], "terminal"),
        (_several, ["--json"], "json"),
        (_several, ["--format", "html,junit", "--report", "html"], "html,junit"),
        (_several, ["--format", "pytest"], "pytest"),
    ],
)
def test_json_is_short_for_its_format(command, arguments, shown):
    assert CliRunner().invoke(command, arguments).output == f"{shown}\n"


@pytest.mark.parametrize("command", [_one, _several])
@pytest.mark.parametrize("arguments", [["--json", "--format", "json"], ["--format", "pdf"]])
def test_what_cannot_be_meant_is_refused(command, arguments):
    assert CliRunner().invoke(command, arguments).exit_code != 0


def test_the_shell_is_offered_commands_and_options():
    def completed(*words):
        environ = {
            "_DISTDIAG_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        program = "from distdiag.cli import main; main([])"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=os.environ | environ, capture_output=True, text=True, timeout=100
        )
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("distdiag", "di") == {"diagnose"}
    assert {"--format", "--fail-on"} <= completed("distdiag", "report", "--f")
