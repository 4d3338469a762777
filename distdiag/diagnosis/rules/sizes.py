"""Sizes: where the parameters are, batches of one, and vocabularies that do not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from distdiag.diagnosis.causes import FITS, SAID, SPOKEN, Clue, Evidence, Issue
from distdiag.diagnosis.documents import Document
from distdiag.diagnosis.facts import Facts, spoken
from distdiag.diagnosis.program import receiver, tail
from distdiag.diagnosis.settings import Setting
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import Kind

EMBEDDING: Final = Issue(
    id="parameters-in-the-embedding",
    title="most parameters are in the embedding: the layers that should tell tokens apart are few,"
    " and the output falls to the most frequent token",
    severity=Severity.ERROR,
    fix="Use a smaller vocabulary (train a tokenizer on this data), tie the output layer to the"
    " embedding, or make the model wider and deeper.",
    quick="take a smaller vocabulary",
    wants=(
        ("config", "vocabulary, width, depth, and whether the embedding is tied"),
        ("training_logs", "samples of what the model writes"),
    ),
    explains=("plateau", "entropy-collapse", "one-token-output"),
)
ONE_TOKEN: Final = Issue(
    id="one-token-output",
    title="the model writes one token again and again",
    severity=Severity.WARNING,
    fix="Look at how the output is sampled, whether labels are shifted once, and whether the loss"
    " is below the entropy of single tokens.",
    wants=(
        ("config", "vocabulary, width and depth: a model that is nearly all embedding does this"),
        ("model_code", "how labels and the causal mask are made"),
    ),
)
ONE_VALUE: Final = Issue(
    id="variance-of-one-value",
    title="a variance or standard deviation is taken of one value: it is NaN",
    severity=Severity.ERROR,
    fix="Let the batch or group hold at least two samples, take correction=0, or leave the"
    " normalisation out for a single sample.",
    quick="use at least two samples, or std(correction=0) + eps",
    wants=(
        ("model_code", "over which dimension the variance is taken"),
        ("config", "batch size and group size, and whether the last batch is dropped"),
    ),
    explains=("not-finite",),
)
VOCABULARY: Final = Issue(
    id="tokens-beyond-the-embedding",
    title="a token id is beyond the embedding: tokenizer and model have vocabularies of different"
    " sizes",
    severity=Severity.ERROR,
    fix="Call model.resize_token_embeddings(len(tokenizer)), or set vocab_size to the tokenizer's"
    " size; compare input_ids.max() to it.",
    quick="model.resize_token_embeddings(len(tokenizer))",
    wants=(
        ("config", "vocab_size of the model"),
        ("model_code", "whether tokens are added to the tokenizer"),
    ),
    explains=("cuda-device-side-assert", "cuda-index-out-of-bounds", "index-out-of-range"),
)

MOST_IN_EMBEDDING: Final = 0.6
"""GPT-2 small, with a vocabulary made for eight times its size, has 31 % in its embedding; the
smallest of Pythia (70M, untied) has 73 % and is usable, so that more than a share must speak."""

_DEGREES: Final = re.compile(r"\b(var|std|var_mean|std_mean)\(\): degrees of freedom is <= 0")
_ONE_CHANNEL_VALUE: Final = re.compile(
    r"Expected more than 1 (?:value per channel|spatial element)"
)
_PLACE: Final = re.compile(r"(?P<file>[^\s:]{1,300}\.py):(?P<line>\d{1,7}): \w{0,40}Warning")
_STATISTICS: Final = ("std", "var", "std_mean", "var_mean")
_SHARE: Final = re.compile(
    r"(?i)embedding\w{0,20}.{0,60}?\b(\d{1,2}(?:\.\d{1,3})?)\s?%|\b(\d{1,2}(?:\.\d{1,3})?)\s?%"
    r".{0,60}?\bembedding"
)
_REPEATED: Final = re.compile(r"(?:^|[\s\"'|>:])(\S{1,24})(?:\s{0,2}\1){7,}(?:[\s\"'|.<]|$)")
_INDEX: Final = re.compile(r"index out of range in self")
_ASSERT: Final = re.compile(r"(?:indexSelect|EmbeddingBackward|Indexing\.cu|vocab|srcIndex)")


# Where the parameters are.


@dataclass(frozen=True, slots=True)
class _Share:
    """How much of a model is embedding, by its configuration."""

    share: float
    vocabulary: float
    embedding: float
    total: float
    settings: tuple[Setting, ...]


def embedding_share(facts: Facts) -> Iterator[Clue]:
    """Compute which share of the parameters is in the embedding, where the output has collapsed."""
    collapse = _repeated_output(facts)
    said = facts.said("collapse")
    standing = facts.measured.of_kinds(Kind.PLATEAU, Kind.ENTROPY_COLLAPSE, Kind.STUCK)
    if not (collapse or said):
        return
    if collapse:
        yield Clue(ONE_TOKEN, FITS, collapse)
        if said:
            yield Clue(ONE_TOKEN, SAID, said)
    yield from _share_clues(facts)
    if collapse or standing:
        yield Clue(EMBEDDING, FITS, (*collapse, *standing))
    if said:
        yield Clue(EMBEDDING, SAID, said)


def _share_clues(facts: Facts) -> Iterator[Clue]:
    share = _share(facts)
    if share is not None and facts.uses_context(share.vocabulary):
        return
    if share is not None and share.share >= MOST_IN_EMBEDDING:
        says = (
            f"{share.share:.0%} of the parameters ({share.embedding / 1e6:.3g} of"
            f" {share.total / 1e6:.3g} million) are in the embedding, and the output falls to the"
            " most frequent token"
        )
        yield Clue(EMBEDDING, FITS, tuple(each.evidence for each in share.settings), says)
        return
    for document, number, line in facts.lines():
        match = _SHARE.search(line)
        if match and float(match[1] or match[2]) >= 100 * MOST_IN_EMBEDDING:
            says = (
                f"{match[1] or match[2]} % of the parameters are in the embedding, and the output"
                " falls to the most frequent token"
            )
            yield Clue(EMBEDDING, FITS, (spoken(document, number, line),), says)
            return


def _share(facts: Facts) -> _Share | None:
    """Count a transformer: 12 * hidden**2 for each layer, unless the feed-forward size is given."""
    settings = facts.settings
    vocab, hidden = settings.only_number("vocab"), settings.only_number("hidden")
    layers = settings.only_number("layers")
    if vocab is None or hidden is None or layers is None:
        return None
    width, depth, tokens = (each.number or 0.0 for each in (hidden, layers, vocab))
    if not (1 <= width <= 1e6 and 1 <= depth <= 1e4 and 2 <= tokens <= 1e8):
        return None
    wide = settings.only_number("feed_forward")
    feed_forward = (wide.number if wide is not None else None) or 4 * width
    per_layer = 4 * width * width + 2 * width * feed_forward
    tied = settings.of("tied")
    is_untied = any(each.value is False for each in tied)
    embedding = tokens * width * (2 if is_untied else 1)
    total = embedding + depth * per_layer
    used = (vocab, hidden, layers, *(s for s in (wide, *tied[:1]) if s is not None))
    return _Share(embedding / total, tokens, embedding, total, used)


def _repeated_output(facts: Facts) -> tuple[Evidence, ...]:
    """Return a line in which one word stands eight times in a row, as evidence."""
    for document in facts.documents.of("training_logs", "error_messages"):
        for number, line in document.numbered():
            match = _REPEATED.search(line)
            if match and re.search(r"\w", match[1]) and not re.fullmatch(r"[\d.,]+", match[1]):
                return (spoken(document, number, line),)
    return ()


# Statistics of one value.


def one_value(facts: Facts) -> Iterator[Clue]:
    """Read the warning of torch, find the line of the code, and why there was one value only."""
    for document, number, line in facts.lines():
        match = _DEGREES.search(line)
        is_normalisation = _ONE_CHANNEL_VALUE.search(line) is not None
        if match is None and not is_normalisation:
            continue
        what = f"{match[1]}()" if match else "batch normalisation"
        single = _single(facts)
        because = f": {single[1]}" if single else ""
        says = f"{what} is taken of one value, which gives NaN{because}"
        if is_normalisation:
            says = f"batch normalisation gets one value for each channel, and refuses{because}"
        yield Clue(ONE_VALUE, SPOKEN, (spoken(document, number, line),), says)
        if match and (site := _site(facts, document, line, match[1])):
            yield Clue(ONE_VALUE, FITS, (site,))
        if single:
            yield Clue(ONE_VALUE, FITS, (single[0],), says)
        return


def _single(facts: Facts) -> tuple[Evidence, str] | None:
    """Return the setting by which a batch or a group holds one sample."""
    for role, what in (("group_size", "a group"), ("batch_size", "a batch")):
        for setting in facts.settings.numbers(role):
            if setting.number == 1:
                return setting.evidence, f"{what} holds one sample ({setting.name} is 1)"
    for setting in facts.settings.of("drop_last"):
        if setting.value is False and facts.settings.numbers("batch_size"):
            return setting.evidence, "the last batch may hold one sample (drop_last is off)"
    return None


def _site(facts: Facts, document: Document, line: str, name: str) -> Evidence | None:
    """Return the line of the code that the warning names, else the only one with such a call."""
    place = _PLACE.search(line)
    found = []
    for code in facts.program.codes:
        for call in code.calls:
            if tail(call) not in _STATISTICS or tail(call) != name:
                continue
            if place is not None and call.lineno == int(place["line"]):
                return code.evidence(call)
            if receiver(call) is not None:
                found.append(code.evidence(call))
    return found[0] if len(found) == 1 else None


# Vocabularies.


def vocabulary(facts: Facts) -> Iterator[Clue]:
    """Read an index error of an embedding, and compare the sizes that are known."""
    for document, number, line in facts.lines():
        if not (_INDEX.search(line) or ("assert" in line.lower() and _ASSERT.search(line))):
            continue
        evidence = spoken(document, number, line)
        is_embedding = _INDEX.search(line) is not None
        yield Clue(
            VOCABULARY, SPOKEN if is_embedding and _in_embedding(facts) else FITS, (evidence,)
        )
        added = [
            (code, call)
            for code, call in facts.program.calls("add_tokens", "add_special_tokens")
            if "resize_token_embeddings" not in facts.program.tails
        ]
        if added:
            code, call = added[0]
            says = (
                "tokens are added to the tokenizer, and the embedding is not resized to hold them"
            )
            yield Clue(VOCABULARY, FITS, (code.evidence(call),), says)
        yield from _two_sizes(facts)
        return


def _in_embedding(facts: Facts) -> bool:
    """Whether the traceback of the index error goes through an embedding of tokens."""
    seen = [line for _, _, line in facts.lines() if "embedding" in line.lower()]
    positions = [line for line in seen if re.search(r"position|\bwpe\b|pos_emb", line.lower())]
    return bool(seen) and not positions


def _two_sizes(facts: Facts) -> Iterator[Clue]:
    """Compare the vocabulary of the model to a size that a log or another setting names."""
    vocab = facts.settings.smallest("vocab")
    if vocab is None:
        return
    size = re.compile(
        r"(?i)tokenizer\w{0,20}\W{0,6}(?:vocab(?:ulary)?|size|len|length)\D{0,20}(\d{2,9})"
    )
    for document, number, line in facts.lines():
        match = size.search(line)
        if match and int(match[1]) > (vocab.number or 0):
            says = (
                f"the tokenizer has {match[1]} tokens, the embedding {vocab.number:.0f}: ids beyond"
                " it are out of range"
            )
            yield Clue(VOCABULARY, FITS, (vocab.evidence,), says)
            yield Clue(VOCABULARY, SPOKEN, (spoken(document, number, line),), says)
            return
    for found in facts.settings.numbers("vocab"):
        if (found.number or 0) > (vocab.number or 0):
            says = f"two sizes of the vocabulary are set: {found.number:.0f} and {vocab.number:.0f}"
            yield Clue(VOCABULARY, FITS, (vocab.evidence, found.evidence), says)
            return


RULES: Final = (embedding_share, one_value, vocabulary)
