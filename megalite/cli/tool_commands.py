"""Define the flags of the commands that plan, start, measure and show runs. Imports no torch, as `model_commands`."""

from pathlib import Path

from megalite.cli.command import IMPORT, Command, Flag, above_zero, byte_size, not_negative
from megalite.config.numbers import whole_number
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.reading import PRECISIONS

DOCTOR_SECONDS = 5.0

_SCHEDULES = ", ".join(PIPELINE_SCHEDULES.builtin)
_DEVICE = ("auto", "cpu", "cuda")
_LAUNCHERS = ("local", "sbatch", "ray", "kubernetes")
_JSON = Flag("--json", "print everything as JSON", bool)

TRAIN = Command(
    "megalite train",
    "train a GPT, as pretrain_gpt.py does; --dry-run shows the layout first",
    run="megalite.cli.train:main",
    parses=False,
    long_running=True,
)

CONFIG = Command(
    "megalite config",
    "show a resolved config, or the presets",
    "Show the resolved settings of a command line.",
    [
        Flag("--show", "the resolved config as YAML", bool),
        Flag("--explain", "each setting that is not at its default, with its source", bool),
        Flag("--presets", "names of the presets", bool),
    ],
    ("megalite config --show --preset gpt2-124m --tp 2 --world-size 8",),
    "--show and --explain check the config for --world-size N ranks (default tp·pp·cp·dp) and take --json.",
    exclusive=(("--show", "--explain", "--presets"),),
    one_required=True,
    settings=("--dry-run",),
    status_without_words=0,
    run="megalite.cli.dry_run:run_config",
)

COMPLETION = Command(
    "megalite completion",
    "shell completion of commands, flags and their values",
    "Print the completion script of a shell, for megalite and for pretrain_gpt.py if it is called by its name.",
    [Flag("shell SHELL", "bash or zsh", choices=("bash", "zsh"))],
    ("megalite completion bash",),
    'Add eval "$(megalite completion bash)" to ~/.bashrc, or the same with zsh to ~/.zshrc.',
    status_without_words=0,
    run="megalite.cli.main:completion",
)

PORT = Command(
    "megalite port",
    "translate a launch script or YAML of Megatron-LM",
    "Read a launch script of Megatron-LM (bash that runs pretrain_gpt.py by torchrun, srun or python) or a model_config.yaml "
    "of its tests, and print the command line, the config, dropped flags and differences. Nothing in the script is run; "
    "variables without a value stay in the output. See docs/from_megatron.md.",
    [
        Flag("script SCRIPT", "a bash script, or YAML with MODEL_ARGS", Path),
        Flag("--set NAME=VALUE", "value of a variable or of an argument (1=checkpoints); may be repeated", repeat=True),
        Flag("--world-size N", "ranks; default: those of the launcher", whole_number),
        Flag("--output FILE", "write the config to a file", Path),
    ],
    ("megalite port train_llama3_8b.sh --set 1=checkpoints --output run.yaml",),
    "Exit status: 0, or 2 if something is not supported: the error names all of it.",
)

REHEARSE = Command(
    "megalite rehearse",
    "run a training step of any rank of any layout without devices or peers",
    "Run the real training step of one rank, or of one rank of each kind, on tensors without contents. Shows peak memory, "
    "kernels, waits of the host for the device and every communication in order; with --all-kinds also a proof that all "
    "groups of the world match and that nothing deadlocks. docs/rehearsal.md explains the output and its limits.",
    [
        Flag("--all-kinds", "the first and last rank of each pipeline rank, and the proof", bool),
        Flag("--workers N", "processes; default: the usable cores", whole_number),
    ],
    ("megalite rehearse --preset gpt-1t --tp 8 --pp 64 --world-size 3072 --all-kinds",),
    "Takes any flags of megalite train, --world-size N, --rank N and --json. Exit status: 0, or 1 if ranks do not match.",
    settings=("--dry-run",),
    status_without_words=0,
    run="megalite.cli.layout_checks:rehearsal",
)

