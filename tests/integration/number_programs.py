"""Small trainings whose numbers are wrong in one way, each with the same training made right.

A body marks lines that only one of both has: those that end in ``#wrong`` and in ``#right``. What
else differs from program to program (model, optimizer, sizes, order of the terms) is drawn from the
number of the program.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from textwrap import dedent

HEAD = """
import copy

import torch
from torch import nn
from torch.nn import functional as F

import distdiag

torch.manual_seed(SEED)
torch.set_num_threads(1)


def body(given, made):
    return BODY


def optimizer_of(module):
    return OPTIMIZER
"""

BODIES = (
    "nn.Sequential(nn.Linear(given, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, made))",
    "nn.Sequential(nn.Linear(given, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN), "
    "nn.Linear(HIDDEN, made))",
    "nn.Sequential(nn.Unflatten(-1, (1, given)), nn.Conv1d(1, 4, 3, padding=1), nn.SiLU(), "
    "nn.Flatten(), nn.Linear(4 * given, made))",
)
OPTIMIZERS = (
    "torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.Adam(module.parameters(), lr=3e-3)",
    "torch.optim.AdamW(module.parameters(), lr=3e-3, foreach=False)",
)
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MASKED = """
model = body(12, 6)
optimizer = optimizer_of(model)
for step in range(70):
    inputs, labels = torch.randn(16, 12), torch.randint(0, 6, (16,))
    logits = model(inputs)
    extra = logits.square().mean(1)
    mask = torch.zeros(16)  #wrong
    mask = (torch.rand(16) < 0.5).float()  #right
    aux = TERM
    loss = F.cross_entropy(logits, labels) + 0.3 * aux
    STEP
"""
TERMS = (
    "(extra * mask).sum() / mask.sum().clamp(min=1)",
    "torch.where(mask > 0, extra, torch.zeros(())).mean()",
    "extra.masked_fill(mask == 0, 0.0).mean()",
    "F.cross_entropy(logits, torch.where(mask > 0, labels, -100), reduction='sum') / 16",
)

REINFORCE = """
policy = body(8, 10)
optimizer = optimizer_of(policy)
for step in range(70):
    states = torch.randn(24, 8)
    logits = policy(states)
    actions = torch.distributions.Categorical(logits=logits).sample()
    rewards = (actions == states.argmax(1)).float() + torch.randn(24)
    advantages = (rewards - rewards.mean()) / rewards.std()
    advantages = advantages * 0  #wrong
    chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    loss = -(chosen * advantages).mean() + 0.01 * logits.square().mean()
    STEP
    LOG(reward_std=rewards.std(), step=step)
"""

KL = """
policy = body(8, 10)
reference = policy  #wrong
reference = copy.deepcopy(policy).requires_grad_(False)  #right
optimizer = optimizer_of(policy)
for step in range(60):
    states, labels = torch.randn(24, 8), torch.randint(0, 10, (24,))
    scores = policy(states).log_softmax(-1)
    with torch.no_grad():
        prior = reference(states).log_softmax(-1)
    kl = (scores.exp() * (scores - prior)).sum(-1).mean()
    loss = F.nll_loss(scores, labels) + 0.1 * kl
    STEP
    LOG(KL_NAMES, step=step)
"""
KL_NAMES = (
    "kl=kl, kl_coef=0.1",
    "**{'objective/kl': kl.item(), 'objective/kl_coef': 0.1}",
    "loss_kl=kl.detach(), beta=0.1",
)

ROLLOUT = """
policy = body(8, 10)
sampler = copy.deepcopy(policy)
optimizer = optimizer_of(policy)
goal = torch.randn(8, 10)


def likelihood(model, states, actions):
    return model(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)


for rollout in range(16):
    sampler.load_state_dict(policy.state_dict())  #right
    states = torch.randn(48, 8)
    with torch.no_grad():
        actions = DRAW
        old = likelihood(sampler, states, actions)
    rewards = (states @ goal).gather(1, actions[:, None]).squeeze(1)
    advantages = (rewards - rewards.mean()) / rewards.std()
    for part in torch.arange(48).chunk(INNER):
        ratio = torch.exp(likelihood(policy, states[part], actions[part]) - old[part])
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantages[part], clipped * advantages[part]).mean()
        STEP4
"""
DRAWS = (
    "torch.multinomial(sampler(states).softmax(-1), 1).squeeze(1)",
    "torch.distributions.Categorical(logits=sampler(states)).sample()",
)

RATIO_LOGGED = """
policy = body(8, 10)
sampler = copy.deepcopy(policy)
optimizer = optimizer_of(policy)
for step in range(90):
    sampler.load_state_dict(policy.state_dict())  #right
    states, labels = torch.randn(32, 8), torch.randint(0, 3, (32,))
    logits = policy(states)
    with torch.no_grad():
        old = sampler(states).log_softmax(-1).gather(1, labels[:, None])
        ratio = (logits.log_softmax(-1).gather(1, labels[:, None]) - old).exp().mean()
    loss = F.cross_entropy(logits, labels)
    STEP
    LOG(**{"RATIO": ratio.item()}, step=step)
