"""Run the real program on simulated GPUs: `make rehearse-cuda`, with a CUDA build of torch and no driver.

`torchrun pretrain_gpt.py` starts as on a machine with eight H100s. torch's own CUDA code, its caching allocator and
ProcessGroupNCCL run, and every Triton kernel is compiled for sm_90 and launched; only the libraries below them are simulated
(`runtime.c`, `nccl.c`). It reveals crashes, waits and deadlocks. No kernel computes, so numbers are zero.

    python -m tests.rehearsal.cuda.run [--python PYTHON] [CASE ...]"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from megalite.data.indexed_dataset import token_dtype, write_documents

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 --device cuda "
    "--micro-batch-size 2 --train-iters 4 --log-interval 2 --save-interval 2 "
    # Their inputs have not been computed.
    "--no-check-weights-before-save --no-check-for-nan-in-loss-and-grad"
)
LLAMA = "--normalization RMSNorm --activation swiglu --position-embedding-type rope --num-query-groups 2 --no-add-bias-linear"
LINEAR = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 32 --linear-value-head-dim 32"
)
CASES: dict[str, tuple[int, str]] = {
    "one GPU": (1, ""),
    "evaluation": (1, "--eval-interval 2 --eval-iters 1"),
    "llama": (1, LLAMA),
    "window": (1, f"{LLAMA} --sliding-window 64"),
    "MLA, MTP, expert bias": (
        2,
        f"{LLAMA.replace('--num-query-groups 2', '--multi-latent-attention --qk-norm --q-lora-rank 64 --qk-head-dim 32')} "
        "--qk-pos-emb-head-dim 16 --v-head-dim 32 --mtp-num-layers 1 --tp 2 --sequence-parallel "
        "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
    "linear attention": (1, f"{LINEAR} --kernels delta_scan=triton"),
    "linear attention, documents": (
        4,
        f"{LINEAR} --tp 2 --cp 2 --reset-attention-mask --data-path {{tokens}} --tokenizer-type ByteLevelTokenizer",
    ),
    "Mamba-2": (
        2,
        f"{LINEAR.replace('gated_delta_net', 'mamba2')} --no-mlp-freq 2 --kernels delta_scan=triton --tp 2 --sequence-parallel",
    ),
    "sparse attention": (
        4,
        f"{LLAMA.replace('--num-query-groups 2', '')} --multi-latent-attention --experimental-attention-variant dsa "
        "--dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.1 --tp 2 --cp 2 --cp-comm-type allgather --sequence-parallel",
    ),
    "documents, window": (
        1,
        f"{LLAMA} --sliding-window 64 --reset-attention-mask --data-path {{tokens}} --tokenizer-type ByteLevelTokenizer",
    ),
    "fp32": (1, "--precision fp32"),
    "fp16": (2, "--precision fp16 --tp 2"),
    "fp8": (2, "--fp8"),
    "fp8, rowwise": (2, "--fp8 --fp8-recipe rowwise --no-fp8-wgrad"),
    "fp8 gathers": (2, "--fp8 --fp8-param-gather --dp-strategy fully-sharded"),
    "dropout": (2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    "full recompute": (1, "--recompute-granularity full"),
    "selective recompute": (2, "--recompute-granularity selective --tp 2 --sequence-parallel --tp-comm-overlap"),
    "offloaded activations": (1, "--fine-grained-activation-offloading --offload-modules core_attn mlp_act"),
    "asynchronous save": (2, "--async-save"),
    "tp2 pp2 ZeRO-1": (4, "--tp 2 --pp 2 --sequence-parallel --dp-strategy distributed-optimizer"),
    "few thread blocks": (4, "--tp 2 --pp 2 --sequence-parallel --nccl-max-ctas tp=8,pp=1,dp=4"),
    "tp2 cp2": (4, f"{LLAMA} --tp 2 --cp 2"),
    "cp2 all-to-all": (2, "--cp 2 --cp-comm-type a2a"),
    "interleaved": (4, "--pp 2 --vpp 2"),
    "zb-h1": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "zb-h2": (2, "--pp 2 --pipeline-schedule zb-h2"),
    "zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
    "dualpipe-v": (2, "--pp 2 --pipeline-schedule dualpipe-v"),
    "gpipe": (2, "--pp 2 --pipeline-schedule gpipe"),
    "ZeRO-1": (2, "--dp-strategy distributed-optimizer"),
    "ZeRO-2": (2, "--dp-strategy distributed-optimizer --shard-gradients"),
    "ZeRO-3": (2, "--dp-strategy fully-sharded"),
    "split main parameters": (2, "--main-params split --dp-strategy distributed-optimizer"),
    "wire bf16": (2, "--wire-dtype bf16"),
    "order of ranks": (2, "--reduction-order rank"),
    "fused all-reduce": (2, "--dp-strategy fused-all-reduce"),
    "parameter server": (2, "--dp-strategy parameter-server"),
    "sharded server": (2, "--dp-strategy sharded-parameter-server"),
    "asynchronous server": (2, "--dp-strategy async-parameter-server"),
    "local SGD": (2, "--dp-strategy local-sgd --sync-interval 2"),
    "DiLoCo": (2, "--dp-strategy diloco --sync-interval 2"),
    "gossip": (2, "--dp-strategy gossip"),
    "1-bit gradients": (2, "--grad-compression onebit"),
    "uint8 gradients": (2, "--grad-compression uint8"),
    "topk gradients": (2, "--grad-compression topk"),
    "LAMB": (2, "--optimizer lamb"),
    "Muon": (2, "--optimizer muon --dp-strategy distributed-optimizer"),
    "SOAP in host memory": (
        2,
        "--optimizer soap --soap-frequency 2 --optimizer-cpu-offload --dp-strategy distributed-optimizer",
    ),
    "SGD": (1, "--optimizer sgd"),
    "bf16 moments": (1, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --stochastic-rounding"),
    "experts": (2, "--num-experts 4 --ep 2 --moe-aux-loss-coeff 0.01"),
    "experts, one rank": (1, "--num-experts 4"),
    "experts, full recompute": (2, "--num-experts 4 --ep 2 --recompute-granularity full"),
    "experts, tp": (4, f"{LLAMA} --num-experts 4 --ep 2 --tp 2 --moe-router-topk 2 --sequence-parallel"),
}
"""Name -> (ranks, flags), without powersgd and 1-bit optimizers, which read gradients."""


HANG = "one rank hangs"


def words_of(name: str, tokens: str = "tokens") -> list[str]:
    """The flags of a case with defaults; `tokens` are its data files."""
    words = [*MODEL.split(), *CASES[name][1].format(tokens=tokens).split()]
    if "--data-path" not in words:
        words.append("--mock-data")
    for setting, value in (("--global-batch-size", "16"), ("--precision", "bf16")):
        if setting not in words:
            words += [setting, value]
    return words


def build(folder: Path) -> Path:
    """Build the simulated libraries as one, with the driver's name."""
    library = folder / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    sources = [str(HERE / name) for name in ("runtime.c", "nccl.c")]
    subprocess.run(["gcc", *flags, "-o", str(library), *sources, "-lpthread", "-lrt"], check=True)
    return library


