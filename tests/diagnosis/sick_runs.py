"""Sick contexts whose fault shows in logs, curves, errors and configurations."""

from __future__ import annotations

from tests.diagnosis.curves import diverging, exploding, log, plateau, stuck
from tests.diagnosis.scripts import CAUSAL_LM, CLASSIFIER, GPT, edited
from tests.diagnosis.sick import Sick

OOM = (
    "step: 10, loss: 2.31\nstep: 11, loss: 2.30\nTraceback (most recent call last):\n"
    '  File "/home/me/train.py", line 41, in <module>\n    main()\n'
    '  File "/home/me/train.py", line 33, in main\n    loss = model(x)\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 39.39 GiB of which 1.1 GiB is free.\n"
)
TIMEOUT = (
    "[rank1]:[E1130 12:00:01.000000000 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=120, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/home/me/train.py", line 77, in main\n'
    "[rank0]:     metrics = evaluate(model)\n"
    '[rank0]:   File "/home/me/train.py", line 20, in evaluate\n'
    '[rank0]:     return scores["f1"]\n'
    "[rank0]: KeyError: 'f1'\n"
)
WORKER = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in <module>\n'
    "    for batch in loader:\n"
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.\n"
)
CHECKPOINT = (
    'Traceback (most recent call last):\n  File "/home/me/resume.py", line 9, in <module>\n'
    '    model.load_state_dict(torch.load("last.pt"))\n'
    "RuntimeError: Error(s) in loading state_dict for GPT:\n"
    "\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([50257, 768]) from"
    " checkpoint, the shape in current model is torch.Size([50304, 768]).\n"
)
INDEX = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 30, in <module>\n'
    "    out = model(input_ids=input_ids, labels=labels)\n"
    '  File "/usr/lib/torch/nn/functional.py", line 2551, in embedding\n'
    "    return torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse)\n"
    "IndexError: index out of range in self\n"
)
TARGET = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 44, in <module>\n'
    "    loss = criterion(logits, y)\nIndexError: Target 10 is out of bounds.\n"
)
DEVICES = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 18, in <module>\n'
    "    logits = model(x)\n"
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices,"
    " cuda:0 and cpu!\n"
)
SHAPES = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 18, in <module>\n'
    "    logits = model(x)\n"
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x28 and 784x256)\n"
)
VARIANCE = (
    "/home/me/grpo.py:14: UserWarning: std(): degrees of freedom is <= 0. Correction should be "
    "strictly less than the reduction factor (input numel divided by output numel). (Triggered "
    "internally at /pytorch/aten/src/ATen/native/ReduceOps.cpp:1861.)\n"
    "  std = rewards.view(-1, group).std(dim=1)\n"
)
GRPO = '''
import torch


def means(rewards, group):
    """Return the mean reward of each group."""
    return rewards.view(-1, group).mean(dim=1)


def normalise(rewards, group):
    """Normalise the rewards of each group."""
    mean = means(rewards, group)
    # one group for each prompt
    std = rewards.view(-1, group).std(dim=1)
    return (rewards.view(-1, group) - mean[:, None]) / (std[:, None] + 1e-4)
'''
ONE_SAMPLE = (
    "ValueError: Expected more than 1 value per channel when training, got input size"
    " torch.Size([1, 256])\n"
)
COLLAPSED = (
    "step: 100, loss: 7.21\nstep: 200, loss: 7.02\n"
    "sample: the the the the the the the the the the the the\nstep: 300, loss: 6.98\n"
)
BROADCAST = (
    "train.py:14: UserWarning: Using a target size (torch.Size([32])) that is different to the"
    " input size (torch.Size([32, 1])). This will likely lead to incorrect results due to"
    " broadcasting. Please ensure they have the same size.\n"
)
OVERFLOWS = "\n".join(
    f"step: {n}, loss: 2.{n:03d}\nGradient overflow.  Skipping step, loss scaler 0 reducing loss"
    f" scale to {65536 / 2**n}"
    for n in range(24)
)
TEN_CLASSES = edited(
    CLASSIFIER,
    """
-        self.head = nn.Linear(256, num_classes)
+        self.head = nn.Linear(256, 10)

-    def __init__(self, num_classes=10):
+    def __init__(self):
""",
)
ADDED_TOKEN = edited(
    CAUSAL_LM,
    """
-tokenizer = AutoTokenizer.from_pretrained("base")
+tokenizer = AutoTokenizer.from_pretrained("base")
+tokenizer.add_tokens(["<call>"])
""",
)
SMALL_MODEL = {"vocab_size": 50257, "hidden_size": 256, "num_layers": 4, "intermediate_size": 1100}

