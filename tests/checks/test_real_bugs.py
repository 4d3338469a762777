"""Real bugs, as the ranks' records show them: one finding each, with the right rank and line."""

import signal

import pytest

from distdiag.events.lifecycle import Signalled
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, Program, event_of, signature
from tests.checks.verdicts import serious

GATHER = "all_gather_into_tensor"


def only(alignment):
    (finding,) = serious(alignment)
    return finding


def test_a_head_that_is_called_more_often_on_one_rank(tmp_path):
    p = Program(
        tmp_path,
        """
        def forward(self, page, crops):
            context = self.encoder(page)
            for crop in crops:
                logits.append(self.head(context + crop))

        def main():
            for step in range(8):
                logits = model(page, crops)
                loss.backward()
        """,
    )
    encoder = p.site("self.encoder(", "model(page", module="encoder")
    head = p.site("self.head(", "model(page", module="head")
    backward = p.site("loss.backward", module="head")
    job = Job()
    for _ in range(2):
        for site in (encoder, head, head, backward, backward):
            job.every(site, GATHER)
        job.every(backward, "reduce_scatter_tensor")
    job.every(encoder, GATHER)
    job.every(head, GATHER)
    job.call(0, backward, GATHER)
    job.call(1, head, GATHER)
    assert serious(job.alignment()) == []  # different lines alone are no contradiction
    job.call(0, backward, "reduce_scatter_tensor")
    job.call(1, head, GATHER)
    finding = only(job.alignment())
    assert (finding.code, finding.ranks, finding.subjects) == ("COL011", RankSet([0]), ("head",))
    assert finding.location.line == p.line("for crop")


def test_an_assertion_on_the_rank_that_cannot_fill_its_micro_batches(tmp_path):
    p = Program(
        tmp_path,
        """
        def split(rollouts):
            assert pieces == count

        def main():
            for step in range(6):
                micro_batches = split(collect())
                loss.backward()
        """,
    )
    job = Job()
    job.every(p.site("loss.backward"))
    job.call(1, p.site("loss.backward"))
    job.fail(0, 5, p.frame("assert pieces"), kind="AssertionError", message="2 pieces for 3")
    finding = only(job.alignment(trigger=Trigger.LEFT))
    assert (finding.code, finding.ranks) == ("HNG001", RankSet([0]))
    assert finding.location.line == p.line("assert pieces")


def test_a_rank_without_gradients_skips_the_gather_of_the_optimizer(tmp_path):
    p = Program(
        tmp_path,
        """
        def step(self):
            if not active:
                return
            self._gather_blocks()

        def _gather_blocks(self):
            for param, owner in self.owned:
                dist.all_gather(blocks, block)

        def main():
            for step in range(9):
                loss.backward()
                optimizer.step()
        """,
    )
    backward = p.site("loss.backward")
    gather = p.site("dist.all_gather", "self._gather_blocks()", "optimizer.step()")
    job = Job()
    for _ in range(2):
        job.every(backward)
        job.every(backward)
        for _ in range(6):
            job.every(gather, "all_gather")
    job.every(backward)
    job.every(backward)
    job.call(0, gather, "all_gather")
    job.call(1, backward)
    finding = only(job.alignment())
    assert (finding.code, finding.ranks, finding.grade) == ("COL002", RankSet([1]), Grade.LIKELY)
    assert "never called all_gather" in finding.message


TRAINER = """
    def save_checkpoint(model):
        dist.barrier()

    def main():
        for step in range(12):
            loss.backward()
            if handler.received:
                break
        save_checkpoint(model)
    """


def test_a_signal_that_reaches_one_rank_only(tmp_path):
    p = Program(tmp_path, TRAINER)
    job = Job()
    for _ in range(4):
        job.every(p.site("loss.backward"))
    job.call(0, p.site("loss.backward"))
    job.call(1, p.site("dist.barrier", "    save_checkpoint(model)"), "barrier")
    job.set(1, signalled=event_of(Signalled, 1, signal=signal.SIGUSR1))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([1]))
    assert "SIGUSR1" in finding.message


FIT = """
    def train_epoch(model, loader):
        for batch in loader:
            loss.backward()

    def main():
        for epoch in range(12):
            train_epoch(model, loader)
            dist.all_reduce(stats)
            if stopper.should_stop(loss):
                break
        dist.all_gather_object(histories, history)
    """


def test_early_stopping_on_a_local_metric(tmp_path):
    p = Program(tmp_path, FIT)
    backward = p.site("loss.backward", "    train_epoch(model, loader)")
    job = Job()
    for _ in range(6):
        job.every(backward)
    job.call(0, backward)
    job.call(1, p.site("all_gather_object"), "all_gather")
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([1]))
    assert finding.location.line == p.line("    if ")