def rehearse(name: str, library: Path, python: str, folder: Path) -> tuple[bool, str]:
    """Run a case, then continue it from its checkpoint; return whether both succeeded, and a line about it."""
    ranks, words = CASES[name][0], [*words_of(name, str(folder / "tokens")), "--run-dir", str(folder / "run")]
    blocks = [(np.arange(length), [length]) for length in range(20, 220)]
    write_documents(folder / "tokens", blocks, token_dtype(1000))
    steps = folder / "steps.json"
    for again in ("", "continued: "):
        if again:
            words[words.index("--train-iters") + 1] = "6"
            words += ["--load", str(folder / "run" / "checkpoints")]
        try:
            done = _torchrun(python, library, ranks, words, REHEARSED_STEPS=str(steps))
        except subprocess.TimeoutExpired:
            return False, f"{again}hangs"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "rror: " in line and "ChildFailed" not in line]
            return False, again + (lines[0] if lines else done.stderr[-300:])
    launches, waits, limited = json.loads(steps.read_text())
    ctas = f", {limited} communicators limited" if limited else ""
    return True, f"{ranks} ranks, {launches:6} launches, {waits:3} host waits per step{ctas}"


def hang(library: Path, python: str, folder: Path) -> tuple[bool, str]:
    """Run NCCL with a missing rank; return whether the report names it and the operation that waits for it."""
    words = [*words_of("fp16"), "--run-dir", str(folder / "run"), "--hang-timeout-minutes", "0.3"]
    done = _torchrun(python, library, 2, words, REHEARSED_SLEEPER="1")
    wanted = "rank 1 stands still", "is queued, which rank 1 has not begun"
    missing = [words for words in wanted if words not in done.stderr]
    return (
        not missing,
        f"the report does not say {missing[0]!r}" if missing else "rank 1 is named, and what waits for it",
    )


def _torchrun(
    python: str, library: Path, ranks: int, words: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "REHEARSED_RUNTIME": str(library),
        **variables,
    }
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(HERE / "program.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)


def main() -> int:
    """Run the cases and print a line for each; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with a CUDA build of torch")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of those in CASES; default: all")
    arguments = parser.parse_args()
    version = subprocess.run(
        [arguments.python, "-c", "import torch; print(torch.__version__, torch.version.cuda)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if version[1] == "None":
        print(
            f"torch {version[0]} is no CUDA build; give one with --python (pip install torch==2.11.0 --index-url pypi.org)"
        )
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        library = build(Path(name))
        for index, case in enumerate(arguments.cases or [*CASES, HANG]):
            folder = Path(name) / str(index)
            folder.mkdir()
            run = hang if case == HANG else partial(rehearse, case)
            well, line = run(library, arguments.python, folder)
            failed += not well
            print(f"{'ok    ' if well else 'FAILED'} {case:24} {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