SCHEDULE = Command(
    "megalite schedule",
    "draw, compare and check pipeline schedules",
    "Draw the timeline of a pipeline schedule, with the bubble and the peak memory of each rank; compare schedules; check a "
    "schedule that you wrote before training with it. Costs are those of a rank's whole share of the model for one "
    "microbatch; without --costs forward, input gradient and weight gradient take 1 each. See docs/schedules.md.",
    [
        Flag("--schedule NAME", f"{_SCHEDULES} (default 1f1b, with --vpp interleaved)", choices=PIPELINE_SCHEDULES),
        IMPORT,
        Flag("--csv FILE", "a schedule that you wrote: one line per rank, 0F0,0B0,...", Path),
        Flag("--compare [NAME ...]", "several schedules in one table (default all)", choices=PIPELINE_SCHEDULES),
        Flag("--pp P", "pipeline ranks", whole_number),
        Flag("--vpp V", "stages per rank (default: as the schedule needs)", whole_number),
        Flag("--microbatches M", "microbatches per step", whole_number),
        Flag("--group N", "interleaved: microbatches per group (default: minimum)", int),
        Flag("--warm-up", "1f1b: shortest warm-up (pa, default), or twice as deep (pb)", choices=("pa", "pb")),
        Flag("--recompute-ahead", "recompute before the gradient arrives", bool),
        Flag("--forward-only", "evaluation: no backwards", bool),
        Flag("--costs FILE", "JSON: times, links and bytes", Path),
        Flag("--memory-limit SIZE", "per rank: bytes such as 12GiB; without --costs live microbatches such as 4"),
        Flag("--recv-prefetch N", "post receives N actions early", int, default=1),
        Flag("--send-window N", "maximum pending sends on a link", int, default=1),
        Flag("--lowered", "also show the program with sends, receives and reductions", bool),
        _JSON,
        Flag("--write-csv FILE", "write the schedule, for --csv", Path),
        Flag("--svg FILE", "write a picture", Path),
        Flag("--html FILE", "write a report: one file, no network", Path),
        Flag("--trace FILE", "write a Chrome trace, for ui.perfetto.dev", Path),
    ],
    (
        "megalite schedule --schedule zb-v --pp 4 --microbatches 8",
        "megalite schedule --compare 1f1b interleaved zb-h1 --pp 4 --microbatches 8",
    ),
    disables={
        "--csv": "--schedule --pp --vpp --microbatches --group --warm-up --recompute-ahead --forward-only",
        "--compare": "--schedule --forward-only --write-csv --lowered",
        "--forward-only": "--recompute-ahead",
    },
)

PLAN = Command(
    "megalite plan",
    "find the fastest layouts of a model on a cluster, with their time, memory and launch lines",
    "Find the fastest layouts that fit. All settings of megalite train are allowed; those that the search decides (--tp, "
    "--pp, ...) become constraints. docs/plan.md explains the output.",
    [
        Flag("--cluster NAME", "machines: a cluster of megalite, or a YAML file", required=True),
        Flag("--gpus N", "ranks; with --objective cost the maximum", whole_number, required=True),
        Flag("--stack NAME", "software: fused (default) or unfused, or a YAML file", default="fused"),
        Flag(
            "--objective",
            "minimize time (default), cost in GPU hours, or memory",
            choices=("time", "cost", "memory"),
            default="time",
        ),
        Flag("--fix NAME=VALUE,..", "allow only these values, e.g. schedule=zb-v; may be repeated", repeat=True),
        Flag("--max-memory SIZE", "per rank, e.g. 70GB; default 90 % of the device's", byte_size),
        Flag("--tokens N", "length of the whole training, for its time and cost, e.g. 1.5T (300B)", default="300B"),
        Flag("--gpu-hour-price N", "price of a GPU hour; default: that of the cluster file", above_zero),
        Flag("--mtbf-hours N", "mean GPU hours between failures, for goodput; with --save-seconds", above_zero),
        Flag("--save-seconds N", "seconds that a checkpoint delays training", above_zero),
        Flag("--restart-seconds N", "seconds from a failure until training continues (600)", above_zero, default=600.0),
        Flag("--top N", "layouts to show (5)", whole_number, default=5),
        Flag("--output FILE", "write the best layout as a config for training, the others beside it", Path),
        Flag("--html FILE", "write a report: one file, no network", Path),
        Flag("--resolve FILE", "write a sweep that measures the tied layouts", Path),
        Flag("--explain", "draw the step of the best layout", bool),
        _JSON,
    ],
    ("megalite plan --preset llama2-7b --cluster dgx-a100 --gpus 64 --global-batch-size 1024",),
    settings=(),
    status_without_words=2,
)

