"""Healthy contexts: right code, falling losses, and what only looks alarming."""

from __future__ import annotations

from tests.diagnosis import scripts
from tests.diagnosis.curves import falling, log, norms
from tests.diagnosis.scripts import CLASSIFIER, GPT, edited

STEPS = list(range(400))
CURVES = {"step": STEPS, "loss": falling(), "grad_norm": norms()}
LOG = log({"step": STEPS, "loss": falling(seed=3), "grad_norm": norms(seed=4)})

NOISY_LOG = (
    "WARNING: CUDA graphs are off\nretry 1 of 3: Connection reset by peer, trying again\n"
    "UserWarning: The given NumPy array is not writable\n"
    "0 errors, 0 warnings, nan_policy=omit\n"
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
) + LOG
VALIDATED = {"train": falling(), "val": falling(seed=9, end=1.6)}
STACKED = "\n".join(
    [
        'Traceback (most recent call last):\n  File "/app/data.py", line 4, in fetch',
        "    return get(url)\nConnectionError: timed out\nretrying",
        LOG,
    ]
)
LARGE_VOCABULARY = {
    "vocab_size": 250_000,
    "hidden_size": 384,
    "num_layers": 6,
    "learning_rate": 3e-4,
}
UNUSUAL = "learning_rate: 0.1\noptimizer: sgd\nmomentum: 0.9\nwarmup_steps: 0\nbatch_size: 1\n"
FREEZING_TEACHER = scripts.DISTILLATION
SUMMED = edited(
    CLASSIFIER,
    """
-    criterion = nn.CrossEntropyLoss()
+    criterion = nn.CrossEntropyLoss(reduction="sum")

-            loss = criterion(logits, y)
+            loss = criterion(logits, y) / x.size(0)
""",
)
PROBABILITIES_FOR_SHOW = edited(
    CLASSIFIER,
    """
-    criterion = nn.CrossEntropyLoss()
+    criterion = nn.CrossEntropyLoss()
+    show = nn.Softmax(dim=1)

-            loss = criterion(logits, y)
+            loss = criterion(logits, y)
+            confidence = show(logits).max(1).values.mean()
+            entropy = -(F.softmax(logits, 1) * F.log_softmax(logits, 1)).sum(1).mean()
""",
)
BFLOAT16 = edited(
    scripts.AMP,
    """
-scaler = torch.amp.GradScaler("cuda")

-    with torch.autocast("cuda", dtype=torch.float16):
+    with torch.autocast("cuda", dtype=torch.bfloat16):

-    scaler.scale(loss).backward()
-    scaler.unscale_(opt)
+    loss.backward()

-    scaler.step(opt)
-    scaler.update()
+    opt.step()
""",
)
STABLE = edited(
    CLASSIFIER,
    """
-        x = self.body(x.flatten(1))
+        x = x.flatten(1)
+        x = self.body((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5))
""",
)

GUIDED = """
import torch

for step in range(50):
    latents = latents.detach().requires_grad_(True)
    loss = energy(unet(latents, step))
    grad = torch.autograd.grad(loss.requires_grad_(True), [latents])[0]
    latents = scheduler.step(grad, step, latents)
"""

HEALTHY: dict[str, dict[str, object]] = {
    "classifier": {"model_code": CLASSIFIER, "loss_curves": VALIDATED, "config": "lr: 3e-4"},
    "language model": {
        "model_code": GPT,
        "training_logs": LOG,
        "config": {"learning_rate": 6e-4, "warmup_steps": 200, "grad_clip": 1.0, "max_steps": 400},
    },
    "mixed precision": {"model_code": scripts.AMP, "loss_curves": CURVES, "config": "fp16: true"},
    "bfloat16": {"model_code": BFLOAT16, "loss_curves": CURVES},
    "accelerate": {"model_code": scripts.ACCELERATE, "training_logs": LOG},
    "fine-tuning of a language model": {
        "model_code": scripts.CAUSAL_LM,
        "loss_curves": falling(120, start=2.4, end=1.1),
    },
    "two optimizers": {"model_code": scripts.GAN, "training_logs": LOG},
    "distillation": {"model_code": FREEZING_TEACHER, "loss_curves": CURVES},
    "frozen body": {"model_code": scripts.FINE_TUNING, "loss_curves": VALIDATED},
    "accumulation": {"model_code": scripts.ACCUMULATION, "loss_curves": CURVES},
    "policy gradient": {"model_code": scripts.POLICY_GRADIENT, "training_logs": LOG},
    "noisy log": {"training_logs": NOISY_LOG, "model_code": GPT},
    "an exception that was survived": {"training_logs": STACKED, "model_code": GPT},
    "large vocabulary": {"training_logs": LOG, "config": LARGE_VOCABULARY},
    "unusual settings": {"loss_curves": CURVES, "config": UNUSUAL, "model_code": CLASSIFIER},
    "sum over the batch": {"model_code": SUMMED, "loss_curves": CURVES},
    "probabilities for show": {"model_code": PROBABILITIES_FOR_SHOW, "loss_curves": CURVES},
    "normalised by hand": {"model_code": STABLE, "loss_curves": CURVES},
    "guidance by the gradient of an input": {"model_code": GUIDED, "loss_curves": CURVES},
    "several files": {
        "model_code": {"net.py": GPT, "train.py": CLASSIFIER},
        "loss_curves": [{"step": n, "loss": loss} for n, loss in enumerate(falling())],
        "config": {"model": {"dim": 512}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}},
    },
}
