"""Dictionaries as Python prints them: transformers, TRL, OpenRLHF, ms-swift, axolotl."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from distdiag.metrics.readers.json_lines import parsed_mapping
from distdiag.metrics.readers.lines import LineFormat, Parsed

# ``{'loss': 0.5, 'grad_norm': tensor(1.2), 'learning_rate': '1e-05', 'epoch': 0.1}``
_ITEM: Final = re.compile(
    r"'([^'\\\n]{1,200}+)': "
    r"(?:'([^'\\\n]{0,100}+)'|((?:np\.|numpy\.|tensor)[\w.]{0,20}+\([^()\n]{1,100}+\)"
    r"|[^\s,{}\[\]()'\"]{1,40}+))"
)
_EPOCH: Final = re.compile(r"\b[Ee]poch[ :=]{1,3}+(\d{1,9}+)\b")
# A dictionary of settings is no point of a curve: it names an epoch, a step or one of these.
_METRIC: Final = re.compile(
    r"(?:^|[/_ ])(?:loss|grad_norm|reward|accuracy|acc|perplexity|ppl|kl|runtime)(?:$|[/_ ])"
)


def _read(line: str) -> Parsed | None:
    start = line.find("{'")
    items = {match[1]: match[2] or match[3] for match in _ITEM.finditer(line, start)}
    parsed = parsed_mapping(items, start)
    if parsed is None or not any(_METRIC.search(name.lower()) for name in parsed.values):
        return None
    if parsed.step is None and parsed.epoch is None:
        # ``epoch 3: {'accuracy': 0.7}``, as the examples of accelerate print it
        before = _EPOCH.search(line, max(0, start - 100), start)
        if before is not None:
            return replace(parsed, start=before.start(), epoch=float(before[1]))
    return parsed


DICTS: Final = LineFormat("dicts", (b"{'",), _read)
