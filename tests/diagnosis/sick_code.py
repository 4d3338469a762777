"""Sick contexts whose fault stands in the code."""

from __future__ import annotations

from tests.diagnosis.curves import diverging, exploding, log, nan_from, plateau, stuck
from tests.diagnosis.scripts import (
    ACCELERATE,
    ACCUMULATION,
    AMP,
    CAUSAL_LM,
    CLASSIFIER,
    GPT,
    edited,
)
from tests.diagnosis.sick import Sick

CLEARED_PER_EPOCH = edited(
    CLASSIFIER,
    """
-            optimizer.zero_grad()

-        model.train()
+        model.train()
+        optimizer.zero_grad()
""",
)
CLEARED_EARLY = edited(
    GPT,
    """
-        optimizer.zero_grad(set_to_none=True)
-        loss.backward()
-        torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
+        loss.backward()
+        optimizer.zero_grad(set_to_none=True)
""",
)
NO_STEP = edited(
    CLASSIFIER,
    """
-            optimizer.step()
-        scheduler.step()
""",
)
IN_A_FUNCTION = edited(
    CLASSIFIER,
    """
-            optimizer.zero_grad()
-            logits = model(x)
-            loss = criterion(logits, y)
-            loss.backward()
-            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
-            optimizer.step()
+            loss = train_step(model, criterion, optimizer, x, y)

-def main(train_set, val_set, device="cuda"):
+def train_step(model, criterion, optimizer, x, y):
+    loss = criterion(model(x), y)
+    loss.backward()
+    optimizer.step()
+    return loss
+
+
+def main(train_set, val_set, device="cuda"):
""",
)
LATE_CLIP = edited(
    CLASSIFIER,
    """
-            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
-            optimizer.step()
+            optimizer.step()
+            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
)
SOFTMAX = edited(
    CLASSIFIER,
    """
-        return self.head(x)
+        x = self.head(x)
+        return F.softmax(x, dim=1)
""",
)
SOFTMAX_LAYER = edited(
    CLASSIFIER,
    """
-        self.head = nn.Linear(256, num_classes)
+        self.head = nn.Sequential(nn.Linear(256, num_classes), nn.Softmax(dim=-1))
""",
)
SIGMOID = edited(
    CLASSIFIER,
    """
-    criterion = nn.CrossEntropyLoss()
+    criterion = nn.BCEWithLogitsLoss()

-            logits = model(x)
+            logits = torch.sigmoid(model(x))
""",
)
SWAPPED = edited(
    CLASSIFIER,
    """
-            loss = criterion(logits, y)
+            labels = y
+            loss = criterion(labels, logits)
""",
)
DIVIDED_TWICE = edited(
    ACCELERATE,
    """
-        accelerator.backward(loss)
+        loss = loss / accelerator.gradient_accumulation_steps
+        accelerator.backward(loss)
""",
)
MEAN_DIVIDED = edited(
    CLASSIFIER,
    """
-            loss = criterion(logits, y)
+            loss = criterion(logits, y)
+            loss = loss / x.size(0)
""",
)
FROZEN = edited(
    CLASSIFIER,
    """
-    criterion = nn.CrossEntropyLoss()
+    for p in model.parameters():
+        p.requires_grad = False
+    criterion = nn.CrossEntropyLoss()
""",
)
DETACHED = edited(
    CLASSIFIER,
    """
-            logits = model(x)
+            logits = model(x).detach()
""",
)
REBUILT = edited(
    GPT,
    """
-        loss.backward()
+        loss = torch.tensor(loss.item(), requires_grad=True)
+        loss.backward()
""",
)
FORCED = edited(
    GPT,
    """
-        loss.backward()
+        loss.requires_grad_(True)
+        loss.backward()
""",
)
LATE_HEAD = edited(
    CLASSIFIER,
    """
-    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
+    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
+    model.head = nn.Linear(256, 100).to(device)
""",
)
LATE_SHARDING = edited(
    CLASSIFIER,
    """
-import torch.nn as nn
+import torch.nn as nn
+from torch.distributed.fsdp import fully_shard

-    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
+    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
+    fully_shard(model)
""",
)
SAME_EPOCH = edited(
    CLASSIFIER,
    """
-from torch.utils.data import DataLoader
+from torch.utils.data import DataLoader
+from torch.utils.data.distributed import DistributedSampler

-    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
+    sampler = DistributedSampler(train_set, shuffle=True)
+    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
""",
)
NO_SCALER = edited(
    AMP,
    """
-scaler = torch.amp.GradScaler("cuda")

-    scaler.scale(loss).backward()
-    scaler.unscale_(opt)
+    loss.backward()

-    scaler.step(opt)
-    scaler.update()
+    opt.step()
""",
)
SCALED_CLIP = edited(
    AMP,
    """
-    scaler.unscale_(opt)
""",
)
PER_BATCH = edited(
    CLASSIFIER,
    """
-        scheduler.step()
+            scheduler.step()
""",
)
PER_EPOCH = edited(
    CLASSIFIER,
    """
-    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
+    scheduler = torch.optim.lr_scheduler.OneCycleLR(
+        optimizer, 1e-3, epochs=EPOCHS, steps_per_epoch=len(train_loader)
+    )
""",
)
PADDING = edited(
    ACCUMULATION,
    """
-loss_fn = nn.CrossEntropyLoss(ignore_index=0)
+loss_fn = nn.CrossEntropyLoss(ignore_index=-100)

-for i, (x, y) in enumerate(loader):
+for i, (x, y) in enumerate(loader):
+    y[y == PAD] = -1
""",
)
SHIFTED_TWICE = edited(
    CAUSAL_LM,
    """
-    out = model(input_ids=input_ids, labels=labels)
+    out = model(input_ids=input_ids[:, :-1], labels=labels[:, 1:])
""",
)
NOT_SHIFTED = edited(
    GPT,
    """
-        scores, targets = logits[:, :-1], tokens[:, 1:]
-        loss = F.cross_entropy(scores.reshape(-1, scores.size(-1)), targets.reshape(-1))
+        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))
""",
)
LOG_OF_SOFTMAX = edited(
    CLASSIFIER,
    """
