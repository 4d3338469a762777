"""Training scripts as users write them: a right one, and mistakes made in it one at a time."""

from __future__ import annotations

CLASSIFIER = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

EPOCHS = 20


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(256, num_classes)

    def forward(self, x):
        x = self.body(x.flatten(1))
        return self.head(x)


def evaluate(model, val_loader, device):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in val_loader:
            pred = model(x.to(device)).argmax(1)
            correct += (pred == y.to(device)).sum().item()
            total += len(y)
    return correct / total


def main(train_set, val_set, device="cuda"):
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=256)
    model = Net().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {evaluate(model, val_loader, device):.3f}")
"""

GPT = """
import torch
import torch.nn as nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        wide = 4 * n_embd
        self.mlp = nn.Sequential(nn.Linear(n_embd, wide), nn.GELU(), nn.Linear(wide, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device), 1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd=512, n_head=8, n_layer=8):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def train(model, get_batch, config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], betas=(0.9, 0.95))
    warmup = config["warmup_steps"]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=warmup)
    model.train()
    for step in range(config["max_steps"]):
        tokens = get_batch()
        logits = model(tokens)
        scores, targets = logits[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(scores.reshape(-1, scores.size(-1)), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
        optimizer.step()
        scheduler.step()
"""

AMP = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
mse = nn.MSELoss()

for x, target in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = mse(model(x).squeeze(-1), target)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""

ACCELERATE = """
from accelerate import Accelerator
import torch

accelerator = Accelerator(gradient_accumulation_steps=8)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
for batch in train_loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

CAUSAL_LM = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("base")
model = AutoModelForCausalLM.from_pretrained("base").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for batch in loader:
    input_ids = batch["input_ids"].cuda()
    labels = input_ids.clone()
    labels[labels == tokenizer.pad_token_id] = -100
    out = model(input_ids=input_ids, labels=labels)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GAN = """
import torch
from torch import nn

gen, disc = Generator().cuda(), Discriminator().cuda()
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for real, _ in loader:
    real = real.cuda()
    fake = gen(torch.randn(len(real), 100, device="cuda"))
    loss_d = bce(disc(real), torch.ones(len(real), 1).cuda()) + bce(
        disc(fake.detach()), torch.zeros(len(real), 1).cuda()
    )
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = bce(disc(fake), torch.ones(len(real), 1).cuda())
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
"""

DISTILLATION = """
import torch
import torch.nn.functional as F

teacher.eval()
for p in teacher.parameters():
    p.requires_grad = False
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
for epoch in range(3):
    for x, y in train_loader:
        with torch.no_grad():
            target = F.softmax(teacher(x) / 2.0, dim=-1)
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / 2.0, dim=-1), target, reduction="batchmean") * 4.0
        loss = 0.5 * soft + 0.5 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

FINE_TUNING = """
import torch
import torchvision
from torch import nn

model = torchvision.models.resnet18(weights="DEFAULT")
for param in model.parameters():
    param.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, 2)
model = model.cuda()
optimizer = torch.optim.SGD(model.fc.parameters(), lr=1e-3, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for epoch in range(25):
    for phase in ["train", "val"]:
        model.train(phase == "train")
        for inputs, labels in loaders[phase]:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs.cuda())
                loss = criterion(outputs, labels.cuda())
                if phase == "train":
                    loss.backward()
                    optimizer.step()
"""

ACCUMULATION = """
import torch
from torch import nn

accum_steps = 4
model = build_model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loss_fn = nn.CrossEntropyLoss(ignore_index=0)
optimizer.zero_grad()
for i, (x, y) in enumerate(loader):
    loss = loss_fn(model(x.cuda()).transpose(1, 2), y.cuda()) / accum_steps
    loss.backward()
    if (i + 1) % accum_steps == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

POLICY_GRADIENT = """
import torch
from torch.distributions import Categorical

policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(1000):
    log_probs, rewards = [], []
    state = env.reset()
    done = False
    while not done:
        dist = Categorical(logits=policy(state))
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(discounted(rewards))
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = -(torch.stack(log_probs) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def edited(script: str, edits: str) -> str:
    """Return a script in which ``-`` lines, which it must hold, are replaced by ``+`` lines.

    Edits are separated by empty lines.
    """
    for edit in edits.strip("\n").split("\n\n"):
        lines = edit.split("\n")
        old = "".join(f"{line[1:]}\n" for line in lines if line.startswith("-"))
        new = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
        assert old and script.count(old) == 1, edit
        script = script.replace(old, new)
    return script


def line_of(script: str, part: str) -> int:
    """Return the first line, from 1, that holds a text."""
    return next(n for n, line in enumerate(script.split("\n"), 1) if part in line)
