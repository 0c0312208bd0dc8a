#!/usr/bin/env python3
"""Tokens/s of generation beside transformers', in one process, from the same weights.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--family gpt2 llama] [--rounds 5] [--json FILE]

A model with random weights is written as a Hugging Face folder, and read by both. In each round the two take turns, in
another order every round, so that a busy neighbour slows both: greedy decoding of a batch of prompts of one length
(transformers needs no padding then), and the prompts alone (time to the first token). Before anything is timed, both must
give the same tokens. Medians over the rounds; "decode" is without the first token's time; "ours" is the median over rounds
of our rate over theirs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.conversion.inference import load_model
from megalite.generation.chain import Chain
from megalite.generation.generate import generate_batch
from megalite.generation.sample import Sampling
from megalite.topology.topology import Topology

FAMILIES = ("gpt2", "llama")
Generate = Callable[[int], list[list[int]]]
"""From a number of new tokens to the new tokens of each prompt."""


class Size(NamedTuple):
    """Of the network."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocab: int = 8192
    positions: int = 1024


class Case(NamedTuple):
    """What is generated."""

    batch: int
    prompt: int
    new: int


CASES = (Case(1, 32, 64), Case(1, 512, 64), Case(8, 32, 64), Case(8, 256, 64))
TINY = Size(layers=2, hidden=32, heads=4, vocab=128, positions=64)
TINY_CASES = (Case(1, 4, 4), Case(3, 5, 4))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--tiny", action="store_true", help="a model and prompts that only show that it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[flags.dtype]
    size, cases = (TINY, TINY_CASES) if flags.tiny else (Size(), CASES)
    rows = []
    for family in flags.family:
        with tempfile.TemporaryDirectory() as folder:
            write_model(family, size, Path(folder))
            for case in cases:
                prompts = torch.randint(1, size.vocab, (case.batch, case.prompt)).tolist()
                contenders = {
                    "megalite": ours(Path(folder), prompts, torch.device(flags.device), dtype),
                    "transformers": theirs(Path(folder), prompts, torch.device(flags.device), dtype),
                }
                agree(contenders, case, exact=dtype == torch.float32)
                rows.append({"family": family, **case._asdict(), **compete(contenders, case, flags.rounds)})
                print(line_of(rows[-1]), flush=True)
    report = {"rows": rows, "size": size._asdict(), "dtype": flags.dtype, "threads": torch.get_num_threads()}
    report["versions"] = {"torch": torch.__version__, "transformers": _transformers_version()}
    if flags.json is not None:
        flags.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def write_model(family: str, size: Size, folder: Path) -> None:
    """Random weights as transformers saves them, large enough that texts do not repeat one token."""
    torch.manual_seed(0)
    if family == "gpt2":
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

        config = GPT2Config(
            n_layer=size.layers,
            n_embd=size.hidden,
            n_head=size.heads,
            vocab_size=size.vocab,
            n_positions=size.positions,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
        return
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    llama = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4,
        intermediate_size=size.hidden * 11 // 4,
        vocab_size=size.vocab,
        max_position_embeddings=size.positions,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(llama).save_pretrained(folder)


def ours(folder: Path, prompts: list[list[int]], device: torch.device, dtype: torch.dtype) -> Generate:
    """This package."""
    model = load_model(folder, Topology.solo(device), dtype=dtype, needs_tokenizer=False, log=print)
    chain = Chain.whole(model.stage)

    def generate(count: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=count, temperature=0.0)
        made = generate_batch(chain, prompts, sampling, end_ids=frozenset())
        done = {one.index: one.new for one in made if one.finish is not None}
        return [done[index] for index in range(len(prompts))]

    return generate


def theirs(folder: Path, prompts: list[list[int]], device: torch.device, dtype: torch.dtype) -> Generate:
    """transformers' own greedy search, with the fused attention that it takes by default."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    tokens = torch.tensor(prompts, device=device)
    mask = torch.ones_like(tokens)

    @torch.no_grad()
    def generate(count: int) -> list[list[int]]:
        made = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found: list[list[int]] = made[:, tokens.shape[1] :].tolist()
        return found

    return generate


def agree(contenders: dict[str, Generate], case: Case, *, exact: bool) -> None:
    """The same tokens; in bf16, where rounding decides between near equals, the same first ones.

    Raises:
        SystemExit: they differ.
    """
    ours_made, theirs_made = (generate(case.new) for generate in contenders.values())
    if not exact:
        ours_made, theirs_made = ([row[:1] for row in made] for made in (ours_made, theirs_made))
    if ours_made != theirs_made:
        raise SystemExit(f"{case}: the two do not give the same tokens:\n{ours_made}\n{theirs_made}")


def compete(contenders: dict[str, Generate], case: Case, rounds: int) -> dict[str, Any]:
    """Seconds to the first token, tokens/s after it, and our rate over theirs."""
    first: dict[str, list[float]] = {name: [] for name in contenders}
    rate: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names[number % 2 :] + names[: number % 2]:
            generate = contenders[name]
            start = time.perf_counter()
            generate(1)
            middle = time.perf_counter()
            generate(case.new)
            end = time.perf_counter()
            first[name].append(middle - start)
            rate[name].append(case.batch * (case.new - 1) / max(end - middle - (middle - start), 1e-9))
    result: dict[str, Any] = {}
    for name in contenders:
        result[name] = {
            "first_token_ms": 1e3 * statistics.median(first[name]),
            "decode_tokens_per_second": statistics.median(rate[name]),
        }
    pairs = zip(rate["megalite"], rate["transformers"], strict=True)
    result["ours"] = statistics.median(a / b for a, b in pairs)
    return result


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    parts = [f"{row['family']:<6} batch {row['batch']:<2} prompt {row['prompt']:<4} new {row['new']:<4}"]
    for name in ("megalite", "transformers"):
        found = row[name]
        parts.append(
            f"{name}: first {found['first_token_ms']:8.1f} ms, decode {found['decode_tokens_per_second']:8.1f} tokens/s"
        )
    return " | ".join([*parts, f"ours {row['ours']:.2f}"])


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


if __name__ == "__main__":
    sys.exit(main())
