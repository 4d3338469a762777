"""Workflow commands of GitHub Actions, which show a message beside a line of a pull request."""

from collections.abc import Mapping
from typing import Final

from distdiag.findings.finding import Severity
from distdiag.record.visible import visible

LONGEST: Final = 4000
"""One message is cut here, in characters: GitHub keeps 64 KB of an annotation, and shows less."""
_COMMANDS: Final = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "notice",
}


def command(severity: Severity, properties: Mapping[str, str], message: str) -> str:
    """Return one ``::error file=…,line=…,title=…::message`` without a newline.

    The format is GitHub's "Workflow commands for GitHub Actions". Whatever stands in a value, the
    line stays one command: signs that would end the value or the line are escaped.
    """
    parts = ",".join(f"{key}={escaped(value, ',:')}" for key, value in properties.items())
    return f"::{_COMMANDS[severity]} {parts}::{escaped(message)}"


def escaped(value: str, further: str = "") -> str:
    """Return a value in which nothing ends a line, nor the signs in `further` a property."""
    value = value[:LONGEST].encode("utf-8", "backslashreplace").decode()
    for sign in f"%\r\n{further}":
        value = value.replace(sign, f"%{ord(sign):02X}")
    return visible(value)
