"""Which variables of a process are shown, and that no secret is."""

from hypothesis import given
from hypothesis import strategies as st

from distdiag.record.environment import variables_of
from distdiag.record.redaction import HIDDEN


def shown(**environ):
    return dict(variables_of(environ))


def test_variables_of_libraries_are_shown_as_they_are():
    assert shown(NCCL_ALGO="Ring", OMP_NUM_THREADS="4") == {
        "NCCL_ALGO": "Ring",
        "OMP_NUM_THREADS": "4",
    }


def test_secrets_are_hidden_by_their_names_and_by_their_looks():
    found = shown(HF_TOKEN="abc", WANDB_API_KEY="abc", NCCL_NET_PLUGIN="hf_abcdefghijkl")
    assert found == {"HF_TOKEN": HIDDEN, "WANDB_API_KEY": HIDDEN, "NCCL_NET_PLUGIN": HIDDEN}
    assert "user:word" not in shown(HF_ENDPOINT="https://user:word@host/x")["HF_ENDPOINT"]


def test_of_other_variables_only_a_digest_is_shown():
    first, second = shown(MY_FOLDER="/a")["MY_FOLDER"], shown(MY_FOLDER="/b")["MY_FOLDER"]
    assert first != second
    assert "/a" not in first


def test_what_differs_with_each_launch_is_left_out():
    assert not shown(PWD="/", SSH_CLIENT="1", TERM="x", MASTER_PORT="1", TORCHELASTIC_RUN_ID="a")


@given(
    st.sampled_from(["DB_PASSWORD", "AUTH", "MY_SECRET", "X_KEY", "NCCL_TOKEN", "OTHER", "WORD"]),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=16, max_size=40),
)
def test_no_value_of_an_unknown_or_secret_variable_is_in_the_output(name, value):
    assert value not in str(shown(**{name: value}))
