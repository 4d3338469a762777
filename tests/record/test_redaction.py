"""Secrets do not get into reports with a command line, and nothing else goes missing."""

import pytest

from distdiag.record.redaction import redacted


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python t.py --hub-token abc --lr 1e-4", "python t.py --hub-token … --lr 1e-4"),
        ("python t.py --password=abc", "python t.py --password=…"),
        ("python t.py --api_key abc", "python t.py --api_key …"),
        (
            "env WANDB_API_KEY=abc HF_TOKEN=abc python t.py",
            "env WANDB_API_KEY=… HF_TOKEN=… python t.py",
        ),
        ("t.py trainer.auth=abc +db.secret=abc", "t.py trainer.auth=… +db.secret=…"),
        ("git clone https://me:abc@host/x.git", "git clone https://…@host/x.git"),
        ("t.py hf_abcdefghijkl", "t.py …"),
        ("t.py --token --verbose", "t.py --token --verbose"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(command, shown):
    assert list(redacted(command.split(" "))) == shown.split(" ")


@pytest.mark.parametrize(
    "command",
    [
        "python -u train.py --tokenizer gpt2 --max_tokens 4096 --lr=1e-4",
        "torchrun --rdzv-endpoint=node0:29500 train.py model.hidden_size=64",
        "curl https://host/path@v1",
        "python t.py --moe-token-dispatcher-type alltoall --keyword x",
    ],
)
def test_what_is_no_secret_stays(command):
    assert list(redacted(command.split(" "))) == command.split(" ")


def test_the_words_that_a_shell_is_to_run_are_looked_at():
    words = ["bash", "-c", "export HF_TOKEN=abc && python t.py --key abc"]
    assert list(redacted(words)) == ["bash", "-c", "export HF_TOKEN=… && python t.py --key …"]
