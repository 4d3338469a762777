"""What of a finding is the same in the next run, so that one that is known is recognised."""

import hashlib
import io
import tokenize
from pathlib import PurePosixPath
from typing import Final

import msgspec

from distdiag.findings.finding import Finding

LONGEST_SOURCE: Final = 2000
"""So much of a line counts, in characters; lines that people write are shorter."""
NUM_DIGITS: Final = 16
"""64 bits: among a million findings two are alike by chance once in 37 million projects."""
_LAYOUT: Final = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def fingerprint_of(finding: Finding) -> str:
    """Return 16 hexadecimal digits, made of code, subjects, function and text of the line.

    The text counts without comments and spaces, and of a path only the name of its file. Ranks,
    steps, line numbers, folders and the words of the message do not count.
    """
    location = finding.location
    parts = (
        encodable(finding.code),
        sorted({_clean(subject) for subject in finding.subjects}),
        encodable(location.function) if location else "",
        _tokens(location.source) if location else [],
    )
    text = msgspec.json.encode(parts, enc_hook=str, order="sorted")
    return hashlib.sha256(text).hexdigest()[:NUM_DIGITS]


def _clean(subject: str) -> str:
    name = PurePosixPath(subject).name if subject.startswith("/") else subject
    return encodable(name)


def _tokens(source: str) -> list[str]:
    """Return the words and signs of a line; of one that is no whole statement, up to its end."""
    found: list[str] = []
    line = encodable(source[:LONGEST_SOURCE])
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type not in _LAYOUT:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError):
        return found or line.split()
    return found


def encodable(text: str) -> str:
    """Return a text that UTF-8 can hold: what it cannot is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
