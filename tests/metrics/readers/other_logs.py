"""Logs of trainers of images, of bars, of tables and of programs of one's own."""

import json

from tests.metrics.readers.writing import Log, written_as

BATCHES = 50


@written_as("imagenet", loss="Loss", val_loss="Test Loss")
def imagenet(log: Log) -> None:
    for epoch in range(3):
        for batch in range(1, BATCHES + 1, 10):
            step = epoch * BATCHES + batch
            loss = log.put("Loss", step, f"{log.loss(step):.4e}")
            mean = log.put("Loss (avg)", step, f"{log.loss(step):.4e}")
            share = log.put("Acc@1", step, f"{log.random.uniform(0, 100):6.2f}")
            log.line(
                f"Epoch: [{epoch}][{batch:2d}/{BATCHES}]\tTime  0.512 ( 1.204)\tData  0.001 "
                f"( 0.010)\tLoss {loss} ({mean})\tAcc@1 {share} (  0.10)\tAcc@5   0.00 (  0.50)"
            )
        value = log.put("Test Loss", step, f"{log.loss(step):.4e}")
        log.line(f"Test: [ 0/10]\tTime  0.512 ( 1.204)\tLoss {value} ({value})")
        share = log.put("Test mean Acc@1", step, f"{log.random.uniform(0, 100):.3f}")
        log.line(f" * Acc@1 {share} Acc@5 9.1")


@written_as("imagenet", loss="Loss", lr="LR")
def timm(log: Log) -> None:
    for epoch in range(3):
        for batch in range(0, BATCHES, 10):
            step = epoch * BATCHES + batch
            loss = log.put("Loss", step, f"{log.loss(step):#.3g}")
            rate = log.put("LR", step, f"{1e-3 * log.random.random():.3e}")
            log.line(
                f"Train: {epoch} [{batch:>4d}/{BATCHES} ({2 * batch:>3.0f}%)]  Loss: {loss} (6.9)  "
                f"Time: 0.312s,  820.10/s  (0.312s,  820.10/s)  LR: {rate}  Data: 0.011 (0.020)"
            )


@written_as("mmengine", loss="loss", lr="lr", step_time_s="time")
def mmengine(log: Log) -> None:
    for epoch in (1, 2, 3):
        for batch in range(10, BATCHES + 1, 10):
            step = (epoch - 1) * BATCHES + batch
            loss = log.put("loss", step, f"{log.loss(step):.4f}")
            rate = log.put("lr", step, f"{1e-3:.4e}")
            time = log.put("time", step, f"{log.random.random():.4f}")
            log.line(
                f"2024/01/01 00:00:00 - mmengine - INFO - Epoch(train)  [{epoch}][{batch:2d}/"
                f"{BATCHES}]  lr: {rate}  eta: 0:01:00  time: {time}  data_time: 0.0100  "
                f"memory: 1234  loss: {loss}  loss_cls: 1.1000"
            )
        share = log.put("val accuracy/top1", step, f"{log.random.uniform(0, 100):.4f}")
        log.line(
            f"2024/01/01 00:00:00 - mmengine - INFO - Epoch(val) [{epoch}][10/10]    "
            f"accuracy/top1: {share}  data_time: 0.1  time: 0.2"
        )


@written_as("mmengine", loss="loss", lr="lr")
def mmcv(log: Log) -> None:
    for epoch in (1, 2):
        for batch in range(10, BATCHES + 1, 10):
            step = (epoch - 1) * BATCHES + batch
            loss = log.put("loss", step, f"{log.loss(step):.4f}")
            rate = log.put("lr", step, f"{1e-3:.3e}")
            log.line(
                f"2021-01-01 00:00:00,123 - mmdet - INFO - Epoch [{epoch}][{batch}/{BATCHES}]\t"
                f"lr: {rate}, eta: 1 day, 0:01:00, time: 0.512, data_time: 0.010, memory: 1234, "
                f"loss_cls: 1.1000, loss: {loss}"
            )


@written_as("detectron2", loss="total_loss", lr="lr")
def detectron2(log: Log) -> None:
    for step in range(19, 400, 20):
        loss = log.put("total_loss", step, f"{log.loss(step):.4g}")
        rate = log.put("lr", step, f"{1e-3 * log.random.random():.5g}")
        log.line(
            f"[01/01 00:00:00 d2.utils.events]:  eta: 0:01:00  iter: {step}  total_loss: {loss}  "
            f"loss_cls: 0.3  time: 0.2  last_time: 0.2  data_time: 0.1  last_data_time: 0.1   "
            f"lr: {rate}  max_mem: 2000M"
        )


@written_as("keras", loss="loss", val_loss="val_loss")
def keras(log: Log) -> None:
    for epoch in (1, 2, 3):
        log.line(f"Epoch {epoch}/3")
        loss = log.put("loss", epoch, f"{log.loss(epoch):.4f}")
        value = log.put("val_loss", epoch, f"{log.loss(epoch):.4f}")
        share = log.put("accuracy", epoch, f"{log.random.random():.4f}")
        log.text += "\r 1/10 [==>...........................] - ETA: 1s - loss: 9.9" + "\b" * 40
        log.line(
            f"\r10/10 [==============================] - 1s 5ms/step - loss: {loss} - "
            f"accuracy: {share} - val_loss: {value}"
        )


