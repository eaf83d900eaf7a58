"""A script that knows nothing of holmes: examples/trainer's GPT-2 under Lightning's Trainer and its own DDP
strategy.

Takes that example's arguments; with --save-steps N a checkpoint in --output, with --resume it goes on from
there.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

_EXAMPLE = Path(__file__).resolve().parents[1] / "trainer" / "train.py"
_spec = importlib.util.spec_from_file_location("trainer_example", _EXAMPLE)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


class GPT(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, example.make_model(args)

    def training_step(self, batch, number):
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.args.lr)


class Log(lightning.Callback):
    """A JSON line with loss and seconds for each step."""

    def __init__(self, path):
        self.path, self.began, self.step = path, time.perf_counter(), 0

    def on_train_start(self, trainer, module):
        self.step = trainer.global_step  # not 0 where a checkpoint was resumed

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if trainer.global_step == self.step:
            return  # gradients accumulate
        self.step = trainer.global_step
        now, self.began = self.began, time.perf_counter()
        if trainer.global_rank == 0:
            line = {
                "step": self.step,
                "loss": trainer.callback_metrics["loss"].item(),
                "seconds": self.began - now,
            }
            with open(self.path, "a") as file:
                print(json.dumps(line), file=file)


def main():
    args = example.arguments()
    lightning.seed_everything(args.seed, verbose=False)
    callbacks = [Log(args.log_file)] if args.log_file else []
    if args.save_steps:
        callbacks.append(ModelCheckpoint(args.output, "last", every_n_train_steps=args.save_steps))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.accelerator.is_available() else "cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=args.steps,
        accumulate_grad_batches=args.micro_batches,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(args.save_steps),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = DataLoader(example.Text(args.sequence), batch_size=args.micro_batch, shuffle=True)
    trainer.fit(
        GPT(args), loader, ckpt_path=str(Path(args.output, "last.ckpt")) if args.resume else None
    )


if __name__ == "__main__":
    sys.exit(main())