SICK_RUNS: dict[str, Sick] = {
    "loss scale gone": Sick(
        "loss-scale-collapse",
        {"training_logs": OVERFLOWS, "config": "fp16: true\nlearning_rate: 0.0001\n"},
        ("reducing loss scale to 0.5", "fp16: true"),
        at_least=0.7,
    ),
    "rate too high": Sick(
        "learning-rate-too-high",
        {
            "loss_curves": diverging(),
            "config": "optimizer: adamw\nlearning_rate: 0.05\nvocab_size: 32000\nnum_layers: 12\n",
        },
        ("learning_rate: 0.05", "87.5"),
        ("the loss explodes",),
        at_least=0.6,
    ),
    "rate too high, in DeepSpeed's form": Sick(
        "learning-rate-too-high",
        {
            "training_logs": log(exploding()),
            "config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        },
        ('"lr": 0.1',),
        at_least=0.6,
    ),
    "rate too high, on the command line": Sick(
        "learning-rate-too-high",
        {
            "training_logs": log(exploding()),
            "model_code": GPT,
            "config": "torchrun --nproc-per-node 8 train.py --learning_rate 0.02 --steps 9000\n",
        },
        ("--learning_rate 0.02",),
        at_least=0.6,
    ),
    "no warm-up": Sick(
        "no-warm-up",
        {
            "model_code": GPT,
            "loss_curves": diverging(),
            "config": "learning_rate: 6e-4\nwarmup_steps: 0\ngrad_clip: 1.0\n",
        },
        ("warmup_steps: 0", "learning_rate: 6e-4"),
        at_least=0.6,
    ),
    "labels from 1": Sick(
        "labels-begin-at-one",
        {"model_code": TEN_CLASSES, "error_messages": TARGET},
        ("Target 10 is out of bounds", "nn.Linear(256, 10)"),
        at_least=0.6,
    ),
    "out of memory": Sick(
        "cuda-out-of-memory", {"training_logs": OOM}, ("CUDA out of memory",), at_least=0.9
    ),
    "timeout behind an exception": Sick(
        "HNG001",
        {"training_logs": TIMEOUT},
        ("KeyError: 'f1'",),
        ("training hangs",),
        at_least=0.9,
    ),
    "worker killed": Sick(
        "dataloader-worker-killed",
        {"error_messages": WORKER},
        ("DataLoader worker (pid 4711)",),
        at_least=0.9,
    ),
    "checkpoint of another size": Sick(
        "parameter-shape-in-checkpoint",
        {"error_messages": CHECKPOINT},
        ("size mismatch for lm_head.weight",),
        at_least=0.9,
    ),
    "two devices": Sick("two-devices", {"error_messages": DEVICES}, ("two devices",), at_least=0.9),
    "shapes": Sick("matrix-shapes", {"error_messages": SHAPES}, ("64x28",), at_least=0.9),
    "tokens beyond the embedding": Sick(
        "tokens-beyond-the-embedding",
        {"error_messages": INDEX, "model_code": ADDED_TOKEN},
        ("index out of range in self", "add_tokens"),
        at_least=0.9,
    ),
    "variance of one sample": Sick(
        "variance-of-one-value",
        {
            "training_logs": VARIANCE,
            "model_code": {"grpo.py": GRPO},
            "config": "num_generations: 1\nlearning_rate: 1e-6\n",
        },
        ("degrees of freedom is <= 0", "std = rewards", "num_generations: 1"),
        at_least=0.9,
    ),
    "batch normalisation of one sample": Sick(
        "variance-of-one-value",
        {"error_messages": ONE_SAMPLE, "config": {"batch_size": 1}},
        ("Expected more than 1 value per channel", '"batch_size": 1'),
        at_least=0.9,
    ),
    "one token": Sick(
        "parameters-in-the-embedding",
        {"training_logs": COLLAPSED, "config": SMALL_MODEL},
        ('"vocab_size": 50257', "the the the the"),
        ("the model always gives the same token",),
        at_least=0.6,
    ),
    "regression that broadcasts": Sick(
        "target-broadcast",
        {"training_logs": BROADCAST + log({"step": list(range(200)), "loss": plateau(200)})},
        ("Using a target size",),
        at_least=0.9,
    ),
    "divergence": Sick(
        "divergence", {"training_logs": log(diverging())}, ("grad_norm: 87.5",), at_least=0.7
    ),
    "explosion": Sick(
        "gradient-explosion", {"training_logs": log(exploding())}, ("grad_norm",), at_least=0.7
    ),
    "stuck": Sick(
        "stuck",
        {"loss_curves": stuck(), "config": "learning_rate: 1e-4"},
        ("loss",),
        ("no learning",),
        at_least=0.7,
    ),
}
