#!/usr/bin/env python3
"""What one GPU gives, and what megalite makes of it: ceilings, kernels, whole training steps beside peers, profiles.

    PYTHONPATH=. python3 benchmarks/gpu.py --json benchmarks/results/gpu.json --write-preferences preferences.yaml

Needs one H100 or H200 (or a GPU like them), torch and Triton, and nothing that is not with torch; apex, Liger and
transformers take part where they are installed. Ends before `--minutes` are over. Every leg runs in a process of its own:
one that fails is a line that says why.

`--dry` runs every part in tiny sizes on the CPU, Triton's kernels in its interpreter: it shows that the benchmark works,
and its times mean nothing. `--device cpu --parts step` measures and profiles a small model on the CPU.
"""

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_ceilings import ceiling_tasks
from gpu_goals import goals_table
from gpu_kernels import kernel_tasks, without_case
from gpu_legs import Leg, Row, run_legs
from gpu_machine import short
from gpu_preferences import capability, rules, write
from gpu_step import MICROBATCH
from gpu_tables import ceilings_table, kernels_table, profiles_table, steps_table

from megalite.config.compute import BACKENDS, OPERATIONS, ComputeConfig

PARTS = ("ceilings", "step", "kernels", "peers")
LARGE, SMALL = "GPT 1.3B", "GPT-2 124M"


def step_task(who: str, model: str, *, device: str, **settings: Any) -> dict[str, Any]:
    """A run of megalite, or with `peer` of another."""
    half = model in (LARGE, SMALL)
    defaults = {
        "part": "peer" if "peer" in settings else "step",
        "who": who,
        "model": model,
        "device": device,
        "precision": "bf16" if half else "fp32",
        "microbatch": MICROBATCH[model],
        "accumulations": [1],
        "steps": 10,
        "compiled": device == "cuda",
    }
    return {**defaults, **settings}


def own_legs(device: str, *, dry: bool, fp8: bool) -> list[Leg]:
    """megalite's steps; the first of each model is profiled."""
    if device == "cpu":
        model = "GPT dry" if dry else "GPT 6M"
        settings = {"accumulations": [1, 2] if dry else [4], "steps": 2 if dry else 5, "profile": True}
        return [Leg("megalite", (step_task("megalite", model, device=device, **settings),), 600.0)]
    found = [
        ("megalite", LARGE, {"accumulations": [1, 8], "profile": True}, 110.0),
        ("megalite", SMALL, {"accumulations": [1, 4], "profile": True}, 60.0),
    ]
    if fp8:
        eight = {"accumulations": [1, 8], "precision": "fp8", "flags": ["--fp8"], "profile": True}
        found.append(("megalite", LARGE, eight, 80.0))
    plain = ",".join(f"{operation}=torch" for operation in OPERATIONS)
    found.append(
        (
            "megalite, torch's kernels",
            LARGE,
            {"accumulations": [8], "flags": ["--kernels", plain], "steps": 6},
            70.0,
        )
    )
    if "compile" in ComputeConfig.__dataclass_fields__:
        compiled = {"accumulations": [8], "flags": ["--compile", "--kernels", plain], "steps": 6}
        found.append(("megalite, --compile of them", LARGE, compiled, 90.0))
    return [
        Leg(f"{who} {model}", (step_task(who, model, device=device, **settings),), seconds)
        for who, model, settings, seconds in found
    ]


def peer_legs(device: str, *, dry: bool) -> list[Leg]:
    """The same models by others."""
    plain, library = "nanoGPT-like, torch.compile", "Hugging Face GPT-2"
    if device == "cpu":
        model, settings = (
            "GPT dry" if dry else "GPT 6M",
            {"steps": 2 if dry else 5, "accumulations": [1 if dry else 4]},
        )
        tasks = [
            step_task("nanoGPT-like", model, device=device, peer="plain", **settings),
            step_task(library, model, device=device, peer="huggingface", **settings),
        ]
        return [Leg("peers", tuple(tasks), 600.0)]
    found = []
    for model, accumulations in ((LARGE, [1, 8]), (SMALL, [1, 4])):
        for who, peer in ((plain, "plain"), (library, "huggingface")):
            task = step_task(who, model, device=device, peer=peer, accumulations=accumulations, steps=8)
            found.append(Leg(f"{who} {model}", (task,), 90.0))
    return found