-            loss = criterion(logits, y)
+            chosen = torch.softmax(logits, 1).gather(1, y[:, None])
+            loss = -torch.log(chosen).mean()
""",
)
SQRT = edited(
    CLASSIFIER,
    """
-            loss = criterion(logits, y)
+            loss = torch.sqrt(((logits - y) ** 2).sum(1)).mean()
""",
)
DIVISION = edited(
    CLASSIFIER,
    """
-        x = self.body(x.flatten(1))
+        x = x.flatten(1)
+        x = self.body((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))
""",
)
DROPOUT = edited(
    CLASSIFIER,
    """
-        return self.head(x)
+        return self.head(F.dropout(x, 0.5))
""",
)
NO_EVAL = edited(
    CLASSIFIER,
    """
-    model.eval()
""",
)
NO_TRAIN = edited(
    CLASSIFIER,
    """
-        model.train()
""",
)
BFLOAT16 = edited(
    CAUSAL_LM,
    """
-optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
+model.bfloat16()
+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
""",
)
NO_GRAPH = (
    'Traceback (most recent call last):\n  File "train.py", line 50, in main\n'
    "    loss.backward()\nRuntimeError: element 0 of tensors does not require grad and does not"
    " have a grad_fn\n"
)
ANOMALY = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 21, in <module>\n'
    "    loss.backward()\n"
    "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.\n"
)
OUT_OF_BOUNDS = "IndexError: Target -1 is out of bounds.\n"

SICK_CODE: dict[str, Sick] = {
    "never cleared": Sick(
        "gradients-never-cleared", {"model_code": IN_A_FUNCTION}, ("optimizer.step()",)
    ),
    "cleared once per epoch": Sick(
        "gradients-never-cleared",
        {"model_code": CLEARED_PER_EPOCH, "loss_curves": exploding()},
        ("optimizer.step()",),
        at_least=0.8,
    ),
    "cleared before the step": Sick(
        "gradients-cleared-before-step",
        {"model_code": CLEARED_EARLY, "loss_curves": {"loss": stuck()}},
        ("zero_grad", "optimizer.step()"),
        ("the loss does not change",),
        at_least=0.8,
    ),
    "never steps": Sick("optimizer-never-steps", {"model_code": NO_STEP}, ("loss.backward()",)),
    "validation in training mode": Sick(
        "validation-in-training-mode", {"model_code": NO_EVAL}, ("for x, y in val_loader",)
    ),
    "evaluation mode for good": Sick(
        "training-in-evaluation-mode", {"model_code": NO_TRAIN}, ("model.eval()",)
    ),
    "functional dropout": Sick(
        "dropout-always-on", {"model_code": DROPOUT}, ("F.dropout(x, 0.5)",)
    ),
    "clipped too late": Sick(
        "clipping-without-effect",
        {"model_code": LATE_CLIP, "loss_curves": diverging()},
        ("clip_grad_norm_",),
        at_least=0.8,
    ),
    "softmax in the model": Sick(
        "softmax-before-cross-entropy",
        {"model_code": SOFTMAX, "loss_curves": plateau()},
        ("F.softmax(x, dim=1)", "criterion(logits, y)"),
    ),
    "softmax layer": Sick(
        "softmax-before-cross-entropy", {"model_code": SOFTMAX_LAYER}, ("nn.Softmax",)
    ),
    "sigmoid before BCE with logits": Sick(
        "sigmoid-before-bce-with-logits", {"model_code": SIGMOID}, ("torch.sigmoid(model(x))",)
    ),
    "swapped arguments": Sick(
        "swapped-loss-arguments", {"model_code": SWAPPED}, ("criterion(labels, logits)",)
    ),
    "divided twice under accelerate": Sick(
        "loss-divided-twice",
        {"model_code": DIVIDED_TWICE},
        ("loss / accelerator.gradient_accumulation_steps",),
    ),
    "mean divided by the batch": Sick(
        "mean-divided-by-batch", {"model_code": MEAN_DIVIDED}, ("loss / x.size(0)",)
    ),
    "all frozen": Sick(
        "all-parameters-frozen",
        {"model_code": FROZEN, "error_messages": NO_GRAPH},
        ("for p in model.parameters()", "does not require grad"),
        at_least=0.8,
    ),
    "detached output": Sick(
        "detached-loss",
        {"model_code": DETACHED, "loss_curves": plateau()},
        ("model(x).detach()",),
    ),
    "loss rebuilt from a number": Sick(
        "detached-loss", {"model_code": REBUILT}, ("torch.tensor(loss.item()",)
    ),
    "loss told to require a gradient": Sick(
        "loss-made-to-require-gradient", {"model_code": FORCED}, ("loss.requires_grad_(True)",)
    ),
    "head made after the optimizer": Sick(
        "layer-made-after-optimizer", {"model_code": LATE_HEAD}, ("nn.Linear(256, 100)",)
    ),
    "optimizer before FSDP": Sick(
        "SHD001", {"model_code": LATE_SHARDING}, ("AdamW(model.parameters()",)
    ),
    "sampler without set_epoch": Sick(
        "DAT001", {"model_code": SAME_EPOCH}, ("DistributedSampler(train_set",)
    ),
    "float16 without a scaler": Sick(
        "fp16-without-loss-scaling",
        {"model_code": NO_SCALER, "training_logs": log(nan_from())},
        ("dtype=torch.float16", "loss: nan"),
        at_least=0.8,
    ),
    "clipping scaled gradients": Sick(
        "clipping-of-scaled-gradients", {"model_code": SCALED_CLIP}, ("clip_grad_norm_",)
    ),
    "schedule of epochs per batch": Sick(
        "epoch-schedule-stepped-per-batch",
        {"model_code": PER_BATCH},
        ("scheduler.step()", "T_max=EPOCHS"),
    ),
    "schedule of batches per epoch": Sick(
        "batch-schedule-stepped-per-epoch",
        {"model_code": PER_EPOCH},
        ("scheduler.step()", "OneCycleLR"),
    ),
    "padding that is not ignored": Sick(
        "wrong-ignore-index",
        {"model_code": PADDING, "error_messages": OUT_OF_BOUNDS},
        ("y[y == PAD] = -1", "Target -1"),
        at_least=0.9,
    ),
    "shifted twice": Sick(
        "labels-shifted-twice", {"model_code": SHIFTED_TWICE}, ("labels=labels[:, 1:]",)
    ),
    "not shifted": Sick("labels-not-shifted", {"model_code": NOT_SHIFTED}, ("tokens.view(-1)",)),
    "logarithm of 0": Sick(
        "operation-outside-its-domain",
        {"model_code": LOG_OF_SOFTMAX, "loss_curves": nan_from()},
        ("torch.log(chosen)", "loss"),
        ("the loss becomes NaN",),
        at_least=0.6,
    ),
    "square root of 0": Sick(
        "operation-outside-its-domain",
        {"error_messages": ANOMALY, "model_code": SQRT},
        ("SqrtBackward0", "torch.sqrt("),
        at_least=0.9,
    ),
    "division by 0": Sick(
        "operation-outside-its-domain",
        {"model_code": DIVISION, "training_logs": log(nan_from())},
        ("x.std(1, keepdim=True)",),
        at_least=0.6,
    ),
    "updates lost": Sick(
        "updates-lost-in-bfloat16",
        {"model_code": BFLOAT16, "loss_curves": {"loss": stuck()}},
        ("bfloat16", "lr=1e-6"),
        ("the loss does not decrease",),
        at_least=0.6,
    ),
}
