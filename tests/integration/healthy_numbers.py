"""Correct trainings whose numbers look odd: each must run without a warning."""

from __future__ import annotations

HEAD = """
import copy

import torch
from torch import nn
from torch.nn import functional as F

import distdiag

torch.manual_seed(3)
torch.set_num_threads(1)
"""
STEP = """optimizer.zero_grad()
    loss.backward()
    optimizer.step()"""

HEALTHY = {
    "language model, 300 steps": """
model = nn.Sequential(nn.Embedding(97, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 97))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
text = torch.arange(5000).pow(2) % 97
for step in range(300):
    begin = torch.randint(0, 4900, (8, 1))
    rows = text[begin + torch.arange(17)]
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 97), rows[:, 1:].reshape(-1))
    STEP
    schedule.step()
    distdiag.log(loss=loss, step=step)
""",
    "random tokens for ever": """
model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(700):
    rows = torch.randint(0, 64, (4, 17))
    loss = F.cross_entropy(model(rows[:, :-1]).reshape(-1, 64), rows[:, 1:].reshape(-1))
    STEP
""",
    "warm-up from a rate of zero, same batch": """
model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
inputs, labels = torch.randn(32, 8), torch.randint(0, 4, (32,))
for step in range(80):
    loss = F.cross_entropy(model(inputs), labels)
    STEP
    schedule.step()
""",
    "hinge GAN": """
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3) for m in (maker, judge)]
for step in range(200):
    real, fake = torch.randn(32, 2) + 3, maker(torch.randn(32, 4))
    loss = (F.relu(1 - judge(real)) + F.relu(1 + judge(fake.detach()))).mean()
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-judge(fake).mean()).backward()
    optimizers[0].step()
    distdiag.log(loss_judge=loss, step=step)
""",
    "PPO with several epochs and a value loss": """
policy, value = nn.Linear(6, 5), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-2)
reference = copy.deepcopy(policy)
goal = torch.randn(6, 5)
for rollout in range(14):
    states = torch.randn(64, 6)
    with torch.no_grad():
        scores = policy(states).log_softmax(-1)
        actions = torch.multinomial(scores.exp(), 1)
        old = scores.gather(1, actions)
        prior = reference(states).log_softmax(-1).gather(1, actions)
    rewards = (states @ goal).gather(1, actions)
    for epoch in range(4):
        for part in torch.randperm(64).chunk(4):
            advantages = (rewards - value(states)).detach()[part]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            new = policy(states[part]).log_softmax(-1)
            chosen = new.gather(1, actions[part])
            ratio = (chosen - old[part]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            away = prior[part] - chosen
            kl = (away.exp() - away - 1).mean()
            entropy = -(new.exp() * new).sum(-1).mean()
            loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            loss = loss + 0.5 * F.mse_loss(value(states[part]), rewards[part])
            loss = loss + 0.05 * kl - 0.01 * entropy
            STEP3
    distdiag.log(kl=kl, kl_coef=0.05, approx_kl=(old[part] - chosen).mean(), ratio=ratio.mean(),
                 reward_std=rewards.std(), entropy=entropy, step=rollout)
""",
    "one update for each rollout: ratio 1, approximate KL 0, loss 0": """
policy = nn.Linear(6, 5)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
goal = torch.randn(6, 5)
for step in range(80):
    states = torch.randn(16, 6)
    scores = policy(states).log_softmax(-1)
    actions = torch.multinomial(scores.exp().detach(), 1)
    chosen = scores.gather(1, actions)
    rewards = (states @ goal).gather(1, actions)
    advantages = (rewards - rewards.mean()) / rewards.std()
    ratio = (chosen - chosen.detach()).exp()
    loss = -(ratio * advantages).mean()
    STEP
    with torch.no_grad():
        approx_kl = (chosen - chosen).mean()
    distdiag.log(approx_kl=approx_kl, ratio=ratio.mean(), reward_std=rewards.std(), loss=loss)
""",
    "rewards that are all alike for the first 40 steps": """
policy = nn.Linear(6, 5)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(80):
    states = torch.randn(16, 6)
    scores = policy(states).log_softmax(-1)
    actions = torch.multinomial(scores.exp().detach(), 1)
    rewards = (actions == 0).float() * (step >= 40)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    ratio = (scores.gather(1, actions) - scores.gather(1, actions).detach()).exp()
    loss = -(ratio * advantages).mean()
    STEP
    distdiag.log(reward_std=rewards.std(), step=step)
""",
    "a quantizer in its beginning": """
encode, codes, decode = nn.Linear(16, 4), nn.Embedding(256, 4), nn.Linear(4, 16)
model = nn.ModuleList([encode, codes, decode])
codes.weight.data.uniform_(-1 / 256, 1 / 256)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    x = torch.randn(64, 16)
    hidden = encode(x)
    code = codes(torch.cdist(hidden, codes.weight).argmin(1))
    loss = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
    loss = loss + F.mse_loss(decode(hidden + (code - hidden).detach()), x)
    STEP
""",
    "a small batch for a large codebook": """
encode, codes, decode = nn.Linear(16, 4), nn.Embedding(512, 4), nn.Linear(4, 16)
model = nn.ModuleList([encode, codes, decode])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(400):
    x = torch.randn(4, 16)
    hidden = encode(x)
    code = codes(torch.cdist(hidden, codes.weight).argmin(1))
    loss = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
    loss = loss + F.mse_loss(decode(hidden + (code - hidden).detach()), x)
    STEP
""",
    "a contrastive term that is zero in the warm-up": """
model = nn.Linear(12, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(130):
    left, right = torch.randn(16, 12), torch.randn(16, 12)
    a, b = F.normalize(model(left), dim=1), F.normalize(model(right), dim=1)
    weight = 0.0 if step < 70 else 0.5
    contrast = F.cross_entropy(a @ b.T / 0.1, torch.arange(16))
    rebuilt = F.mse_loss(model(left), left[:, :8])
    loss = rebuilt + weight * contrast
    STEP
    distdiag.log(loss_rebuilt=rebuilt, loss_contrast=weight * contrast, step=step)
""",
    "a term that is switched on later by a mask": """
model = nn.Linear(12, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(130):
    inputs, labels = torch.randn(16, 12), torch.randint(0, 6, (16,))
    logits = model(inputs)
    mask = torch.full((16,), float(step >= 55))
    aux = (logits.square().mean(1) * mask).sum() / mask.sum().clamp(min=1)
    loss = F.cross_entropy(logits, labels) + 0.1 * aux
    STEP
    distdiag.log(loss_ce=F.cross_entropy(logits, labels), loss_aux=aux, step=step)
""",
    "LoRA, whose first KL is zero": """
base = nn.Linear(12, 6).requires_grad_(False)
down, up = nn.Linear(12, 2, bias=False), nn.Linear(2, 6, bias=False)
nn.init.zeros_(up.weight)
optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=1e-3)
for step in range(60):
    inputs, labels = torch.randn(16, 12), torch.randint(0, 6, (16,))
    scores = (base(inputs) + up(down(inputs))).log_softmax(-1)
    prior = base(inputs).log_softmax(-1)
    kl = F.kl_div(prior, scores, log_target=True, reduction="batchmean")
    loss = F.nll_loss(scores, labels) + 0.1 * kl
    STEP
    distdiag.log(kl=kl, kl_coef=0.1, loss=loss, step=step)
""",
    "label smoothing and rare classes": """
model = nn.Linear(12, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(600):
    inputs = torch.randn(32, 12)
    labels = (inputs[:, 0] > 1.5).long() * 99
    loss = F.cross_entropy(model(inputs), labels, label_smoothing=0.1)
    STEP
""",
    "distillation from a frozen copy that samples": """
teacher = nn.Linear(12, 20).requires_grad_(False)
model = copy.deepcopy(teacher).requires_grad_(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(90):
    inputs = torch.randn(16, 12)
    with torch.no_grad():
        taught = teacher(inputs).log_softmax(-1)
        tokens = torch.multinomial(taught.exp(), 1).squeeze(1)
    scores = model(inputs).log_softmax(-1)
    loss = F.kl_div(scores, taught, log_target=True, reduction="batchmean")
    loss = loss + F.nll_loss(scores, tokens)
    STEP
""",
    "a triplet loss that is satisfied": """
model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
centre = torch.tensor([8.0, 0.0, 0.0, 0.0])
for step in range(200):
    a, b, c = torch.randn(16, 4) + centre, torch.randn(16, 4) + centre, torch.randn(16, 4) - centre
    near = (model(a) - model(b)).norm(dim=1)
    far = (model(a) - model(c)).norm(dim=1)
    loss = (near - far + 0.5).clamp(min=0).mean() + 1e-4 * model(a).square().mean()
    STEP
""",
    "bfloat16 losses on a plateau": """
model = nn.Linear(12, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(150):
    outputs = (model(torch.randn(64, 12)) * 0.01).bfloat16()
    loss = F.cross_entropy(outputs, torch.randint(0, 1000, (64,)))
    STEP
""",
    "a sure and right classifier": """
model = nn.Linear(2, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(200):
    inputs = torch.randn(32, 2) + 20
    loss = F.cross_entropy(model(inputs), torch.zeros(32, dtype=torch.long))
    STEP
""",
    "normalisation by clamped norms and logarithms of clamped numbers": """
model = nn.Linear(12, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(180):
    hidden = model(torch.randn(16, 12))
    unit = hidden / hidden.norm(dim=1, keepdim=True).clamp(min=1e-8)
    mixed = unit.sigmoid().clamp(1e-6, 1 - 1e-6).log()
    loss = -mixed.mean() + (hidden * 0).clamp(min=1e-6).log().mean()
    STEP
""",
    "micro-batches, with losses that are kept as numbers": """
model = nn.Linear(12, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40)
losses = []
for step in range(130):
    for micro in range(4):
        inputs = torch.randn(8, 12)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), torch.randint(0, 4, (8,))) / 4
        scaler.scale(loss).backward()
        losses.append(loss.item())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
""",
    "variances of one sample without a correction, and caught warnings": """
import warnings

model = nn.Linear(12, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    made = model(torch.randn(1, 12))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        torch.randn(1).std()
    loss = made.square().mean() + made.var(dim=0, correction=0).mean()
    STEP
""",
    "a target of one element": """
judge = nn.Linear(4, 1)
optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
for step in range(10):
    loss = F.mse_loss(judge(torch.randn(8, 4)), torch.ones(1))
    STEP
""",
    "a data set that is kept in memory as it is read": """
from torch.utils.data import DataLoader, Dataset


class Kept(Dataset):
    def __init__(self):
        self.rows = {}

    def __len__(self):
        return 360

    def __getitem__(self, index):
        if index not in self.rows:
            self.rows[index] = torch.randn(1 << 19)
        return self.rows[index][:16]


model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in DataLoader(Kept(), batch_size=1, shuffle=True):
    loss = F.mse_loss(model(rows), rows)
    STEP
""",
    "experience that is collected until a buffer is full": """
import collections
import random

experience = collections.deque(maxlen=4000)
model = nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(420):
    experience.append(torch.randn(1 << 19))
    rows = torch.stack([random.choice(experience)[:16] for _ in range(8)])
    loss = F.mse_loss(model(rows), rows)
    STEP
""",
    "a ring buffer that is reserved at once": """
import numpy as np

ring = np.zeros((4000, 1 << 19), np.float32)
model = nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step in range(420):
    ring[step] = np.random.rand(1 << 19)
    rows = torch.from_numpy(ring[np.random.randint(0, step + 1, 8), :16])
    loss = F.mse_loss(model(rows), rows)
    STEP
    losses.append(loss)
""",
    "a contrast with a queue, whose right place is the first": """
model = nn.Linear(32, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
queue = F.normalize(torch.randn(512, 16), dim=1)
for step in range(700):
    x = torch.randn(16, 32)
    one = F.normalize(model(x + 0.3 * torch.randn(16, 32)), dim=1)
    with torch.no_grad():
        other = F.normalize(model(x), dim=1)
    scores = torch.cat([(one * other).sum(1, keepdim=True), one @ queue.T], 1) / 0.5
    loss = F.cross_entropy(scores, torch.zeros(16, dtype=torch.long))
    STEP
    queue = torch.cat([queue[16:], other])
""",
    "a contrast in which a rank's places begin behind those of others": """
model = nn.Linear(32, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(700):
    x = torch.randn(512, 32)
    one = F.normalize(model(x[48:64] + 0.3 * torch.randn(16, 32)), dim=1)
    with torch.no_grad():
        others = F.normalize(model(x), dim=1)
    loss = F.cross_entropy(one @ others.T, torch.arange(48, 64))
    STEP
""",
    "a VAE whose KL is weighed by a warm-up": """
encode, decode = nn.Linear(12, 8), nn.Linear(4, 12)
optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-3)
for step in range(120):
    x = torch.randn(32, 12)
    mean, spread = encode(x).chunk(2, 1)
    spread = spread.clamp(-10, 10)
    z = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
    kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    weight = max(0.0, (step - 60) / 60)
    loss = F.mse_loss(decode(z), x) + weight * kl
    STEP
    distdiag.log(loss_kl=weight * kl, kl_weight=weight, kl=kl, step=step)
""",
}


def program(name: str) -> str:
    """Return the text of a correct training."""
    text = HEAD + HEALTHY[name].replace("STEP3", STEP.replace("\n", "\n        "))
    return text.replace("STEP", STEP).lstrip()
