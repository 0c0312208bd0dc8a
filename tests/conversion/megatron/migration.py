"""Migration of a run: Megatron-LM's own program trains on a CPU, and megalite continues from its checkpoint.

    python -m tests.conversion.megatron.migration MEGATRON_LM

rebuilds `recorded/`: for each script the checkpoint of step 10 and Megatron-LM's numbers of the next 20 steps.
MEGATRON_LM is a copy of its repository without megatron/core; see cpu_megatron.py. `train_llama` was restarted from
the checkpoint. `train_gpt` was not: megatron-core 0.16 cannot load its distributed optimizer with torch's own AdamW,
which it uses without apex (`assert len(steps) == 1` in distrib_optimizer.py)."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megalite.cli.main import main as megalite
from megalite.cli.model_commands import PREPROCESS
from megalite.config.run import RunConfig
from megalite.data.sources import build_datasets, megatron_lengths
from tests.conversion.samples import byte_tokenizer
from tests.e2e.forked import train_forked

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
SCRIPTS = ("train_llama", "train_gpt")
SAVED, STEPS = 10, 30
TRACKER = "latest_checkpointed_iteration.txt"

Steps = list[dict[str, Any]]


def inputs(folder: Path) -> tuple[Path, Path]:
    """(token files, tokenizer) of the license text: bytes, with paragraphs as documents."""
    vocab, merges = byte_tokenizer(folder / "bpe")
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>")])
    home = folder / "tokenizer"
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (home / "tokenizer_config.json").write_text(json.dumps(words))
    text = folder / "license.txt"
    text.write_bytes((HERE.parents[2] / "LICENSE").read_bytes())
    flags = f"--input {text} --text-documents paragraph --append-eod --workers 1"
    command = [*flags.split(), "--tokenizer-model", str(home), "--output-prefix", str(folder / "license")]
    assert PREPROCESS(command) == 0
    return folder / "license_text_document", home


def train_theirs(script: str, folder: Path, megatron_lm: Path) -> Steps:
    """Run all steps of Megatron-LM; its checkpoints are in folder/checkpoints."""
    data, tokenizer = inputs(folder)
    programs = folder / "bin"
    programs.mkdir()
    torchrun = programs / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    command = ["bash", str(HERE / f"{script}.sh"), *map(str, (folder / "checkpoints", data, tokenizer))]
    steps: Steps = []
    for more in (f"--exit-interval {SAVED}", "") if script == "train_llama" else ("",):
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(megatron_lm), *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
            "ON_CPU": str(HERE / "cpu_megatron.py"),
            "RECORD": str(folder),
            "MORE": more,
        }
        done = subprocess.run(
            command, cwd=megatron_lm, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        steps += _merged([json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))])
    assert len(steps) == STEPS
    return steps


def _merged(ranks: list[Steps]) -> Steps:
    """Merge records: the first stage has the tokens, the last one the loss."""
    return [
        {
            "tokens": digest(next(rank["tokens"] for rank in step if rank["tokens"])),
            **{name: step[0][name] for name in ("lr", "grad_norm")},
            "loss": next(rank["loss"] for rank in step if rank["loss"] is not None),
        }
        for step in zip(*ranks, strict=True)
    ]


def digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def unpacked(script: str, folder: Path) -> tuple[Path, Steps]:
    """The recorded checkpoint, and the records of the steps after it."""
    with tarfile.open(RECORDED / f"{script}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder, json.loads((RECORDED / f"{script}.json").read_text())["steps"]


def ported(script: str, data: Path, tokenizer: Path, folder: Path) -> Path:
    """The config of a script, with the test's folders for checkpoints and logs."""
    output = folder / f"{script}.yaml"
    given = ["--set", "1=checkpoints", "--set", f"2={data}", "--set", f"3={tokenizer}"]
    assert megalite(["port", str(HERE / f"{script}.sh"), *given, "--output", str(output)]) == 0
    return output


def continued(config: Path, imported: Path, folder: Path, ranks: int, tp: int, pp: int) -> Steps:
    """Train in megalite from the imported checkpoint."""
    layout = f"--tp {tp} --pp {pp} --use-checkpoint-args --require-same-schedule --no-fresh-if-missing"
    flags = ["--config", config, "--load", imported, "--save", folder / "saved", "--run-dir", folder, *layout.split()]
    said = train_forked(ranks, *flags).require_success()
    assert "order of samples changes" not in said.out
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def batches(config: RunConfig, vocab_size: int) -> list[str]:
    """The digest of each batch of the run, from its first step."""
    training = config.training
    common = {"seq_length": training.seq_length, "seed": training.seed, "vocab_size": vocab_size}
    data = build_datasets(config.data, splits=("train",), num_samples=megatron_lengths(config), **common).train  # type: ignore[arg-type]
    size = training.global_batch_size
    assert data is not None and size is not None
    data.prepare(0, STEPS * size)
    return [
        digest([data.sample(index)[:-1].tolist() for index in range(step * size, (step + 1) * size)])
        for step in range(STEPS)
    ]


def main() -> None:
    megatron_lm = Path(sys.argv[1]).resolve()
    RECORDED.mkdir(exist_ok=True)
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory(prefix="megatron-") as temporary:
            folder = Path(temporary)
            steps = train_theirs(script, folder, megatron_lm)
            saved = folder / "checkpoints"
            (saved / TRACKER).write_text(str(SAVED))
            with tarfile.open(RECORDED / f"{script}.tar.xz", "w:xz", preset=9) as archive:
                for name in (TRACKER, f"iter_{SAVED:07d}"):
                    archive.add(saved / name, name)
        versions = {name: version(name) for name in ("megatron-core", "torch")}
        found = {"made by": f"migration.py, {script}.sh", **versions, "steps": steps[SAVED:]}
        (RECORDED / f"{script}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