PLAN_FIT = Command(
    "megalite plan-fit",
    "fit a cluster and a stack to measured steps, for plan and sweep",
    "Read a table of measured steps, fit efficiencies and constants to them, and show the error of each row. "
    "docs/planner.md lists the constants.",
    [
        Flag(
            "rows ROWS.csv",
            "CSV: gpus, seconds (or tokens_per_second_per_gpu), and settings by name; a line per step",
            Path,
        ),
        Flag("--cluster NAME", "initial cluster: a cluster of megalite, or a YAML file", required=True),
        Flag("--stack NAME", "initial software stack (fused)", default="fused"),
        Flag("--fit CONSTANT", "fit only this constant, e.g. gemm; may be repeated", repeat=True),
        Flag("--leave-out COLUMN", "cross-validate: predict the rows of each value of a column from the others"),
        Flag("--output FILE.yaml", "write the cluster to this file, and the stack beside it", Path),
        _JSON,
    ],
    ("megalite plan-fit steps.csv --cluster dgx-h100 --leave-out hidden_size --output ours.yaml",),
    run="megalite.cli.plan:run_fit",
)

PLAN_CHAIN = Command(
    "megalite plan-chain",
    "cut and place a chain of unequal layers (DAPPLE's planner), beside PipeDream's",
    "Group the layers of a model, given as a chain of measured layers, into stages and place them on devices, so that the "
    "synchronous step is fastest. The same simulator evaluates PipeDream's plan, pure data parallelism and a straight "
    "pipeline. See docs/planner_chain.md.",
    [
        Flag("profile PROFILE", "YAML: the layers; or a synthetic profile such as vgg-19 (listed on that page)"),
        Flag(
            "--cluster NAME",
            "machines x devices such as 2x8 or 16x1@10 (Gbit/s), A, B or C of the DAPPLE paper, or a YAML file",
            required=True,
        ),
        Flag("--global-batch-size N", "samples per step", int, required=True),
        Flag("--memory SIZE", "memory per device, such as 16GB (default: the cluster's)", byte_size),
        Flag("--compare", "also show the stages of the other plans", bool),
        _JSON,
        Flag("--svg FILE", "write the timeline as a picture", Path),
    ],
    ("megalite plan-chain vgg-19 --cluster 2x8 --global-batch-size 1024",),
    run="megalite.cli.plan:run_chain",
)

PROFILE = Command(
    "megalite profile",
    "measure this machine and write a cluster file for plan and sweep",
    "Measure matrix products, attention, memory and small operations of this machine, and under torchrun the "
    "communication between its ranks, and write a cluster file: megalite plan --cluster FILE. See docs/profile.md.",
    [
        Flag("--output FILE", "cluster file to write (.yaml)", Path, required=True),
        Flag("--output-stack FILE", "also write a stack file: times of the host to start operations", Path),
        Flag("--seconds N", "duration of the measurement (60)", float, default=60.0),
        Flag(
            "--dtype NAME ...",
            f"precisions to measure, of {', '.join(PRECISIONS)}; efficiencies are those of the first (bf16 on a GPU, fp32 on "
            "a CPU)",
        ),
        Flag("--device", "(auto)", default="auto", choices=_DEVICE),
        Flag(
            "--like CLUSTER",
            "name or file of the cluster with figures for what is not measured; default: the one with this accelerator, "
            "or cpu-box",
        ),
        Flag("--name NAME", "name of the cluster; default: that of the file"),
    ],
    (
        "megalite profile --output my-cluster.yaml",
        "torchrun --nproc-per-node 4 -m megalite.cli.main profile --output my-cluster.yaml",
    ),
)

SWEEP = Command(
    "megalite sweep",
    "run many configurations for a few steps and compare them",
    "Check every configuration of a grid, a list or a plan, train each for a few steps, and compare measured and predicted "
    "speed and memory. Finished runs are not repeated: the same command continues after a kill. See docs/sweep.md.",
    [
        Flag("sweep SWEEP.yaml", "the configurations and the number of steps", Path),
        Flag("--output FOLDER", "folder for results and runs; an existing one is continued", Path),
        Flag("--dry-run", "check and predict all configurations, run nothing", bool),
        Flag("--strict", "stop if any configuration is refused", bool),
        Flag("--launcher", "local torchrun, or jobs (local)", default="local", choices=_LAUNCHERS),
        Flag("--timeout SECONDS", "limit of a run; overrides the file (300)", above_zero),
        Flag("--limit N", "launch at most N runs this time", whole_number),
        Flag("--retry", "repeat runs that failed", bool),
        Flag("--report-only", "write table and report from existing results", bool),
        Flag("--calibrate CLUSTER.yaml", "fit cluster and stack to the measurements, into new files", Path),
    ],
    ("megalite sweep sweep.yaml --dry-run", "megalite sweep sweep.yaml --output runs/sweep"),
    disables={
        "--dry-run": "--timeout --limit --retry --report-only --calibrate",
        "--report-only": "--timeout --limit --retry",
    },
)

