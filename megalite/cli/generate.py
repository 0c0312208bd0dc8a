"""`megalite generate`: text from a checkpoint of any layout."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.conversion.tokenizer_files import missing_tokenizer
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer, is_tiktoken_model
from megalite.generation.sample import Sampling, generate
from megalite.models.gpt import GPTStage
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed
from megalite.training.checkpointing import load_weights
from megalite.training.precision import Precision


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite generate",
        "Continue a prompt with a trained model. Under torchrun all ranks form one tp group.",
        examples=("megalite generate --load runs/first/checkpoints --prompt 'Once upon a time'",),
    )
    parser.add_argument(
        "--load", required=True, help="folder of checkpoints; the newest that verifies is used"
    )
    parser.add_argument("--ckpt-step", type=int, help="use the checkpoint of this step instead")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="length of the continuation (100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw among the fewest tokens that reach this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--tokenizer-model", help="default: the one that the checkpoint was trained with")
    parser.add_argument("--tiktoken-pattern", help="with --tokenizer-model: how its words are cut")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


@command("megalite generate")
def main(argv: Sequence[str]) -> int:
    """Print the prompt and its continuation; returns the exit status."""
    arguments = _parser().parse_args(argv)
    launch = Launch.from_environment()
    try:
        text = _run(arguments, launch)
    finally:
        stop_distributed()
    if launch.rank == 0:
        show(text)
    return 0


def _run(arguments: argparse.Namespace, launch: Launch) -> str:
    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    device = launch.device(arguments.device)
    start_distributed(launch, device, backend="auto", timeout_minutes=10.0)
    topology = Topology.create(ParallelLayout(tp=launch.world_size), rank=launch.rank, device=device)
    checkpoint = find_checkpoint(
        Path(arguments.load), step=arguments.ckpt_step, world=topology.world, device=device, log=_to_stderr
    )
    tokenizer = _tokenizer(checkpoint, arguments.tokenizer_model, arguments.tiktoken_pattern)
    model = _model(checkpoint, topology.tp, device)
    prompt = tokenizer.encode(arguments.prompt)
    new = list(generate(model, prompt, sampling, eod=tokenizer.eod))
    return tokenizer.decode([*prompt, *new])


def _to_stderr(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr)


def _tokenizer(checkpoint: Checkpoint, given: str | None, pattern: str | None) -> Tokenizer:
    if pattern is not None and given is None:
        raise ConfigError(
            f"--tiktoken-pattern {pattern} has no effect without --tokenizer-model; give that too, or leave it out"
        )
    home = checkpoint.path.parent
    data = DataConfig(**checkpoint.manifest.config["data"])
    if given is not None:
        if pattern is None and data.tiktoken_pattern is not None and is_tiktoken_model(given):
            pattern = data.tiktoken_pattern
        data = DataConfig(tokenizer_model=given, tiktoken_pattern=pattern)
    else:
        missing = missing_tokenizer(data, home)
        if missing is not None:
            raise ConfigError(
                f"the tokenizer of {checkpoint.path} {missing}; give --tokenizer-model (a file, or the folder of "
                "vocab.json and merges.txt)"
            )
        data = _as_it_is_now(data, home)
    tokenizer = build_tokenizer(data, checkpoint.manifest.config["model"]["vocab_size"])
    if tokenizer is None:
        raise ConfigError(
            f"{checkpoint.path} was trained without a tokenizer; give one with --tokenizer-model"
        )
    if checkpoint.manifest.tokenizer not in (None, tokenizer.fingerprint()):
        raise ConfigError(
            f"{data.tokenizer_model or data.vocab_file} is not the tokenizer that {checkpoint.path} was trained with; "
            "give that one with --tokenizer-model"
        )
    return tokenizer


def _as_it_is_now(data: DataConfig, home: Path) -> DataConfig:
    """The settings of the tokenizer; of one that lies in the checkpoints' own folder also where that was moved to."""
    files: dict[str, Any] = {}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(data, name)
        if path is not None:
            own = home / "tokenizer" / Path(path).name
            files[name] = str(own) if own.exists() and not Path(path).exists() else path
    return dataclasses.replace(data, **files)


def _model(checkpoint: Checkpoint, tp: Group, device: torch.device) -> GPTStage:
    config = ModelConfig(**checkpoint.manifest.config["model"])
    training = checkpoint.manifest.config["training"]
    if config.query_groups % tp.size or config.padded_vocab_size % tp.size:
        raise ConfigError(
            f"{tp.size} ranks cannot share {config.query_groups} key/value heads and {config.padded_vocab_size} rows "
            "of vocabulary evenly; start one rank, without torchrun"
        )
    if config.num_experts and tp.size > 1:
        raise ConfigError(f"{tp.size} ranks cannot share the experts; start one rank, without torchrun")
    precision = Precision.of(training["precision"])
    model = GPTStage(
        config,
        first_layer=0,
        last_layer=config.num_layers,
        has_embedding=True,
        has_head=True,
        make=ParameterFactory(tp=tp, seed=training["seed"], dtype=precision.compute, device=device),
        seq_length=training["seq_length"],
    )
    load_weights(model, checkpoint)
    return model
