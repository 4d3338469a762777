"""Documents and files that somebody has changed, by a seed: the same on every machine."""

import copy
import random

HOSTILE = (
    *(None, True, 0, -1, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 1 << 70, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x" * 5000, "\x1b[2J\x9b\u202e\0\n<b>`$(x)`%n", "9" * 400, "../../etc/passwd", "\ud800"),
    *([], {}, [[]] * 50, {"": None}, [0, 1 << 40], [-1], ["x"] * 300),
)
"""Values where others are expected."""


def deep(levels=2000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def changed_document(document, rng):
    """Return a copy of plain values in which some have become others, are gone or came twice."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = list(_places(document))
        if not places:
            return document
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder *= 3
            case 2:
                holder[key] = copy.deepcopy(rng.choice(places)[0])
            case _:
                holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return document


def _places(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def changed_bytes(data, rng):
    """Return bytes of which some were changed, cut out, cut off or came twice."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 16))):
        if not data:
            break
        start = rng.randrange(len(data))
        part = slice(start, start + rng.choice((1, 2, 8, 64)))
        match rng.randrange(6):
            case 0:
                del data[part]
            case 1:
                data[start:start] = data[part] * rng.choice((1, 2, 100))
            case 2 if rng.random() < 0.3:
                del data[start:]
            case _:
                data[start] = rng.choice((0, 10, 34, 127, 128, 255, rng.randrange(256)))
    return bytes(data)


def seeded(*words):
    return random.Random(" ".join(map(str, words)))
