"""The call stack between `pretrain_gpt.py` and a step is short, and few modules are imported."""

import json
import sys

from tests.e2e.programs import run

MOST_FRAMES, MOST_MODULES = 8, 150

PROBE = """
import gc, json, runpy, sys

def probe(frame, event, _):
    if event == "call" and frame.f_code.co_qualname == "Executor.run":
        sys.setprofile(None)
        names = []
        while frame.f_globals["__name__"] != "runpy":
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        modules = sorted(name for name in sys.modules if name.split(".")[0] == "megalite")
        collector = gc.isenabled(), gc.get_freeze_count() > 100_000, gc.get_stats()[2]["collections"]
        print("FOUND" + json.dumps({"frames": names[::-1], "modules": modules, "collector": collector}))

sys.setprofile(probe)
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""

RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1"
)


def test_stack_is_short_and_imports_are_few() -> None:
    """Count stack frames and megalite's modules at the first `Executor.run` on one rank, fp32, all-reduce."""
    out = run(sys.executable, "-c", PROBE, *RUN.split()).require_success().out
    [found] = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("FOUND")]
    frames, modules = found["frames"], found["modules"]
    assert frames[0] == "<module>" and frames[-1] == "Executor.run"
    assert len(frames) <= MOST_FRAMES, frames
    assert len(modules) <= MOST_MODULES, modules
    assert found["collector"] == [True, True, 0], "torch is imported without collections, and later ones skip it"
    optimizers = {name.rpartition(".")[2] for name in modules if name.startswith("megalite.optimizers.")}
    assert optimizers == {"base", "adam", "schedules"}, "others are imported if a config names them"
    strategies = {"local_sgd", "fully_sharded", "codec", "onebit", "server"}
    assert not strategies & {name.removeprefix("megalite.data_parallel.") for name in modules}
