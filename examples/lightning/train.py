"""Train the GPT-2 of examples/trainer with Lightning's Trainer and its DDP strategy.

The script takes the arguments of examples/trainer. With --save-steps N it saves checkpoints in --output, and
with --resume it continues from the last of them. It does not use holmes itself.
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
        self.args = args
        self.model = example.make_model(args)

    def training_step(self, batch, number):
        """Return the loss of a micro-batch; Lightning also passes the number of the micro-batch."""
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.args.lr)


class Log(lightning.Callback):
    """Callback that writes a JSON line with the loss of each step, and the seconds it took."""

    def __init__(self, path):
        self.path = path
        self.step_began = time.perf_counter()  # of the step that runs; the first also has start-up
        self.step = 0  # number of the last complete step

    def on_train_start(self, trainer, module):
        """Take over the number of the last step, which is not 0 if a checkpoint was loaded."""
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        """Write the line of a step. Lightning calls this after each micro-batch, on each rank."""
        if trainer.global_step == self.step:
            return  # not the last micro-batch of a step
        self.step = trainer.global_step
        now = time.perf_counter()
        seconds = now - self.step_began
        self.step_began = now
        if trainer.global_rank == 0:
            line = {
                "step": self.step,
                "loss": trainer.callback_metrics["loss"].item(),
                "seconds": seconds,
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
    checkpoint = str(Path(args.output, "last.ckpt")) if args.resume else None
    trainer.fit(GPT(args), loader, ckpt_path=checkpoint)


if __name__ == "__main__":
    sys.exit(main())