@pytest.mark.parametrize("num_epochs", [0, 2])
def test_an_iterable_dataset_that_is_shorter_on_one_rank(tmp_path, num_epochs):
    p = Program(tmp_path, FIT)
    backward = p.site("loss.backward", "    train_epoch(model, loader)")
    metric = p.site("all_reduce(stats)")
    job = Job()
    for _ in range(num_epochs):
        for _ in range(6):
            job.every(backward)
        job.every(metric)
    for _ in range(6):
        job.every(backward)
    # The metric meets a gradient bucket: the same operation, of another size.
    job.call(0, backward, sign=signature(numel=881))
    job.call(1, metric, sign=signature(numel=2))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([1]))


def test_equal_modules_in_different_order(tmp_path):
    p = Program(tmp_path, "def main():\n    self.adapters[modality](hidden)")
    job = Job()
    job.call(0, p.site("adapters", module="adapters.image"), GATHER)
    job.call(1, p.site("adapters", module="adapters.text"), GATHER)
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL007", RankSet([0, 1]))
    assert finding.subjects == ("adapters.image", "adapters.text")


ENGINE = """
    def save_checkpoint(folder):
        dist.barrier()

    def main():
        is_main_process = rank == 0
        for step in range(10):
            loss.backward()
            if is_main_process:
                if step % 4 == 0:
                    save_checkpoint(folder)
            dist.all_reduce(metric)
    """


def test_a_sharded_checkpoint_saved_by_the_main_process_alone(tmp_path):
    p = Program(tmp_path, ENGINE)
    job = Job()
    for _ in range(3):
        job.every(p.site("loss.backward"))
    job.call(0, p.site("dist.barrier", "    save_checkpoint(folder)"), "barrier")
    job.call(1, p.site("all_reduce(metric)"))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL009", RankSet([0]))
    assert finding.location.line == p.line("dist.barrier")
    assert p.line("if is_main") in {e.location.line for e in finding.evidence}


def test_a_validation_loop_of_uneven_length(tmp_path):
    p = Program(
        tmp_path,
        """
        def validate(self):
            for sequences in self.loader:
                model(sequences)
            dist.all_reduce(total)

        def main():
            for step in range(9):
                loss.backward()
                validator.validate()
        """,
    )
    forward = p.site("    model(sequences)", "validator.validate", module="layers.0")
    job = Job()
    job.every(p.site("loss.backward"))
    for _ in range(3):
        job.every(forward, GATHER)
    job.call(0, forward, GATHER)
    job.call(1, p.site("all_reduce(total)", "validator.validate"))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([1]))


def test_saving_an_adapter_runs_a_forward_on_one_rank(tmp_path):
    p = Program(
        tmp_path,
        """
        def adapter_state_dict(self):
            return self.prompt_encoder(indices)

        def main():
            for step in range(8):
                if rank == 0:
                    save(adapter_state_dict())
                dist.barrier()
        """,
    )
    job = Job()
    job.call(0, p.site("prompt_encoder(", "save(adapter", module="prompt_encoder"), GATHER)
    job.call(1, p.site("dist.barrier"), "barrier")
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL009", RankSet([0]))
    assert finding.subjects == ("prompt_encoder",)


def test_generation_that_ends_at_each_rank_s_own_end_token(tmp_path):
    p = Program(
        tmp_path,
        """
        def generate(model, prompt):
            for _ in range(20):
                logits = model(tokens)
                if tokens[-1] == EOS:
                    break

        def main():
            completion = generate(model, prompts[rank])
            dist.all_reduce(length)
        """,
    )
    job = Job()
    decode = p.site("logits = model", "completion =", module="block")
    for _ in range(3):
        job.every(decode, GATHER)
    job.call(1, decode, GATHER)
    job.call(0, p.site("all_reduce(length)"))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([0]))


def test_logits_of_different_length_are_gathered():
    job = Job()
    for rank, numel in ((0, 52), (1, 40)):
        sizes = ((numel,),)
        job.call(rank, sign=signature("all_gather", input_sizes=sizes, output_sizes=sizes * 2))
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL003", RankSet([0, 1]))
    assert "rank 0 sends 52 elements to rank 1, which expects 40" in finding.message


def test_micro_batches_that_were_not_agreed_on(tmp_path):
    p = Program(
        tmp_path,
        """
        def update(self, batch):
            for micro_batch in micro_batches:
                values = self.module(micro_batch)
                loss.backward()
            grad_norm = clip_grad_norm_(self.module)

        def main():
            for step in range(6):
                actor.update(batch)
        """,
    )
    forward = p.site("values =", "actor.update", module="0")
    clip = p.site("grad_norm =", "actor.update")
    job = Job()
    for _ in range(3):
        for _ in range(2):
            job.every(forward, GATHER)
            job.every(p.site("loss.backward", "actor.update", module="0"), "reduce_scatter_tensor")
        job.every(clip)
    for _ in range(2):
        job.every(forward, GATHER)
    job.call(1, forward, GATHER)
    job.call(0, clip)
    finding = only(job.alignment())
    assert (finding.code, finding.ranks) == ("COL011", RankSet([0]))