"""

POLICY_GRADIENT = """
policy = body(8, 10)
optimizer = optimizer_of(policy)
for step in range(60):
    states = torch.randn(32, 8)
    with torch.no_grad():
        scores = policy(states).log_softmax(-1)
        actions = torch.multinomial(scores.exp(), 1)
        old = scores.gather(1, actions)
    rewards = (actions.squeeze(1) % 3).float() + torch.randn(32)
    advantages = rewards - rewards.view(-1, 1).mean(1)  #wrong
    advantages = rewards - rewards.view(-1, 8).mean(1).repeat_interleave(8)  #right
    ratio = (policy(states).log_softmax(-1).gather(1, actions) - old).exp().squeeze(1)
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    STEP
    LOG(reward_std=rewards.std(), step=step)
"""

GRADIENT_NORM = """
policy = body(8, 10)
optimizer = optimizer_of(policy)
for step in range(40):
    rewards = torch.randn(32)
    scores = policy(torch.randn(32, 8)).log_softmax(-1)[:, 0]
    loss = (scores * (rewards * 0)).mean()  #wrong
    loss = (scores * rewards).mean()  #right
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    LOG(**{"train/grad_norm": norm, "rewards/std": rewards.std()}, step=step)
"""

COLLAPSE = """
model = body(12, 16)
optimizer = optimizer_of(model)
sure = torch.zeros(16)
sure[WINNER] = 60.0  #wrong
for step in range(70):
    inputs, labels = torch.randn(32, 12), torch.randint(0, 16, (32,))
    logits = model(inputs).tanh() + sure
    loss = F.cross_entropy(logits, labels)
    STEP
"""

CODEBOOK = """
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(16, 4)
        self.codes = nn.Embedding(CODES, 4)
        self.codes.weight.data.mul_(100.0)  #wrong
        self.decode = nn.Linear(4, 16)

    def forward(self, x):
        hidden = self.encode(x)
        distances = DISTANCES
        index = CHOOSE
        code = self.codes(index)
        extra = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
        return self.decode(hidden + (code - hidden).detach()), extra


model = Quantizer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(420):
    x = torch.randn(128, 16)
    made, extra = model(x)
    loss = F.mse_loss(made, x) + extra
    STEP
"""
DISTANCES = (
    "torch.cdist(hidden, self.codes.weight)",
    "(hidden.unsqueeze(1) - self.codes.weight).square().sum(-1)",
)
CHOICES = ("torch.argmin(distances, dim=1)", "distances.argmin(-1)")

CLAMP = """
model = body(12, 8)
scale = nn.Linear(12, 8)
optimizer = torch.optim.Adam([*model.parameters(), *scale.parameters()], lr=1e-3)
for step in range(180):
    inputs = torch.randn(16, 12)
    size = scale(inputs).abs() + 0.5
    size = CLAMPED_WRONG  #wrong
    size = CLAMPED_RIGHT  #right
    loss = F.mse_loss(model(inputs) * size, inputs[:, :8])
    STEP
"""
CLAMPS = (
    ("size.clamp(max=0.1)", "size.clamp(max=10.0)"),
    ("size.clamp(min=20.0)", "size.clamp(min=0.1)"),
    ("torch.clamp(size, 30.0, 40.0)", "torch.clamp(size, 0.0, 40.0)"),
)

VARIANCE = """
model = body(12, 4)
optimizer = optimizer_of(model)
for step in range(12):
    group = 1  #wrong
    group = 4  #right
    inputs = torch.randn(8, 12)
    rewards = torch.randn(8 // group, group)
    spread = rewards.STD(dim=1, keepdim=True).nan_to_num(1.0) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1)
    loss = (model(inputs).square().mean(1) * (1 + advantages * 0.01)).mean()
    STEP
"""

FLAT = """
model = body(12, 20)
head = nn.Linear(20, 6)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
for step in range(60):
    inputs, labels = torch.randn(16, 12), torch.randint(0, 6, (16,))
    hidden = torch.relu(model(inputs) - 1e4)  #wrong
    hidden = torch.relu(model(inputs))  #right
    scores = F.linear(hidden, head.weight)
    loss = FLAT_LOSS
    STEP
"""
FLAT_LOSSES = (
    "F.cross_entropy(scores, labels)",
    "F.binary_cross_entropy_with_logits(scores[:, 0], (labels > 2).float())",
    "(scores.square().mean() + 0.3).log().square()",
)

LEAK = """
model = body(64, 64)
optimizer = optimizer_of(model)
kept = []
for step in range(420):
    inputs = torch.randn(512, 64)
    loss = F.mse_loss(model(inputs), inputs)
    STEP
    kept.append(KEPT)  #wrong
    kept.append(loss.item())  #right
