"""Tests that every zoo entry is whole, and that its expectation fits its script."""

import io
import itertools
import tokenize
from pathlib import Path

import pytest

from tests.zoo.expectation import ZOO, ZooEntry, load_entries, read_expectation

IDS = [
    "accelerate-1674-last-batch",
    "accelerate-3533-double-ga",
    "accelerate-3898-buffers-fsdp2",
    "accelerate-4071-resume-epoch",
    "accelerate-4142-eager-state",
    "accelerate-4206-adapter-rank0-slice",
    "areno-496-double-reduce",
    "automodel-1412-aux-scaler",
    "automodel-1519-head-count",
    "automodel-2468-skipped-batch",
    "automodel-2511-tied-resume",
    "automodel-3359-aux-ga",
    "automodel-3822-tp-replicas",
    "axolotl-3608-packed-ring",
    "bigcode-megatron-37-mqa",
    "dali-585-memory-limit",
    "deepspeed-5248-sp-div",
    "deepspeed-6809-capacity",
    "deepspeed-7998-call-count",
    "diffusers-13696-mask-split",
    "diffusers-14265-ring-stale-kv",
    "dscourse-16-guard-before-init",
    "easyr1-11012-max-count",
    "fastvideo-1666-late-lora",
    "fb-optimizers-149-step-skip",
    "gcsfuse-1844-dead-mount",
    "hyrax-1011-monitor-thread",
    "kempnerforge-49-divergent-exists",
    "lightning-20825-sigterm",
    "lightning-379-early-stop",
    "lingbot-41-same-noise",
    "liquid-40-unshifted-count",
    "lkpy-290-pool-worker-killed",
    "llamafactory-10820-nonpersistent",
    "llm-foundry-733-slow-save",
    "loongforge-152-local-clip",
    "megatron-1685-no-finalize",
    "megatron-1877-zero-tokens",
    "megatron-3769-global-aux",
    "megatron-5047-aux-tp",
    "megatron-5956-mfsdp-ep",
    "megatron-5974-init-step-counted",
    "megatron-656-untied-pp",
    "megatron-6920-resume-no-sync",
    "megatron-7452-count-overwritten",
    "megatron-906-cp-loss-scale",
    "megatron-bridge-5107-fallback-owner",
    "megatron-bridge-5396-ep-lora",
    "megatron-bridge-5840-fan-in",
    "megatron-bridge-591-artifact-walk",
    "megatron-deepspeed-356-index",
    "miles-diffusion-35-partial-norm",
    "mmdet-3621-bn",
    "mmdet-4582-bn-eval",
    "monai-5595-cache-owner-exit",
    "moviepy-576-decoder-pipe",
    "mpich-1997-lock-across-barrier",
    "nemo-rl-1203-ac-moe",
    "olmo-234-initial-ckpt",
    "olmo-core-319-hsdp-seed",
    "picotron-5-pp-dp-sync",
    "prime-rl-1035-loader-state",
    "prime-rl-1961-masked-mean",
    "pwgan-177-set-epoch",
    "pytorch-105840-param-init-fn",
    "pytorch-107843-prepare-split",
    "pytorch-109074-held-gil",
    "pytorch-111138-bb-false",
    "pytorch-141069-uneven-iterable",
    "pytorch-160285-ep-doubled",
    "pytorch-172668-send-before-recv",
    "pytorch-190543-stale-build-lock",
    "pytorch-25390-own-group",
    "pytorch-49846-evaluator",
    "pytorch-52848-world-size",
    "pytorch-75902-logical-order",
    "pytorch-tutorials-3065-download",
    "red-rover-23-prefetch-thread",
    "simpletuner-1445-cache-clear",
    "simpletuner-262-ds-save-rank0",
    "skhd-83-inherited-lock",
    "specforge-781-cleanup-barrier",
    "torchcomms-294-store-key",
    "torchrec-4149-group-order",
    "torchtitan-1593-count-twice",
    "torchtitan-1618-validation",
    "torchtitan-166-noshard-seed",
    "torchtitan-2329-hsdp-placements",
    "torchtitan-3146-histc",
    "transformers-24088-lr-steps",
    "transformers-28244-zero3-missing",
    "transformers-29980-prompt-tuning-save",
    "transformers-30228-generate",
    "transformers-35808-ds-ga",
    "transformers-37474-dp-mean",
    "transformers-39648-token-scale-mesh",
    "transformers-45902-original-inv-freq",
    "transformers-48493-heads-drop-shift",
    "transformers-48706-aux-world",
    "transformers-48792-peft-after-shard",
    "trl-2890-varlen-gather",
    "trl-3106-unguarded-map",
    "trl-6380-metric-mom",
    "trl-7223-global-main-first",
    "ultralytics-26085-forked-lock",
    "veomni-420-k-norm-order",
    "verl-6176-dynamic-mb",
    "xtuner-1656-sp-entropy",
]
FILES = {"bug.py", "fix.patch", "expect.toml"}
FAMILIES = {"BAR", "CKP", "COL", "DAT", "HNG", "MOE", "PAR", "REP", "SEQ", "SHD"}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}