PARITY = Command(
    "megalite parity",
    "check that a layout gives the numbers of one rank, on this CPU",
    "Shrink the model to laptop size, train it on one rank and in the layout (gloo on this CPU, float64) and compare every "
    "loss, gradient and weight. Takes the flags of megalite train, except strategies, compression and optimizers that are "
    "not meant to give the numbers of one rank. --precision NAME sets the precision of both: fp64 (default), fp32, bf16 or "
    "fp16; --world-size N sets the ranks of the layout (default tp·pp·cp·dp with dp at most 2, and at most 8); with "
    "--no-eod-mask-loss all tokens count (default: uneven masks); --json prints the comparison as JSON. docs/parity.md "
    "explains the table.",
    [
        Flag("--steps N", "steps to train (3)", whole_number, default=3),
        Flag("--tolerance X", "maximum relative difference (1e-9 in fp64)", not_negative),
        Flag(
            "--fuzz SECONDS",
            "test random layouts and models for this time, with --seed N; print a command that repeats each failure",
            not_negative,
        ),
    ],
    ("megalite parity --preset gpt2-124m --tp 2 --pp 2",),
    "Exit status: 0 the same, 1 different, 2 bad input.",
    settings=("--dry-run",),
    status_without_words=0,
    run="megalite.cli.layout_checks:parity",
)

DOCTOR = Command(
    "megalite doctor",
    "check this machine: versions, devices, network, disk, collectives and products; list what to fix",
    "Examine versions, devices, kernels, network and disk, test matrix products and collectives for a few seconds, and "
    "list what to fix. Under torchrun all ranks of the job test together, and the report names hosts that differ, fail or "
    "are slow. docs/doctor.md explains the findings.",
    [
        Flag("--run-dir DIR", "folder on the disk to test; it need not exist (.)", Path, default=Path()),
        Flag("--device", "device to test (auto: cuda if there is one)", default="auto", choices=_DEVICE),
        Flag("--seconds N", f"duration of the tests of products and collectives ({DOCTOR_SECONDS:g})", float),
        Flag("--no-self-test", "skip the tests of products and collectives", bool),
        Flag("--json", "print JSON: every finding with its data", bool),
    ],
    (
        "megalite doctor --run-dir /scratch/runs",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m megalite.cli.main doctor",
    ),
    "Exit status: 0 no error, 1 an error, 2 bad input.",
    disables={"--no-self-test": "--seconds"},
)

KERNELS = Command(
    "megalite kernels",
    "list operations and kernels, why some cannot run on this machine, and which would be chosen",
    "List the kernels of each operation and backend, whether they can run on this machine or why not, and which one a model "
    "of hidden size 4096 would use. See docs/kernels.md.",
    [
        Flag("--device", "device (default: cuda if there is one)", choices=("cpu", "cuda")),
        Flag("--kernels CHOICES", "setting --kernels of a run: apex, or apex,adam=torch"),
        IMPORT,
        _JSON,
    ],
    ("megalite kernels --device cpu --json", "megalite kernels --kernels torch"),
    run="megalite.cli.doctor:run_kernels",
)

RUNS = Command(
    "megalite runs",
    "list runs with their status, and compare their curves",
    "List the runs in and below a folder with status, last loss, speed and goodput. Reads the files in their --run-dir, "
    "also while a run is active.",
    [
        Flag("folder DIR", "a run (its --run-dir), or a folder that contains runs", Path),
        Flag("--html FILE", "write a report with the curves: one file, no network", Path),
        Flag("--png FILE", "draw the curves with matplotlib; the suffix gives the format: .png, .svg, .pdf", Path),
        Flag("--json", "print the list, with the curves, as JSON", bool),
    ],
    ("megalite runs runs --html runs/compare.html", "megalite runs runs/first --png loss.svg"),
)