def legs_of(arguments: argparse.Namespace, device: str) -> list[Leg]:
    """In this order, so that what matters most is there when time runs out."""
    dry, found = arguments.dry, []
    machine = {"part": "machine", "device": device}
    before = [{**machine, "when": "before"}]
    if "ceilings" in arguments.parts:
        before += ceiling_tasks(device=device, dry=dry)
    found.append(Leg("ceilings", tuple(before), 90.0))
    own = own_legs(device, dry=dry, fp8=arguments.fp8) if "step" in arguments.parts else []
    found += own[:1]
    if "kernels" in arguments.parts:
        found.append(Leg("kernels", tuple(kernel_tasks(device=device, dry=dry)), arguments.kernel_seconds))
    others = peer_legs(device, dry=dry) if "peers" in arguments.parts else []
    # The large model's, then what else there is.
    found += [*others[:1], *own[1:3], *others[1:], *own[3:]]
    found.append(Leg("machine", ({**machine, "when": "after"},), 30.0))
    if dry:
        # One process: to import torch takes longer than all of this.
        tasks = tuple(task for leg in found for task in leg.tasks)
        return [Leg("all", tasks, 1500.0, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})]
    return found


def said(row: Row) -> str:
    """One line, while it runs."""
    keys = (
        "part",
        "who",
        "model",
        "what",
        "shape",
        "case",
        "rows",
        "size",
        "backend",
        "pass",
        "profile",
        "accumulation",
    )
    name = " ".join(str(row[key]) for key in keys if key in row)
    if "failed" in row:
        return f"{name}: {row['failed']}"
    return f"{name}: {row['ms']:.4g} ms" if "ms" in row else name


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these alone")
    parser.add_argument("--dry", action="store_true", help="everything in tiny sizes on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    parser.add_argument("--fp8", action="store_true", help="FP8 linear layers too, beside bf16")
    parser.add_argument("--minutes", type=float, default=9.3, help="what it may take in all (9.3)")
    parser.add_argument(
        "--kernel-seconds", type=float, default=200.0, help="what the kernels may take of that (200)"
    )
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument(
        "--write-preferences",
        type=Path,
        metavar="FILE",
        help="write the table of preferences that follows, as YAML",
    )
    return parser.parse_args(arguments)


def refusal(arguments: argparse.Namespace, device: str) -> str | None:
    """Why it cannot be run so, or None."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device; --dry tries everything in tiny sizes on the CPU, --device cpu measures steps there"
    if arguments.fp8 and "fp8" not in ComputeConfig.__dataclass_fields__:
        return "--fp8: this megalite has no setting compute.fp8"
    if arguments.write_preferences and "kernels" not in arguments.parts:
        return "--write-preferences: they follow from the part kernels; add it to --parts"
    if importlib.util.find_spec("triton") is None and arguments.dry and "kernels" in arguments.parts:
        return "--dry: Triton is not installed, and its interpreter runs the kernels; leave kernels out of --parts"
    return None


def main(command: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    given = list(sys.argv[1:] if command is None else command)
    arguments = parse(given)
    device = "cpu" if arguments.dry else arguments.device
    reason = refusal(arguments, device)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()
    rows = run_legs(
        legs_of(arguments, device),
        until=started + 60 * arguments.minutes,
        show=lambda row: print(
            f"[{time.monotonic() - started:4.0f} s] {said(row)}", file=sys.stderr, flush=True
        ),
    )
    if "kernels" in arguments.parts:
        rows += without_case()
    machine = next((row for row in rows if row.get("when") == "before" and "torch" in row), None)
    measured: list[dict[str, Any]] = []
    if machine is not None and "kernels" in arguments.parts:
        timed = [
            row
            for row in rows
            if row.get("part") == "kernels" and row.get("backend", BACKENDS[0]) in BACKENDS
        ]
        where = f"{'a dry run on ' if arguments.dry else ''}{short(machine)}"
        measured = rules(timed, device=capability(machine), measured_on=where)
    for table in (kernels_table, ceilings_table, profiles_table, steps_table, goals_table):
        print("\n".join(table(rows)), end="\n\n")
    print(f"{short(machine) if machine else 'no machine'}; {time.monotonic() - started:.0f} s in all")
    if arguments.dry:
        print("A dry run: the times above mean nothing.")
    if arguments.write_preferences:
        write(arguments.write_preferences, measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "command": shlex.join(["python3", "benchmarks/gpu.py", *given]),
            "dry": arguments.dry,
            "seconds": time.monotonic() - started,
            "machine": machine,
            "preferences": measured,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
