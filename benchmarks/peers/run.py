"""Compare tokens/s of megalite's training step with every peer that runs on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.peers.run [--json FILE]
        [--megatron-core FOLDER] [--picotron FOLDER]

All train the same models from the same weights on the same batches: fp32 (on one rank also bf16), AdamW with the same
decay, clipping by the global norm. The contenders of a layout are started together, make a few steps with losses that must
agree, and are then timed in turn, in another order every round, so that other load on the machine affects all alike. The
table has medians and quartiles of the turns, CPU time, and model FLOPs (PaLM) as a share of the matrix products that the
machine made in the same rounds. "ours" is the median over rounds of megalite's rate over the contender's.

picotron only has Llama: it is compared on a Llama of the small size. megatron-core and picotron are taken from folders:

    pip install --no-deps --target FOLDER megatron-core==0.16.1
    git clone https://github.com/huggingface/picotron FOLDER"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.peers import worker
from benchmarks.peers.case import CLIP, DECAY, GPT2, LAYOUTS, LLAMA, LR, Case
from benchmarks.peers.plain_gpt import Size
from benchmarks.peers.rounds import NOT_GIVEN, Disagreement, compete, row_of, table
from megalite.parity.pool import RankPool


class Model(NamedTuple):
    size: Size
    layouts: tuple[str, ...]
    rounds: float = 1.0  # share of the requested rounds; large models make fewer
    family: str = GPT2
    bf16: bool = True  # on one rank also in bf16


TINY = Size(layers=4, hidden=32, heads=4, vocab=128, seq=16, micro=1, batch=4)
_ALL = tuple(LAYOUTS)
MODELS = {
    "small": Model(Size(), _ALL),
    "medium": Model(Size(layers=8, hidden=512), _ALL[1:], rounds=0.6),
    "wide": Model(Size(hidden=1024, heads=16), ("1",), rounds=0.6),
    "llama": Model(Size(), tuple(name for name in _ALL if name != "pp2.vpp2"), family=LLAMA, bf16=False),
}
HOST = {"tiny": Model(TINY, _ALL), "tiny-llama": Model(TINY, ("1",), family=LLAMA, bf16=False)}
"""Models so small that Python and the dispatcher dominate a step."""
MODELS |= HOST
LIMITS = {False: 1e-4, True: 3e-2}  # largest difference of losses, in fp32 and in bf16


class Pools:
    """Process pools for the contenders, one per seat, reused from layout to layout."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pools: dict[str, RankPool] = {}

    def seat(self, seats: Sequence[str]) -> dict[str, RankPool]:
        """Return a pool per seat; start missing and failed ones, two at a time."""
        missing = [seat for seat in seats if seat not in self._pools or self._pools[seat].stopped]
        with ThreadPoolExecutor(max_workers=2) as starters:
            for seat, pool in zip(missing, starters.map(lambda _: RankPool(self._ranks), missing)):
                self._pools[seat] = pool
        return {seat: self._pools[seat] for seat in seats}

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()


def seats_of(names: Iterable[str]) -> dict[str, str]:
    """Assign contenders to seats. megalite and peers that patch torch have their own; the others share."""
    seats, shared = {}, 0
    for name in names:
        own = name if worker.CONTENDERS[name].ours else worker.CONTENDERS[name].needs
        seats[name] = own or f"seat {shared}"
        shared += own is None
    return seats


def contenders_of(case: Case, layout: str, wanted: Sequence[str]) -> list[str]:
    return [
        name
        for name, entry in worker.CONTENDERS.items()
        if name in wanted and layout in entry.layouts and case.family in entry.families and (entry.bf16 or not case.bf16)
    ]


