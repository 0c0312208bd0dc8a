"""Measure one GPU and megalite on it: ceilings, kernels, whole training steps with peers, profiles.

    python3 -m benchmarks.gpu.run --json benchmarks/results/gpu.json --write-preferences preferences.yaml

Needs one H100, H200 or a similar GPU, torch and Triton; apex and transformers are measured if they are installed. Ends
within `--minutes`. Each leg has its own process; if it fails, its line has the reason.

`--dry` runs every part in tiny sizes on the CPU, with Triton's kernels in its interpreter: it tests the benchmark, and its
times mean nothing."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu.ceilings import ceiling_tasks, short
from benchmarks.gpu.kernels import capability, kernel_tasks, rules, without_case, write
from benchmarks.gpu.legs import Leg, Row, run_legs
from benchmarks.gpu.report import ceilings_table, kernels_table, profiles_table, steps_table
from benchmarks.gpu.step import MICROBATCH
from megalite.config.compute import BACKENDS, OPERATIONS

PARTS = ("ceilings", "step", "kernels", "peers")
KEYS = "part who model what shape case rows size backend pass profile accumulation"
LARGE, SMALL, DRY = "GPT 1.3B", "GPT-2 124M", "GPT dry"


def step_task(who: str, model: str, *, device: str, **settings: Any) -> dict[str, Any]:
    """Return the task of a run of megalite, or with `peer` of another program."""
    defaults = {"part": "peer" if "peer" in settings else "step", "who": who, "model": model, "device": device, "steps": 10}
    defaults |= {"precision": "fp32" if model == DRY else "bf16", "compiled": device == "cuda"}
    return {**defaults, "microbatch": MICROBATCH[model], "accumulations": [1], **settings}


def own_legs(device: str, *, fp8: bool) -> list[Leg]:
    """Return the legs of megalite's steps; the first of each model is profiled."""
    if device == "cpu":
        settings = {"accumulations": [1, 2], "steps": 2, "profile": True}
        return [Leg("megalite", (step_task("megalite", DRY, device=device, **settings),), 600.0)]
    plain = ["--kernels", ",".join(f"{operation}=torch" for operation in OPERATIONS)]
    profiled: dict[str, Any] = {"accumulations": [1, 8], "profile": True}
    six: dict[str, Any] = {"accumulations": [8], "steps": 6}
    found = [
        ("megalite", LARGE, profiled, 110.0),
        ("megalite", SMALL, {**profiled, "accumulations": [1, 4]}, 60.0),
        ("megalite", LARGE, {**profiled, "precision": "fp8", "flags": ["--fp8"]}, 80.0),
        ("megalite, torch's kernels", LARGE, {**six, "flags": plain}, 70.0),
        ("megalite, --compile of them", LARGE, {**six, "flags": ["--compile", *plain]}, 90.0),
    ]
    return [
        Leg(f"{who} {model}", (step_task(who, model, device=device, **settings),), seconds)
        for who, model, settings, seconds in found
        if fp8 or settings.get("precision") != "fp8"
    ]


def peer_legs(device: str) -> list[Leg]:
    peers = {"plain torch, compiled": "plain", "Hugging Face GPT-2": "huggingface"}
    if device == "cpu":
        tasks = [step_task(who, DRY, device=device, peer=peer, steps=2) for who, peer in peers.items()]
        return [Leg("peers", tuple(tasks), 600.0)]
    found = []
    for who, peer in peers.items():
        for model, accumulations in ((LARGE, [1, 8]), (SMALL, [1, 4])):
            task = step_task(who, model, device=device, peer=peer, accumulations=accumulations, steps=8)
            found.append(Leg(f"{who} {model}", (task,), 90.0))
    return found


def legs_of(arguments: argparse.Namespace, device: str) -> list[Leg]:
    """Return the legs, the most important first, in case the time runs out."""
    dry, found = arguments.dry, []
    machine = {"part": "machine", "device": device}
    before = [{**machine, "when": "before"}]
    if "ceilings" in arguments.parts:
        before += ceiling_tasks(device=device, dry=dry)
    found.append(Leg("ceilings", tuple(before), 90.0))
    own = own_legs(device, fp8=arguments.fp8) if "step" in arguments.parts else []
    found += own[:1]
    if "kernels" in arguments.parts:
        found.append(Leg("kernels", tuple(kernel_tasks(device=device, dry=dry)), arguments.kernel_seconds))
    others = peer_legs(device) if "peers" in arguments.parts else []
    # First of the large model.
    found += [*others[:1], *own[1:3], *others[1:], *own[3:]]
    found.append(Leg("machine", ({**machine, "when": "after"},), 30.0))
    if dry:
        # One process, because importing torch takes longer than all of this.
        tasks = tuple(task for leg in found for task in leg.tasks)
        return [Leg("all", tasks, 1500.0, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})]
    return found


def said(row: Row) -> str:
    keys = KEYS.split()
    name = " ".join(str(row[key]) for key in keys if key in row and row[key] is not True)
    if "failed" in row:
        return f"{name}: {row['failed']}"
    return f"{name}: {row['ms']:.4g} ms" if "ms" in row else name


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = common.parser(__doc__, json_help="write all rows here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--dry", action="store_true", help="everything in tiny sizes on the CPU")
    parser.add_argument("--fp8", action="store_true", help="FP8 linear layers in addition to bf16")
    parser.add_argument("--minutes", type=float, default=9.3, help="limit for everything (9.3)")
    parser.add_argument("--kernel-seconds", type=float, default=200.0, help="limit for the kernels (200)")
    parser.add_argument("--write-preferences", type=Path, metavar="FILE", help="write the measured table, as YAML")
    return parser.parse_args(arguments)


def refusal(arguments: argparse.Namespace, device: str) -> str | None:
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device; --dry tries everything in tiny sizes on the CPU"
    if arguments.write_preferences and "kernels" not in arguments.parts:
        return "--write-preferences: they follow from the part kernels; add it to --parts"
    if importlib.util.find_spec("triton") is None and arguments.dry and "kernels" in arguments.parts:
        return "--dry: Triton is not installed, and its interpreter runs the kernels; leave kernels out of --parts"
    return None


def main(command: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if command is None else command)
    arguments = parse(given)
    device = "cpu" if arguments.dry else "cuda"
    reason = refusal(arguments, device)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()

    def show(row: Row) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {said(row)}", file=sys.stderr, flush=True)

    rows = run_legs(legs_of(arguments, device), until=started + 60 * arguments.minutes, show=show)
    if "kernels" in arguments.parts:
        rows += without_case()
    machine = next((row for row in rows if row.get("when") == "before" and "torch" in row), None)
    measured: list[dict[str, Any]] = []
    if machine is not None and "kernels" in arguments.parts:
        timed = [row for row in rows if row.get("part") == "kernels" and row.get("backend", "torch") in BACKENDS]
        where = f"{'a dry run on ' if arguments.dry else ''}{short(machine)}"
        measured = rules(timed, device=capability(machine), measured_on=where)
    if arguments.write_preferences:
        write(arguments.write_preferences, measured)
    result = {"dry": arguments.dry, "gpu": machine, "seconds": time.monotonic() - started}
    common.write_json(arguments.json, "gpu.run", given, {**result, "preferences": measured, "rows": rows})
    for table in (kernels_table, ceilings_table, profiles_table, steps_table):
        print("\n".join(table(rows)), end="\n\n")
    print(f"{short(machine) if machine else 'no machine'}; {time.monotonic() - started:.0f} s in all")
    if arguments.dry:
        print("A dry run: the times above mean nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
