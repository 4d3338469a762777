"""What of SARIF 2.1.0 distdiag writes, as the standard has it: no other member, no other value."""

from typing import Annotated, Any, Literal

import msgspec


class _Part(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    pass


Level = Literal["none", "note", "warning", "error"]
Line = Annotated[int, msgspec.Meta(ge=1)]


class Message(_Part):
    text: str


class ArtifactLocation(_Part):
    uri: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]*$")]


class Region(_Part):
    start_line: Line
    start_column: Line | msgspec.UnsetType = msgspec.UNSET
    end_line: Line | msgspec.UnsetType = msgspec.UNSET


class PhysicalLocation(_Part):
    artifact_location: ArtifactLocation
    region: Region


class Place(_Part):
    physical_location: PhysicalLocation
    message: Message | msgspec.UnsetType = msgspec.UNSET


class Suppression(_Part):
    kind: Literal["inSource", "external"]
    justification: str


class Result(_Part):
    rule_id: str
    level: Level
    message: Message
    locations: list[Place]
    related_locations: list[Place] = []
    rank: Annotated[float, msgspec.Meta(ge=-1, le=100)] = -1.0
    partial_fingerprints: dict[str, str] = {}
    suppressions: list[Suppression] = []
    properties: dict[str, Any] = {}


class Configuration(_Part):
    level: Level


class Rule(_Part):
    id: str
    name: str
    short_description: Message
    help: Message
    default_configuration: Configuration


class Driver(_Part):
    name: Literal["distdiag"]
    version: Annotated[str, msgspec.Meta(min_length=1)]
    rules: list[Rule]


class Tool(_Part):
    driver: Driver


class Notification(_Part):
    level: Level
    message: Message


class Invocation(_Part):
    execution_successful: bool
    tool_execution_notifications: list[Notification]


class SarifRun(_Part):
    tool: Tool
    column_kind: Literal["utf16CodeUnits", "unicodeCodePoints"]
    invocations: list[Invocation]
    results: list[Result]


class Log(_Part):
    schema: str = msgspec.field(name="$schema")
    version: Literal["2.1.0"]
    runs: Annotated[list[SarifRun], msgspec.Meta(min_length=1, max_length=1)]


def read_log(text):
    """Return a log; whatever the standard does not know in it raises."""
    return msgspec.json.decode(text, type=Log)
