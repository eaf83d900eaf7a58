"""Trains a small Llama of transformers, and publishes each step's weights: a full version, then deltas."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from weight_files import clone, digest, save_delta

from holmes_ext import weights

PROMPT = [[1, 2, 3, 4]]
NEW_TOKENS = 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument(
        "--full-every", type=int, default=4, help="versions from one full to the next"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each version")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--port", type=int, default=29600, help="port of `holmes join serve`")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    generator = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    published = {}  # name -> tensor, of the version before
    for version in range(1, options.versions + 1):
        tokens = torch.randint(options.vocabulary, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        tensors = clone(model)
        generator.load_state_dict(tensors)
        parent = None if version % options.full_every == 1 else version - 1
        with tempfile.TemporaryDirectory() as folder:
            if parent is None:
                generator.save_pretrained(folder)
            else:
                save_delta(folder, tensors, published)
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            weights.publish(folder, version, parent=parent, port=options.port)
        published = tensors
        name = "full" if parent is None else f"delta to {parent}"
        print(f"published version {version}: {name}, {size} bytes", flush=True)
        print(line(version, generator), flush=True)
        time.sleep(options.pause)


def line(version, model):
    """Return a line with a version's number, the digest of the model's tensors and the generated tokens.

    Trainer and generators print this line, so that equal lines show equal weights.
    """
    return f"version {version}: {digest(model.state_dict())} generates {generate(model)}"


def generate(model):
    """Return the NEW_TOKENS tokens that a model generates after PROMPT, each the most probable one."""
    prompt = torch.tensor(PROMPT)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, prompt.shape[1] :].tolist()


if __name__ == "__main__":
    main()
