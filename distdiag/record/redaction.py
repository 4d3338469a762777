"""Command lines without the secrets that some hold: reports are passed on to others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

HIDDEN: Final = "…"

# The end of a name: ``--hub-token``, ``WANDB_API_KEY``, and not ``--tokenizer``, ``--max_tokens``.
_SECRET: Final = re.compile(
    r"(?:token|secret|passwo?r?d|pwd|passphrase|key|credentials?|auth)$", re.IGNORECASE
)
_ASSIGNED: Final = re.compile(r"(?P<name>-{0,2}[A-Za-z_+][\w.+-]{0,100})=(?P<value>.+)", re.DOTALL)
_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]{1,200}@")
# What some services put before their tokens.
_TOKEN: Final = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}")


def is_secret_name(name: str) -> bool:
    """Say whether an option or a variable of this name holds a secret."""
    return _SECRET.search(name) is not None


def redacted(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command line, with values that look like secrets hidden."""
    is_secret = False
    for word in words:
        if is_secret and not word.startswith("-"):
            yield HIDDEN
            is_secret = False
            continue
        if " " in word:  # what a shell or `python -c` is to run
            yield " ".join(redacted(word.split(" ")))
            continue
        assigned = _ASSIGNED.fullmatch(word)
        if assigned is not None and _SECRET.search(assigned["name"]):
            yield f"{assigned['name']}={HIDDEN}"
            continue
        is_secret = word.startswith("-") and assigned is None and _SECRET.search(word) is not None
        yield _TOKEN.sub(HIDDEN, _IN_URL.sub(f"{HIDDEN}@", word))
