#!/usr/bin/env python3
"""A run's newest checkpoint, computed by megalite, against the folder that it exported, loaded by transformers: the loss and
every logit on a text. Status 1 if they differ by more than float32 rounds."""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalite.conversion.open import load_model
from megalite.topology.topology import Topology

ROUNDING = 1e-4
"""Tolerance, relative to the largest logit and to the loss."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, help="of the run")
    parser.add_argument("folder", type=Path, help="that it exported")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="a text")
    arguments = parser.parse_args()
    theirs = AutoModelForCausalLM.from_pretrained(arguments.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    ours = load_model(arguments.checkpoints, Topology.solo(), log=print)
    assert ours.tokenizer is not None
    text = arguments.input.read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    assert ids == list(ours.tokenizer.encode(text)), "the tokenizers differ"
    losses, difference, largest = [[], []], 0.0, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, ours.seq_length):
            tokens = torch.tensor([ids[start : start + ours.seq_length + 1]])
            inputs, labels = tokens[:, :-1], tokens[0, 1:]
            context = ours.stage.generation_context(inputs.shape[1])
            both = (
                ours.stage(inputs, context)[:, 0, : ours.model.vocab_size].float(),
                theirs(inputs).logits[0].float(),
            )
            for found, logits in zip(losses, both, strict=True):
                found += torch.nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
            difference = max(difference, float((both[0] - both[1]).abs().max()))
            largest = max(largest, float(both[1].abs().max()))
    means = [sum(found) / len(found) for found in losses]
    print(f"loss on {len(losses[0]):,} tokens: megalite {means[0]:.6f}, transformers {means[1]:.6f}")
    print(f"logits: largest {largest:.4f}, largest difference {difference:.1e}")
    return int(difference > ROUNDING * largest or abs(means[0] - means[1]) > ROUNDING)


if __name__ == "__main__":
    sys.exit(main())
