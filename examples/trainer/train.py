"""Train a small byte-level GPT-2 with Hugging Face's Trainer, data-parallel.

    torchrun --nproc-per-node 2 train.py
    accelerate launch --num_processes 2 train.py

The script does not use holmes itself. With --holmes after the script's name, the same commands run over
clusters with different NICs.
"""

import argparse
import json
import time
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Text(Dataset):
    """Documentation that Python's help() prints, as bytes, in windows of one sequence."""

    def __init__(self, sequence: int):
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        used_bytes = len(text) // sequence * sequence
        self.windows = data[:used_bytes].view(-1, sequence).long()

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, number):
        return {"input_ids": self.windows[number], "labels": self.windows[number]}


class Log(TrainerCallback):
    """Callback that writes a JSON line with the loss of each step, and the seconds it took."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        self.step_began = time.perf_counter()

    def on_log(self, args, state, control, logs, **kwargs):
        now = time.perf_counter()
        seconds = now - self.step_began
        self.step_began = now
        if state.is_world_process_zero and "loss" in logs:
            line = {
                "step": state.global_step,
                "loss": float(logs["loss"]),
                "seconds": seconds,
            }
            with open(self.path, "a") as file:
                print(json.dumps(line), file=file)


def make_model(args):
    """Return a small GPT-2 for bytes (vocabulary 256), without dropout, to make runs comparable."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=args.sequence,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def arguments():
    """Parse the command line. --save-steps 0, the default, saves no checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=50)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--sequence", type=int, default=128)
    add("--micro-batch", type=int, default=4, help="samples in a micro-batch of one rank")
    add(
        "--micro-batches",
        type=int,
        default=1,
        help="micro-batches in a step (gradient accumulation)",
    )
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add("--log-file", help="write a JSON line for each step into this file")
    add("--output", default="out", help="folder of checkpoints")
    add("--save-steps", type=int, default=0, help="save a checkpoint every N steps")
    add("--resume", action="store_true", help="resume from the newest checkpoint in --output")
    return parser.parse_args()


def main():
    """Train up to --steps. With --resume, go on from the newest checkpoint in --output."""
    args = arguments()
    set_seed(args.seed)  # the same initial weights everywhere
    training = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.micro_batches,
        learning_rate=args.lr,
        max_grad_norm=1.0,
        seed=args.seed,
        logging_steps=1,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,  # must not be 0, even if save_strategy is "no"
        use_cpu=not torch.accelerator.is_available(),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
    )
    callbacks = [Log(args.log_file)] if args.log_file else []
    trainer = Trainer(
        make_model(args), training, train_dataset=Text(args.sequence), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
