"""Tokens/s of generation, compared with transformers in one process with the same weights.

    OMP_NUM_THREADS=1 python -m benchmarks.generation.run [--family gpt2 llama] [--rounds 5] [--json FILE]

A model with random weights is written as a Hugging Face folder, and read by both. In each round both run in turn, in another
order every round, so that other load on the machine affects both: greedy decoding of a batch of prompts of one length (which
needs no padding in transformers), and the prompts only (time to the first token). Before the timing both must give the same
tokens. Medians over the rounds; "decode" excludes the time to the first token; "ours" is the median over rounds of
megalite's rate over transformers'."""

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from megalite.conversion.open import load_model
from megalite.generation.continuation import Sampling
from megalite.generation.generate import Chain, generate_batch
from megalite.topology.topology import Topology

Generate = Callable[[int], list[list[int]]]  # number of new tokens -> new tokens of each prompt


class Size(NamedTuple):
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocab: int = 8192
    positions: int = 1024


class Case(NamedTuple):
    batch: int
    prompt: int
    new: int


CASES = (Case(1, 32, 64), Case(1, 512, 64), Case(8, 32, 64), Case(8, 256, 64))
TINY = Size(layers=2, hidden=32, heads=4, vocab=128, positions=64)
TINY_CASES = (Case(1, 4, 4), Case(3, 5, 4))


def gpt2(size: Size) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
    return GPT2LMHeadModel(GPT2Config(**dict(zip(names, size)), **RANDOM))


def llama(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    names += ("max_position_embeddings",)
    widths = {"num_key_value_heads": size.heads // 4, "intermediate_size": size.hidden * 11 // 4}
    return LlamaForCausalLM(LlamaConfig(**dict(zip(names, size)), **widths, **RANDOM))


RANDOM = {"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}
"""Weights so large that texts do not repeat one token, and without an end token."""
FAMILIES = {"gpt2": gpt2, "llama": llama}


def ours(folder: Path, prompts: list[list[int]], device: torch.device, dtype: torch.dtype) -> Generate:
    model = load_model(folder, Topology.solo(device), dtype=dtype, needs_tokenizer=False, log=print)
    chain = Chain(model.stage)

    def generate(count: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=count, temperature=0.0)
        made = generate_batch(chain, prompts, sampling, stop_token_ids=frozenset())
        done = {one.index: one.new for one in made if one.finish is not None}
        return [done[index] for index in range(len(prompts))]

    return generate


def theirs(folder: Path, prompts: list[list[int]], device: torch.device, dtype: torch.dtype) -> Generate:
    """transformers' own greedy search with its default fused attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    tokens = torch.tensor(prompts, device=device)
    greedy = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "eos_token_id": None}

    @torch.no_grad()
    def generate(count: int) -> list[list[int]]:
        made = model.generate(tokens, max_new_tokens=count, pad_token_id=0, **greedy)
        found: list[list[int]] = made[:, tokens.shape[1] :].tolist()
        return found

    return generate


def agree(contenders: dict[str, Generate], case: Case, *, exact: bool) -> None:
    """Check that both give the same tokens; in bf16, where rounding decides between near equals, the same first ones.

    Raises:
        SystemExit: they differ."""
    made = [generate(case.new) for generate in contenders.values()]
    if not exact:
        made = [[row[:1] for row in each] for each in made]
    if made[0] != made[1]:
        raise SystemExit(f"{case}: the two do not give the same tokens:\n{made[0]}\n{made[1]}")


def compete(contenders: dict[str, Generate], case: Case, rounds: int) -> dict[str, Any]:
    """Seconds to the first token, tokens/s after it, and megalite's rate over transformers'."""
    first: dict[str, list[float]] = {name: [] for name in contenders}
    rate: dict[str, list[float]] = {name: [] for name in contenders}
    for names in common.shuffled(list(contenders), rounds):
        for name in names:
            one = common.seconds_of(lambda name=name: contenders[name](1))
            whole = common.seconds_of(lambda name=name: contenders[name](case.new))
            first[name].append(one)
            rate[name].append(case.batch * (case.new - 1) / max(whole - one, 1e-9))
    result: dict[str, Any] = {
        name: {"first_token_ms": 1e3 * statistics.median(first[name]), "decode_tokens_per_second": statistics.median(rate[name])}
        for name in contenders
    }
    return {**result, "ours": common.ratio(rate["megalite"], rate["transformers"])}


def line_of(row: dict[str, Any]) -> str:
    parts = [f"{row['family']:<6} batch {row['batch']:<2} prompt {row['prompt']:<4} new {row['new']:<4}"]
    for name in ("megalite", "transformers"):
        first, decode = row[name].values()
        parts.append(f"{name}: first {first:8.1f} ms, decode {decode:8.1f} tokens/s")
    return " | ".join([*parts, f"ours {row['ours']:.2f}"])


def main(words: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts: does it run?")
    flags = parser.parse_args(words)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[flags.dtype]
    size, cases = (TINY, TINY_CASES) if flags.tiny else (Size(), CASES)
    rows = []
    for family in flags.family:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            FAMILIES[family](size).save_pretrained(folder)
            for case in cases:
                prompts = torch.randint(1, size.vocab, (case.batch, case.prompt)).tolist()
                given = (Path(folder), prompts, torch.device(flags.device), dtype)
                contenders = {"megalite": ours(*given), "transformers": theirs(*given)}
                agree(contenders, case, exact=dtype == torch.float32)
                rows.append({"family": family, **case._asdict(), **compete(contenders, case, flags.rounds)})
                print(line_of(rows[-1]), flush=True)
    about = {"transformers": common.version("transformers"), "dtype": flags.dtype, "size": size._asdict()}
    common.write_json(flags.json, "generation.run", words, {**about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