def run_case(pools: Pools, case: Case, layout: str, names: list[str], arguments: Any) -> list[dict[str, Any]]:
    folders = dict(case.folders)
    missing = [name for name in names if worker.CONTENDERS[name].needs not in {None, *folders}]
    seats = seats_of(name for name in names if name not in missing)
    by_seat = pools.seat(list(seats.values()))
    at = {name: by_seat[seat] for name, seat in seats.items()}
    found = compete(
        at,
        case,
        limit=LIMITS[case.bf16],
        gemm=128 if arguments.smoke else 1024,
        **{name: getattr(arguments, name) for name in ("checks", "rounds", "steps", "seed")},
    )
    rows = [row_of(name, found, case) for name in seats]
    return rows + [{"contender": name, "note": NOT_GIVEN} for name in missing]


def cases_of(name: str, layouts: Sequence[str], arguments: Any) -> list[tuple[Case, str]]:
    """Cases of a model: every layout in fp32, one rank in bf16."""
    model = MODELS[name]
    size = TINY if arguments.smoke else model.size
    found = []
    for layout in layouts:
        if layout not in model.layouts:
            continue
        for bf16 in (False, True):
            if bf16 and not (model.bf16 and layout == "1" and not arguments.no_bf16):
                continue
            folders = tuple(sorted(arguments.folders.items()))
            shape = {"size": size, "layout": LAYOUTS[layout], "family": model.family, "bf16": bf16}
            found.append((Case(**shape, batch_peers=arguments.batch_peers, folders=folders), layout))
    return found


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name not in HOST])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--contenders", nargs="+", choices=worker.CONTENDERS, default=list(worker.CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5; large models fewer)")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn (1)")
    parser.add_argument("--checks", type=int, default=2, help="steps before the rounds; their losses must agree (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of turns")
    parser.add_argument("--batch-peers", action="store_true", help="run peers under SCHED_BATCH, as megalite")
    parser.add_argument("--no-bf16", action="store_true", help="fp32 only")
    parser.add_argument("--megatron-core", type=Path, help="folder that holds the package megatron")
    parser.add_argument("--picotron", type=Path, help="folder that holds the package picotron")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one round: does it run?")
    arguments = parser.parse_args(words)
    given = {"megatron-core": arguments.megatron_core, "picotron": arguments.picotron}
    arguments.folders = {name: str(path.resolve()) for name, path in given.items() if path is not None}
    if arguments.smoke:
        arguments.rounds, arguments.steps = 1, 1
    if worker.MEGALITE not in arguments.contenders:
        parser.error("--contenders must have megalite among them: the others are compared with it")
    return arguments


def without_folders(words: Sequence[str] | None) -> list[str]:
    """The command line, without this machine's paths."""
    shown = list(sys.argv[1:] if words is None else words)
    for place, word in enumerate(shown):
        if word in ("--megatron-core", "--picotron"):
            shown[place + 1] = "FOLDER"
    return shown


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    asked = arguments.rounds
    results: list[dict[str, Any]] = []
    plan = [(name, *item) for name in arguments.models for item in cases_of(name, arguments.layouts, arguments)]
    pools = Pools(max(case.layout.ranks for _, case, _ in plan))
    try:
        for name, case, layout in plan:
            arguments.rounds = max(1, round(asked * MODELS[name].rounds))
            names = contenders_of(case, layout, arguments.contenders)
            rows = run_case(pools, case, layout, names, arguments)
            title = {"model": name, "layout": layout, "precision": "bf16" if case.bf16 else "fp32"}
            results.append({**title, "rounds": arguments.rounds, "rows": rows})
            print(table(results[-1]), flush=True)
    except Disagreement as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        pools.stop()
    sizes = {name: vars(TINY if arguments.smoke else MODELS[name].size) for name in arguments.models}
    optimizer = f"AdamW, lr {LR}, decay {DECAY}, clip {CLIP}"
    facts = {"sizes": sizes, "optimizer": optimizer, "results": results}
    common.write_json(arguments.json, "peers.run", without_folders(words), facts)
    return int(any("failed" in row.get("note", "") for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