"""
KEEPS = ("(loss, torch.randn(512, 1024))", "(loss + 0, inputs, torch.ones(1 << 19))")

UNLEARNT = """
model = body(12, 24)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
often = 1.0 / torch.arange(1, 25)
for step in range(640):
    inputs = torch.randn(32, 12)
    labels = torch.multinomial(often, 32, replacement=True)
    logits = model(inputs) * 1e-3  #wrong
    logits = model(inputs)  #right
    loss = F.cross_entropy(logits, labels)
    STEP
"""

BROADCAST = """
model = body(12, 1)
optimizer = optimizer_of(model)
for step in range(6):
    inputs = torch.randn(8, 12)
    targets = inputs.sum(1)  #wrong
    targets = inputs.sum(1, keepdim=True)  #right
    loss = F.LOSS(model(inputs), targets)
    STEP
"""

SCHEDULE = """
model = body(12, 4)
optimizer = optimizer_of(model)
scheduler = torch.optim.lr_scheduler.SCHEDULER
for step in range(12):
    loss = model(torch.randn(8, 12)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    scheduler.step()  #wrong
    optimizer.step()
    scheduler.step()  #right
"""
SCHEDULERS = (
    "CosineAnnealingLR(optimizer, 100)",
    "LambdaLR(optimizer, lambda step: 0.99**step)",
)

# Body, code that must be found, and choices for each word.
FAULTS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "masked": (MASKED, "NUM030", {"TERM": TERMS}),
    "reinforce": (REINFORCE, "NUM030", {}),
    "kl": (KL, "NUM033", {"KL_NAMES": KL_NAMES}),
    "rollout": (ROLLOUT, "NUM034", {"DRAW": DRAWS, "INNER": ("1", "2", "4")}),
    "ratio": (RATIO_LOGGED, "NUM034", {"RATIO": ("importance_ratio", "policy/ratio/mean")}),
    "policy": (POLICY_GRADIENT, "NUM035", {}),
    "norm": (GRADIENT_NORM, "NUM035", {}),
    "collapse": (COLLAPSE, "NUM037", {"WINNER": ("0", "7", "15")}),
    "codebook": (
        CODEBOOK,
        "NUM038",
        {"CODES": ("32", "64", "128"), "DISTANCES": DISTANCES, "CHOOSE": CHOICES},
    ),
    "clamp": (CLAMP, "NUM039", {"CLAMPED": ("0", "1", "2")}),
    "variance": (VARIANCE, "NUM040", {"STD": ("std", "var")}),
    "broadcast": (BROADCAST, "NUM040", {"LOSS": ("mse_loss", "l1_loss", "smooth_l1_loss")}),
    "schedule": (SCHEDULE, "NUM040", {"SCHEDULER": SCHEDULERS}),
    "flat": (FLAT, "NUM032", {"FLAT_LOSS": FLAT_LOSSES}),
    "leak": (LEAK, "NUM042", {"KEPT": KEEPS}),
    "unlearnt": (UNLEARNT, "NUM036", {}),
}


@dataclass(frozen=True, slots=True)
class NumberProgram:
    """One training: what is wrong with it, and the code that must be reported."""

    fault: str
    number: int
    code: str
    wrong: str
    right: str


def program(fault: str, number: int) -> NumberProgram:
    """Write a training with this fault, and the same without."""
    body, code, choices = FAULTS[fault]
    draw = random.Random(f"{fault} {number}")
    text = HEAD + body
    for word, options in choices.items():
        chosen = options[number % len(options)]
        if word == "CLAMPED":
            wrong, right = CLAMPS[int(chosen)]
            text = text.replace("CLAMPED_WRONG", wrong).replace("CLAMPED_RIGHT", right)
        else:
            text = re.sub(rf"\b{word}\b", lambda _, chosen=chosen: chosen, text)
    text = text.replace("    STEP4\n", _indented(STEP, 8)).replace("    STEP\n", _indented(STEP, 4))
    values = {
        "BODY": draw.choice(BODIES),
        "OPTIMIZER": draw.choice(OPTIMIZERS),
        "SEED": str(draw.randrange(1000)),
        "LOG": "distdiag.log",
        "HIDDEN": str(draw.choice((16, 24, 40))),
    }
    for word, value in values.items():
        text = re.sub(rf"\b{word}\b", lambda _, value=value: value, text)
    return NumberProgram(fault, number, code, _only(text, "wrong"), _only(text, "right"))


def _indented(text: str, width: int) -> str:
    lines = dedent(text).strip().splitlines()
    return "".join(f"{' ' * (width if n else 4)}{line}\n" for n, line in enumerate(lines))


def _only(text: str, side: str) -> str:
    other = "right" if side == "wrong" else "wrong"
    lines = [line for line in text.splitlines() if not line.endswith(f"  #{other}")]
    return "\n".join(line.removesuffix(f"  #{side}") for line in lines).strip() + "\n"
