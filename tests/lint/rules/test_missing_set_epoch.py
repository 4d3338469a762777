import pytest

IMPORTS = """
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
"""
FOUND = {
    "a loop in the function": """
sampler = DistributedSampler(data)  # here
loader = DataLoader(data, sampler=sampler)
for epoch in range(9):
    for batch in loader:
        step(batch)
""",
    "a sampler in place": """
loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))  # here
for epoch in range(9):
    train(loader)
""",
    "attributes": """
class Trainer:
    def __init__(self, data):
        self.sampler = DistributedSampler(data)  # here
        self.loader = DataLoader(data, sampler=self.sampler)

    def train(self):
        for epoch in range(9):
            for i, batch in enumerate(self.loader):
                step(batch)
""",
    "only if distributed": """
sampler = DistributedSampler(data) if distributed else None  # here
loader = DataLoader(data, sampler=sampler, shuffle=sampler is None)
for current_epoch in range(9):
    train(current_epoch, loader)
""",
}
SILENT = {
    "set": """
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(9):
    sampler.set_epoch(epoch)
    train(loader)
""",
    "without shuffling": """
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, sampler=sampler)
for epoch in range(9):
    evaluate(loader)
""",
    "set by a function that is given it": """
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(9):
    accuracy = train(loader, epoch, sampler=sampler)
""",
    "given to a framework": """
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
loader, sampler = prepare(loader, sampler)
for epoch in range(9):
    train(loader)
""",
    "returned": """
def load(data):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=sampler)
    return loader, sampler

for epoch in range(9):
    train(loader)
""",
    "no epochs": """
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for batch in loader:
    step(batch)
""",
    "the loop of another loader": """
sampler = DistributedSampler(data)
once = DataLoader(data, sampler=sampler)
for epoch in range(9):
    train(loader)
""",
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_a_sampler_that_is_never_told_the_epoch_is_found(marked, program):
    assert marked("DAT001", IMPORTS + program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("DAT001", IMPORTS + program)