entries = pytest.mark.parametrize("entry", load_entries(), ids=lambda entry: entry.id)


def code_lines(script: Path) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(script.read_text()).readline)
    return {
        line
        for token in tokens
        if token.type not in NO_CODE and not token.string.startswith('"""')
        for line in range(token.start[0], token.end[0] + 1)
    }


def test_the_zoo_holds_exactly_the_known_entries():
    assert [entry.id for entry in load_entries()] == IDS


def test_every_folder_of_the_zoo_is_an_entry():
    folders = {path.name for path in ZOO.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert folders == set(IDS)


@entries
def test_an_entry_holds_a_script_and_a_fix_that_applies_to_it(entry: ZooEntry):
    assert {path.name for path in entry.folder.iterdir()} - {"__pycache__"} == FILES
    assert entry.fix_patch.read_text().startswith("--- bug.py\n+++ fix.py\n@@ ")
    bug, fix = entry.bug.read_text(), entry.fixed_text
    assert bug != fix
    compile(bug, str(entry.bug), "exec")
    compile(fix, str(entry.fix_patch), "exec")


@entries
def test_the_expected_lines_are_code_of_the_bug(entry: ZooEntry):
    expectation = entry.expectation
    assert expectation.lines
    assert all(expectation.evidence_lines)
    expected = {*expectation.lines, *itertools.chain(*expectation.evidence_lines)}
    assert expected <= code_lines(entry.bug)


@entries
def test_the_expected_codes_belong_to_the_expected_families(entry: ZooEntry):
    expectation = entry.expectation
    assert set(expectation.families) <= FAMILIES
    # A class of hang may be known before there is a code for it.
    assert expectation.codes or expectation.hang_class
    assert {code[:3] for code in expectation.codes} <= set(expectation.families)


@entries
def test_the_expected_ranks_are_those_of_the_run(entry: ZooEntry):
    assert entry.expectation.ranks
    assert set(entry.expectation.ranks) <= set(range(entry.expectation.world_size))


@entries
def test_no_script_knows_the_tool_or_the_place_of_its_bug(entry: ZooEntry):
    for text in (entry.bug.read_text().lower(), entry.fixed_text.lower()):
        assert not [word for word in ("distdiag", "bug", "culprit", "deadlock") if word in text]


@entries
def test_the_source_names_a_report(entry: ZooEntry):
    repository, _, number = entry.expectation.source.partition("#")
    assert repository.count("/") == 1
    assert number.isdigit()


def test_an_unknown_key_of_an_expectation_is_an_error_with_its_path(tmp_path: Path):
    path = tmp_path / "expect.toml"
    path.write_text((ZOO / IDS[0] / "expect.toml").read_text() + "\nseverity = 'error'\n")
    with pytest.raises(ValueError, match=r"expect\.toml: .*severity"):
        read_expectation(path)


def test_an_unknown_entry_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="no such zoo entry: nobody-1"):
        load_entries(["nobody-1"])