@written_as("keras", loss="loss", val_loss="val_loss")
def keras_3(log: Log) -> None:
    for epoch in (1, 2, 3):
        log.line(f"Epoch {epoch}/3")
        loss = log.put("loss", epoch, f"{log.loss(epoch):.4f}")
        value = log.put("val_loss", epoch, f"{log.loss(epoch):.4f}")
        log.text += "\r\x1b[1m 1/10\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━━━━━\x1b[0m - loss: 9.9"
        log.line(
            f"\r\x1b[1m10/10\x1b[0m \x1b[32m━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m "
            f"5ms/step - accuracy: 0.5000 - loss: {loss} - val_loss: {value}"
        )


@written_as("bars", loss="train_loss")
def lightning_bar(log: Log) -> None:
    for epoch in range(2):
        for batch in range(1, BATCHES + 1):
            step = epoch * BATCHES + batch
            loss = log.put("train_loss", step, f"{log.loss(step):.3f}")
            bar = (
                f"\rEpoch {epoch}: {2 * batch:3d}%|####      | {batch}/{BATCHES} [00:01<00:01, "
                f"49.90it/s, v_num=0, train_loss={loss}]"
            )
            log.text += bar + bar  # it is drawn again
    log.line("")


@written_as("bars", loss="step_loss", lr="lr")
def diffusers_bar(log: Log) -> None:
    for step in range(1, 60):
        loss = log.put("step_loss", step, f"{log.random.random():.3g}")
        rate = log.put("lr", step, f"{1e-4:g}")
        log.text += (
            f"\rSteps: {step:3d}%|#   | {step}/60 [00:10<01:00,  1.02s/it, lr={rate}, "
            f"step_loss={loss}]"
        )
    log.line("")


@written_as("generic", loss="Loss")
def tutorial(log: Log) -> None:
    for epoch in (1, 2):
        for batch in range(100, 601, 100):
            step = (epoch - 1) * 600 + batch
            loss = log.put("Loss", step, f"{log.loss(step):.4f}")
            log.line(f"Epoch [{epoch}/5], Step [{batch}/600], Loss: {loss}")


@written_as("generic", loss="train loss", val_loss="val loss")
def by_epoch(log: Log) -> None:
    for epoch in range(1, 20):
        loss = log.put("train loss", epoch, f"{log.loss(epoch):.3f}")
        value = log.put("val loss", epoch, f"{log.loss(epoch):.3f}")
        share = log.put("val acc", epoch, f"{log.random.uniform(0, 100):.1f}")
        log.line(
            f"2024-01-01 10:00:00.123 | INFO     | __main__:train:12 - epoch {epoch:3d} "
            f"(12.5s): train loss {loss}, val loss {value}, val acc {share}%"
        )


@written_as("generic", loss="loss", grad_norm="grad_norm")
def key_value(log: Log) -> None:
    for step in range(60):
        loss = log.put("loss", step, f"{log.loss(step):.5f}")
        norm = log.put("grad_norm", step, f"{log.random.uniform(0, 2000):,.2f}")
        tokens = log.put("tokens", step, f"{log.random.uniform(1, 9):.1f}", scale=1e3)
        log.line(f"INFO:train:global_step={step} loss={loss} grad_norm={norm} tokens={tokens}K")


@written_as("jsonl", file="log.jsonl", loss="train/loss", val_loss="val/loss")
def own_jsonl(log: Log) -> None:
    for step in range(60):
        loss = log.put("train/loss", step, repr(log.loss(step)))
        record = {"step": step, "train": {"loss": float(loss)}, "time": 1.7e9 + step, "tag": "x"}
        if step % 10 == 0:
            record["val"] = {"loss": float(log.put("val/loss", step, repr(log.loss(step))))}
        log.line(json.dumps(record))


@written_as("jsonl", file="wandb-history.jsonl", loss="train/loss")
def wandb_history(log: Log) -> None:
    for call in range(60):
        loss = log.put("train/loss", call * 10, repr(log.loss(call)))
        record = {"_step": call, "_timestamp": 1.7e9 + call, "_runtime": call}
        log.line(json.dumps(record | {"train/global_step": call * 10, "train/loss": float(loss)}))


@written_as("csv", file="metrics.csv", loss="train_loss", val_loss="val_loss")
def lightning_csv(log: Log) -> None:
    log.line("epoch,lr-Adam,step,train_loss,val_loss")
    for step in range(9, 300, 10):
        loss = log.put("train_loss", step, repr(log.loss(step)))
        log.line(f"{step // 100},,{step},{loss},")
        if step % 100 == 99:
            value = log.put("val_loss", step, repr(log.loss(step)))
            log.line(f"{step // 100},,{step},,{value}")


@written_as("csv", file="results.csv", loss="train/box_loss", val_loss="val/box_loss")
def ultralytics(log: Log) -> None:
    log.line("                  epoch,         train/box_loss,           val/box_loss,    lr/pg0")
    for epoch in range(1, 30):
        loss = log.put("train/box_loss", epoch, f"{log.loss(epoch):.5g}")
        value = log.put("val/box_loss", epoch, f"{log.loss(epoch):.5g}")
        log.line(f"{epoch:>23},{loss:>23},{value:>23},{0.01:>23}")


@written_as("csv", file="table.tsv", loss="loss")
def tab_separated(log: Log) -> None:
    log.line("step\tloss\tnote")
    for step in range(40):
        loss = log.put("loss", step, f"{log.loss(step):.4f}")
        log.line(f"{step}\t{loss}\tfine")


@written_as("csv", file="wandb_export.csv", loss="happy-tree-1 - train/loss")
def wandb_export(log: Log) -> None:
    name = "happy-tree-1 - train/loss"
    log.line(f'"Step","{name}","{name}__MIN","{name}__MAX"')
    for step in range(0, 400, 10):
        loss = log.put(name, step, repr(log.loss(step)))
        log.line(f'"{step}","{loss}","{loss}","{loss}"')
