"""Logs of trainers of language models."""

import json

from tests.metrics.readers.writing import RED, Log, written_as

STAMP = "2025-08-01 07:19:37"


@written_as(
    "megatron",
    loss="lm loss",
    val_loss="validation lm loss value",
    grad_norm="grad norm",
    lr="learning rate",
    loss_scale="loss scale",
    step_time_s="step_time_s",
)
def megatron(log: Log) -> None:
    log.line("using world size: 8, data-parallel size: 4, ...")
    for step in range(1, 31):
        loss = log.put("lm loss", step, f"{log.loss(step):.6E}")
        scale = log.put("loss scale", step, f"{65536.0:.1f}")
        norm = log.put("grad norm", step, f"{log.random.random():.3f}")
        rate = log.put("learning rate", step, f"{1e-4 * step:.6E}")
        ms = f"{log.random.uniform(10, 20000):.1f}"
        log.put("elapsed time per iteration (ms)", step, ms)
        log.put("step_time_s", step, ms, scale=1e-3)
        log.line(
            f" [{STAMP}] iteration {step:8d}/{500:8d} | consumed samples: {step * 128:12d} | "
            f"elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 80.2 | "
            f"learning rate: {rate} | global batch size:   128 | lm loss: {loss} | "
            f"loss scale: {scale} | grad norm: {norm} | "
            f"number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        if step % 10 == 0:
            value = log.put("validation lm loss value", step, f"{log.loss(step):.6E}")
            log.line("-" * 90)
            log.line(
                f" validation loss at iteration {step} on validation set | lm loss value: {value} "
                f"| lm loss PPL: 1.2E+01 | "
            )
            log.line("-" * 90)


@written_as("megatron", loss="lm loss", lr="learning rate")
def megatron_of_2020(log: Log) -> None:
    for step in range(100, 2000, 100):
        loss = log.put("lm loss", step, f"{log.loss(step):.6E}")
        rate = log.put("learning rate", step, f"{1e-4:.3E}")
        log.line(
            f" iteration {step:8d}/{500000:8d} | elapsed time per iteration (ms): 512.4 | "
            f"learning rate: {rate} | lm loss: {loss} | loss scale: 32768.0 |"
        )


@written_as("megatron", loss="lm_loss", throughput="samples/sec")
def gpt_neox(log: Log) -> None:
    for step in range(10, 300, 10):
        loss = log.put("lm_loss", step, f"{log.loss(step):.6E}")
        rate = log.put("samples/sec", step, f"{log.random.uniform(1, 40):.3f}")
        log.line(
            f" samples/sec: {rate} | iteration {step:8d}/{320000:8d} | elapsed time per iteration "
            f"(ms): 120.5 | learning rate: 1.000E-05 | approx flops per GPU: 54.4TFLOPS | "
            f"lm_loss: {loss} | loss scale: 65536.0 | number of skipped iterations:   0 |"
        )
        log.line("time (ms)")


@written_as("nemo", loss="reduced_train_loss", val_loss="val val_loss", lr="lr")
def nemo(log: Log) -> None:
    for step in range(40):
        loss = log.put("reduced_train_loss", step, f"{log.loss(step):.4g}")
        rate = log.put("lr", step, f"{1e-5 * step:.4g}")
        log.line(
            f"[NeMo I 2025-06-18 21:41:53 nemo_logging:393] Training epoch 0, iteration {step}/99 "
            f"| lr: {rate} | global_batch_size: 8 | global_step: {step} | "
            f"reduced_train_loss: {loss} | train_step_timing in s: 1.25"
        )
    value = log.put("val val_loss", 39, f"{log.loss(40):.4g}")
    log.line(f"Validation epoch 0, iteration 5/5 | val_loss: {value}")


@written_as(
    "deepspeed", loss="loss", lr="lr", throughput="samples/sec", step_time_s="iter time (s)"
)
def deepspeed(log: Log) -> None:
    for step in range(10, 300, 10):
        rate = log.put("lr", step, repr(1e-5 * log.random.random()))
        head = f"[{STAMP},123] [INFO] [logging.py:96:log_dist] [Rank 0]"
        log.line(
            f"{head} step={step}, skipped=0, lr=[{rate}, {rate}], mom=[(0.9, 0.95), (0.9, 0.95)]"
        )
        loss = log.put("loss", step, f"{log.loss(step):0.4f}")
        speed = log.put("samples/sec", step, f"{log.random.uniform(1, 9):0.3f}")
        time = log.put("iter time (s)", step, f"{log.random.random():0.3f}")
        log.line(f"steps: {step} loss: {loss} iter time (s): {time} samples/sec: {speed}")
        now = log.put("CurrSamplesPerSec", step, repr(log.random.uniform(1, 9)))
        log.line(
            f"[{STAMP},123] [INFO] [timer.py:260:stop] epoch=0/micro_step={step * 2}/global_step="
            f"{step}, RunningAvgSamplesPerSec=7.1, CurrSamplesPerSec={now}, "
            f"MemAllocated=1.2GB, MaxMemAllocated=3.4GB"
        )
        forward = log.put("time fwd (ms)", step, f"{log.random.random():.2f}")
        log.line(f"[Rank 0] time (ms) | fwd: {forward} | bwd: 3.40")


@written_as(
    "torchtitan",
    loss="loss",
    grad_norm="grad_norm",
    val_loss="validate loss",
    throughput="tps",
    memory="memory",
)
def torchtitan(log: Log) -> None:
    head = "[rank0]:[titan] 2025-08-01 07:19:37,123 - root - INFO - "
    for step in [1, *range(10, 300, 10)]:
        loss = log.put("loss", step, f"{log.loss(step):7.4f}")
        norm = log.put("grad_norm", step, f"{log.random.random():7.4f}")
        memory = log.put("memory", step, f"{log.random.uniform(1, 80):5.2f}")
        speed = log.put("tps", step, f"{round(log.random.uniform(100, 99999)):,}")
        flops = log.put("tflops", step, f"{log.random.uniform(1, 2000):,.2f}")
        log.line(
            f"{head}{RED}step: {step:2}  \x1b[32mloss: {loss}  \x1b[38;2;180;60;0mgrad_norm: {norm}"
            f"  \x1b[38;2;54;234;195mmemory: {memory}GiB(12.50%)  \x1b[34mtps: {speed}  "
            f"\x1b[36mtflops: {flops}  \x1b[35mmfu: 41.20%\x1b[39m"
        )
    value = log.put("validate loss", 290, f"{log.loss(290):7.4f}")
    log.line(f"{head}validate step: 290  loss: {value}  memory:  1.20GiB(1.50%)  tps: 1,234")


@written_as("torchtitan", loss="loss", memory="memory")
def torchtitan_of_2024(log: Log) -> None:
    for step in [1, *range(10, 300, 10)]:
        loss = log.put("loss", step, f"{log.loss(step):7.4f}")
        memory = log.put("memory", step, f"{log.random.uniform(1, 80):5.2f}")
        time = log.put("wps", step, f"{round(log.random.uniform(100, 9999)):,}")
        log.line(
            f"2024-05-01 07:19:37,123 - root - INFO - \x1b[36mstep: {step:2}  \x1b[32mloss: {loss}"
            f"  \x1b[33mmemory: {memory}GiB(31.20%)  \x1b[34mwps: {time}  mfu: 41.20%\x1b[39m"
        )


@written_as("torchtune", loss="loss", lr="lr", throughput="tokens_per_second_per_gpu")
def torchtune(log: Log) -> None:
    for step in range(1, 40):
        loss = log.put("loss", step, repr(log.loss(step)))
        rate = log.put("lr", step, repr(2e-5 * log.random.random()))
        speed = log.put("tokens_per_second_per_gpu", step, repr(log.random.uniform(1, 9999)))
        log.line(f"Step {step} | loss:{loss} lr:{rate} tokens_per_second_per_gpu:{speed} ")


@written_as("nanogpt", loss="loss", val_loss="val loss", step_time_s="time")
def nanogpt(log: Log) -> None:
    for step in range(0, 1000, 10):
        if step % 250 == 0:
            train = log.put("train loss", step, f"{log.loss(step):.4f}")
            value = log.put("val loss", step, f"{log.loss(step):.4f}")
            log.line(f"step {step}: train loss {train}, val loss {value}")
        loss = log.put("loss", step, f"{log.loss(step):.4f}")
        time = log.put("time", step, f"{log.random.uniform(1, 900):.2f}", scale=1e-3)
        mfu = log.put("mfu", step, f"{log.random.uniform(-1, 50):.2f}")
        log.line(f"iter {step}: loss {loss}, time {time}ms, mfu {mfu}%")


@written_as("dicts", loss="loss", val_loss="eval_loss", grad_norm="grad_norm", lr="learning_rate")
def transformers_of_2024(log: Log) -> None:
    for step in range(1, 60):
        epoch = round(step / 20, 2)
        loss = log.put("loss", epoch, f"{round(log.loss(step), 4)}")
        norm = log.put("grad_norm", epoch, repr(log.random.random()))
        rate = log.put("learning_rate", epoch, repr(1e-4 / step))
        log.text += f"\r{step}%|###   | {step}/60 [00:03<05:00,  2.93s/it]\r{' ' * 60}\r"
        log.line(
            f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': {epoch}}}"
        )
        if step % 20 == 0:
            value = log.put("eval_loss", epoch, repr(log.loss(step)))
            log.line(f"{{'eval_loss': {value}, 'eval_runtime': 1.25, 'epoch': {epoch}}}")
    total = log.put("train_loss", 3.0, repr(log.loss(60)))
    log.line(f"{{'train_runtime': 12.5, 'train_loss': {total}, 'epoch': 3.0}}")


@written_as("dicts", loss="loss", grad_norm="grad_norm", lr="learning_rate")
def transformers_of_2026(log: Log) -> None:
    for step in range(1, 60):
        epoch = f"{step / 20:.4g}"
        loss = log.put("loss", float(epoch), f"{log.loss(step):.4g}")
        norm = log.put("grad_norm", float(epoch), f"{log.random.random():.4g}")
        rate = log.put("learning_rate", float(epoch), f"{1e-4 / step:.4g}")
        # A bar without an end stands before it.
        log.line(
            f" {step}%|#  | {step}/60 [00:03<05:00,  2.93s/it]{{'loss': '{loss}', "
            f"'grad_norm': '{norm}', 'learning_rate': '{rate}', 'epoch': '{epoch}'}}"
        )


@written_as("dicts", reward="reward", kl="kl", loss="loss", entropy="entropy")
def trl(log: Log) -> None:
    for step in range(1, 30):
        epoch = round(step / 100, 2)
        items = {"loss": log.random.random(), "reward": log.random.random(), "reward_std": 0.5}
        items |= {"kl": log.random.random(), "entropy": log.random.random()}
        items |= {"rewards/length": log.random.random(), "completion_length": 120.5}
        for name, value in items.items():
            log.put(name, epoch, repr(value))
        log.line(str({**items, "epoch": epoch}))


@written_as("dicts")
def accelerate_example(log: Log) -> None:
    for epoch in range(5):
        share = log.put("accuracy", epoch, repr(log.random.random()))
        log.line(f"epoch {epoch}: {{'accuracy': {share}, 'f1': 0.8125}}")


@written_as("dicts", loss="loss", memory="memory(GiB)")
def ms_swift(log: Log) -> None:
    for step in range(5, 200, 5):
        loss = log.put("loss", step, f"{log.loss(step):.8f}")
        memory = log.put("memory(GiB)", step, f"{log.random.uniform(1, 80):.2f}")
        log.line(
            f"{{'loss': {loss}, 'token_acc': 0.75, 'grad_norm': 1.5, 'learning_rate': 1e-05, "
            f"'memory(GiB)': {memory}, 'train_speed(iter/s)': 0.21, 'epoch': 0.05, "
            f"'global_step/max_steps': '{step}/200', 'percentage': '2.50%', "
            f"'elapsed_time': '23s', 'remaining_time': '15m 2s'}}"
        )


@written_as("jsonl", file="trainer_log.jsonl", loss="loss", lr="lr")
def llama_factory(log: Log) -> None:
    for step in range(10, 300, 10):
        loss = log.put("loss", step, repr(round(log.loss(step), 4)))
        log.put("lr", step, "1e-05")
        log.line(
            json.dumps(
                {"current_steps": step, "total_steps": 300, "loss": float(loss), "lr": 1e-05}
                | {"epoch": step / 100, "percentage": step / 3, "elapsed_time": "0:00:10"}
            )
        )


@written_as("jsonl", loss="loss", grad_norm="gnorm", lr="lr")
def fairseq(log: Log) -> None:
    for step in range(100, 3000, 100):
        loss = log.put("loss", step, f"{log.loss(step):.3f}")
        norm = log.put("gnorm", step, f"{log.random.random():.3f}")
        rate = log.put("lr", step, f"{1e-4:g}")
        record = {"epoch": 1, "update": step / 5000, "loss": loss, "ppl": "548.1", "wps": "1000"}
        record |= {"num_updates": str(step), "lr": rate, "gnorm": norm, "train_wall": "12"}
        log.line(f"{STAMP} | INFO | train_inner | {json.dumps(record)}")


@written_as("generic", loss="loss", grad_norm="gnorm", lr="lr")
def fairseq_simple(log: Log) -> None:
    for step in range(10, 300, 10):
        loss = log.put("loss", step, f"{log.loss(step):.3f}")
        norm = log.put("gnorm", step, f"{log.random.random():.3f}")
        log.line(
            f"{STAMP} | INFO | train_inner | epoch 001:  {step:5d} / 1000 loss={loss}, ppl=548.1, "
            f"wps=1000, ups=1.2, wpb=50, bsz=4, num_updates={step}, lr=0.0001, gnorm={norm}"
        )


@written_as("olmo", loss="train/CrossEntropyLoss", grad_norm="optim/total_grad_norm")
def olmo(log: Log) -> None:
    head = "2024-03-01 07:19:37.123\thost:0\tolmo.train:973\tINFO\t"
    for step in range(1, 30):
        loss = log.put("train/CrossEntropyLoss", step, f"{log.loss(step):.3f}")
        norm = log.put("optim/total_grad_norm", step, f"{log.random.random():.3f}")
        tokens = log.put("throughput/total_tokens", step, f"{step * 4096:,d}")
        log.line(f"{head}[step={step}/1000,epoch=0]")
        log.line(f"    optim/total_grad_norm={norm}")
        log.line(f"    train/CrossEntropyLoss={loss}")
        log.line(f"    throughput/total_tokens={tokens}")


@written_as("composer", loss="loss/train/total", lr="lr-DecoupledAdamW/group0")
def composer(log: Log) -> None:
    for step in range(1, 30):
        loss = log.put("loss/train/total", step, f"{log.loss(step):.4f}")
        rate = log.put("lr-DecoupledAdamW/group0", step, f"{1e-4 * step:.4f}")
        log.line(f"[batch={step}/1000]:")
        log.line(f"\t Train time/batch: {step - 1}")
        log.line("\t Train time/remaining_estimate_unit: hours")
        log.line(f"\t Train loss/train/total: {loss}")
        log.line(f"\t Train lr-DecoupledAdamW/group0: {rate}")
    log.line("[Eval batch=1/10] Eval on c4 data")
    value = log.put("metrics/c4/LanguageCrossEntropy", 29, f"{log.loss(29):.4f}")
    log.line("[Eval batch=10/10] Eval on c4 data:")
    log.line(f"\t Eval metrics/c4/LanguageCrossEntropy: {value}")


@written_as("verl", kl="actor/ppo_kl", reward="critic/rewards/mean", step_time_s="timing_s/step")
def verl(log: Log) -> None:
    for step in range(1, 30):
        kl = log.put("actor/ppo_kl", step, repr(log.random.uniform(-1e-3, 1e-3)))
        reward = log.put("critic/rewards/mean", step, repr(log.random.uniform(-1, 1)))
        time = log.put("timing_s/step", step, repr(log.random.uniform(1, 99)))
        log.line(
            f"\x1b[36m(TaskRunner pid=3123)\x1b[0m step:{step} - global_seqlen/min:123 - "
            f"actor/ppo_kl:{kl} - critic/rewards/mean:np.float64({reward}) - timing_s/step:{time}"
        )


@written_as("generic", loss="loss", grad_norm="norm", lr="lr")
def llm_c(log: Log) -> None:
    for step in range(1, 60):
        loss = log.put("loss", step, f"{log.loss(step):.6f}")
        norm = log.put("norm", step, f"{log.random.random():.4f}")
        log.line(
            f"step {step:4d}/1000 | loss {loss} (+nanz)| norm {norm} (+0.12z)| lr 1.00e-04 | "
            f"300.12 ms | 50.0% bf16 MFU | 123456 tok/s"
        )


@written_as("generic", loss="train_loss", val_loss="val_loss")
def modded_nanogpt(log: Log) -> None:
    for step in range(1, 60):
        loss = log.put("train_loss", step, f"{log.loss(step):.4f}")
        log.line(f"step:{step}/6200 train_loss:{loss} train_time:{step}s step_avg:200.12ms")
        if step % 10 == 0:
            value = log.put("val_loss", step, f"{log.loss(step):.4f}")
            log.line(f"step:{step}/6200 val_loss:{value} train_time:{step}s step_avg:200.12ms")


@written_as("generic", loss="loss", lr="lr")
def table_of_bars(log: Log) -> None:
    for step in range(60):
        loss = log.put("loss", step, f"{log.loss(step):.6f}")
        rate = log.put("lr", step, f"{1e-4:.4e}")
        log.line(
            f"step {step:5d} | loss: {loss} | lr {rate} | norm: 1.2345 | dt: 350.12ms | "
            f"tok/sec: 15000.12"
        )
