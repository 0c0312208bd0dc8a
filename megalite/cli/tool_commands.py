"""The flags of the commands that plan, start, measure and show runs. Without torch, as `model_commands`."""

from pathlib import Path

from megalite.cli.command import IMPORT, Command, Flag, above_zero, byte_size, not_negative, positive
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.reading import PRECISIONS
from megalite.pipeline.ir.generators.registry import SCHEDULES

DOCTOR_SECONDS = 5.0
AUTO = "auto"
NAMES = (*SCHEDULES, AUTO)

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
    "Show what the settings come to.",
    [
        Flag("--show", "the resolved config as YAML", bool),
        Flag("--explain", "each setting that is not at its default, and where it comes from", bool),
        Flag("--presets", "names of the presets", bool),
    ],
    ("megalite config --show --preset gpt2-124m --tp 2 --world-size 8",),
    "--show and --explain check the config for --world-size N ranks (default tp·pp·cp·dp) and take --json.",
    exclusive=(("--show", "--explain", "--presets"),),
    one_required=True,
    settings=("--dry-run",),
    status_without_words=0,
)

COMPLETION = Command(
    "megalite completion",
    "shell completion of commands, flags and their values",
    "Print the completion script of a shell, for megalite and for pretrain_gpt.py where that is called by its name.",
    [Flag("shell SHELL", "bash or zsh", choices=("bash", "zsh"))],
    ("megalite completion bash",),
    'eval "$(megalite completion bash)" goes into ~/.bashrc, with zsh into ~/.zshrc.',
    status_without_words=0,
)

PORT = Command(
    "megalite port",
    "turn a launch script or YAML of Megatron-LM into ours",
    "Read a launch script of Megatron-LM (bash that runs pretrain_gpt.py by torchrun, srun or python) or a model_config.yaml "
    "of its tests, and print the command line, the config, what was dropped and what differs. Nothing is run: variables "
    "without a value stay as they are written. docs/from_megatron.md says more.",
    [
        Flag("script SCRIPT", "a bash script, or YAML with MODEL_ARGS", Path),
        Flag("--set NAME=VALUE", "the value of a variable, or of an argument: 1=checkpoints; repeat it", repeat=True),
        Flag("--world-size N", "ranks; default: what the launcher says", positive),
        Flag("--output FILE", "write the config there", Path),
    ],
    ("megalite port train_llama3_8b.sh --set 1=checkpoints --output run.yaml",),
    "Exit status: 0, or 2 if something in it cannot be had: all of it is named.",
)

REHEARSE = Command(
    "megalite rehearse",
    "run a training step of any rank of any layout without devices or peers",
    "Run the real training step of one rank, or of one rank of each kind, on tensors without contents: peak memory, kernels, "
    "where the host waits for the device, every communication in its order; with --all-kinds a proof that all groups of the "
    "world match and that nothing deadlocks. docs/rehearsal.md says what it shows and what it cannot.",
    [
        Flag("--all-kinds", "both corners of each pipeline place, and the proof", bool),
        Flag("--workers N", "processes; default: the usable cores", positive),
    ],
    ("megalite rehearse --preset gpt-1t --tp 8 --pp 64 --world-size 3072 --all-kinds",),
    "Takes any flags of megalite train, --world-size N, --rank N and --json. Exit status: 0, or 1 if ranks do not match.",
    settings=("--dry-run",),
    status_without_words=0,
)

SCHEDULE = Command(
    "megalite schedule",
    "draw, compare and check pipeline schedules",
    "Draw a pipeline schedule on a clock, with the bubble and the peak memory of each rank; compare schedules; check a "
    "schedule that you wrote before training with it. Costs are those of a rank's whole share of the model for one "
    "microbatch; without --costs forward, input gradient and weight gradient take 1 each. docs/schedules.md explains it.",
    [
        Flag(
            "--schedule NAME", f"{', '.join(NAMES)} (default 1f1b, with --vpp interleaved)", choices=PIPELINE_SCHEDULES
        ),
        IMPORT,
        Flag("--csv FILE", "a schedule that you wrote: one line per rank, 0F0,0B0,...", Path),
        Flag("--compare [NAME ...]", "several schedules in one table (default all)", choices=PIPELINE_SCHEDULES),
        Flag("--pp P", "pipeline ranks", positive),
        Flag("--vpp V", "stages per rank (default: what the schedule needs)", positive),
        Flag("--microbatches M", "microbatches in a step", positive),
        Flag("--group N", "interleaved: microbatches of a group (default: least)", int),
        Flag("--warm-up", "1f1b: least warm-up, or twice as deep (default pa)", choices=("pa", "pb")),
        Flag("--recompute-ahead", "recompute before the gradient is there", bool),
        Flag("--forward-only", "evaluation: no backwards", bool),
        Flag("--costs FILE", "JSON: times, links and bytes", Path),
        Flag("--memory-limit SIZE", "of a rank: bytes such as 12GiB; without --costs live microbatches such as 4"),
        Flag("--recv-prefetch N", "receives are posted N actions early", int, default=1),
        Flag("--send-window N", "sends that may be pending on a link", int, default=1),
        Flag("--lowered", "show the program too: sends, receives, reductions", bool),
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
    "the fastest layouts of a model on a cluster, with their time, memory and launch lines",
    "Find the fastest layouts that fit. Any setting of megalite train may be given; those that the search decides (--tp, "
    "--pp, ...) then are constraints. docs/plan.md explains what is printed.",
    [
        Flag("--cluster NAME", "machines: a name that comes with megalite, or a YAML file", required=True),
        Flag("--gpus N", "ranks; with --objective cost the most of them", positive, required=True),
        Flag("--stack NAME", "software: fused (default) or unfused, or a YAML file", default="fused"),
        Flag(
            "--objective",
            "what is least: time (default), cost in GPU hours, memory",
            choices=("time", "cost", "memory"),
            default="time",
        ),
        Flag("--fix NAME=VALUE,..", "allow only these values, e.g. schedule=zb-v; may be repeated", repeat=True),
        Flag("--max-memory SIZE", "per rank, e.g. 70GB; default 90 % of the device's", byte_size),
        Flag("--tokens N", "length of the training of which the time is shown, e.g. 1.5T (300B)", default="300B"),
        Flag("--gpu-hour-price N", "money per GPU hour; default the cluster file's, if it has one", above_zero),
        Flag("--mtbf-hours N", "GPU hours from one failure to the next, for goodput; with --save-seconds", above_zero),
        Flag("--save-seconds N", "that a checkpoint holds training up", above_zero),
        Flag("--restart-seconds N", "from a failure until training continues (600)", above_zero, default=600.0),
        Flag("--top N", "layouts to show (5)", positive, default=5),
        Flag("--output FILE", "write the best as a config for training, the others beside it", Path),
        Flag("--html FILE", "write a report: one file, no network", Path),
        Flag("--resolve FILE", "write a sweep of the layouts that are a tie, which decides between them", Path),
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
    "Read a table of measured steps, fit the efficiencies and constants that explain them, and show the error of each row. "
    "docs/planner.md says which constants there are.",
    [
        Flag(
            "rows ROWS.csv",
            "CSV: gpus, seconds (or tokens_per_second_per_gpu), and settings by name; a line per step",
            Path,
        ),
        Flag(
            "--cluster NAME", "machines to begin with: a name that comes with megalite, or a YAML file", required=True
        ),
        Flag("--stack NAME", "software to begin with (fused)", default="fused"),
        Flag("--fit CONSTANT", "only this constant, e.g. gemm; may be repeated", repeat=True),
        Flag("--leave-out COLUMN", "also fit without the rows of each value of a column, and judge by those"),
        Flag("--output FILE.yaml", "write the cluster there, and the stack beside it", Path),
        _JSON,
    ],
    ("megalite plan-fit steps.csv --cluster dgx-h100 --leave-out hidden_size --output ours.yaml",),
    run="megalite.cli.plan:run_fit",
)

PLAN_CHAIN = Command(
    "megalite plan-chain",
    "cut and place a chain of unequal layers (DAPPLE's planner), beside PipeDream's",
    "Which layers make a stage, on how many devices and on which: the fastest synchronous step for a model given as a "
    "chain of measured layers. PipeDream's plan, pure data parallelism and a straight pipeline are judged by the same "
    "simulator. docs/planner_chain.md explains all of it.",
    [
        Flag("profile PROFILE", "YAML: the layers; or a synthetic one such as vgg-19 (the page names all)"),
        Flag(
            "--cluster NAME",
            "machines x devices such as 2x8 or 16x1@10 (Gbit/s), A, B or C of the DAPPLE paper, or a YAML file",
            required=True,
        ),
        Flag("--global-batch-size N", "samples of a step", int, required=True),
        Flag("--memory SIZE", "of a device, such as 16GB (default: the cluster's)", byte_size),
        Flag("--compare", "the stages of the plans it is compared with, too", bool),
        _JSON,
        Flag("--svg FILE", "write the timeline as a picture", Path),
    ],
    ("megalite plan-chain vgg-19 --cluster 2x8 --global-batch-size 1024",),
)

PROFILE = Command(
    "megalite profile",
    "measure this machine and write a cluster file for plan and sweep",
    "Measure matrix products, attention, memory and small operations of this machine, and under torchrun what moves "
    "between its ranks, and write a cluster file: megalite plan --cluster FILE. docs/profile.md",
    [
        Flag("--output FILE", "cluster file to write (.yaml)", Path, required=True),
        Flag("--output-stack FILE", "write a stack file too: what the host takes to start operations", Path),
        Flag("--seconds N", "how long to measure (60)", float, default=60.0),
        Flag(
            "--dtype NAME ...",
            f"precisions to measure, of {', '.join(PRECISIONS)}; the first decides efficiencies (bf16 on a GPU, fp32 on a "
            "CPU)",
        ),
        Flag("--device", "(auto)", default="auto", choices=_DEVICE),
        Flag(
            "--like CLUSTER",
            "name or file of the cluster that stands in for what is not measured; default: the one with this "
            "accelerator, or cpu-box",
        ),
        Flag("--name NAME", "of the cluster; default: that of the file"),
    ],
    (
        "megalite profile --output my-cluster.yaml",
        "torchrun --nproc-per-node 4 -m megalite.cli.profile --output my-cluster.yaml",
    ),
)

SWEEP = Command(
    "megalite sweep",
    "run many configurations for a few steps and compare them",
    "Check every configuration of a grid, a list or a plan, train each for a few steps, and compare speed and memory, "
    "measured and predicted. What is done is not run again: the same command continues after a kill. docs/sweep.md "
    "explains all of it.",
    [
        Flag("sweep SWEEP.yaml", "which configurations, and for how long", Path),
        Flag("--output FOLDER", "results and runs; continues if it is there", Path),
        Flag("--dry-run", "check and predict all, run nothing", bool),
        Flag("--strict", "stop if any configuration is refused", bool),
        Flag("--launcher", "torchrun here, or jobs (local)", default="local", choices=_LAUNCHERS),
        Flag("--timeout SECONDS", "of a run; over the file's (300)", above_zero),
        Flag("--limit N", "launch at most N runs this time", positive),
        Flag("--retry", "run again what did not end well", bool),
        Flag("--report-only", "write table and report from the results there are", bool),
        Flag("--calibrate CLUSTER.yaml", "fit cluster and stack to what was measured, into new files", Path),
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
    "Shrinks the model to laptop size, trains it on one rank and in the layout (gloo on this CPU, float64) and compares "
    "every loss, gradient and weight. Takes the flags of megalite train, except strategies, compression and optimizers "
    "that are not meant to give the numbers of one rank. --precision NAME runs both in it: fp64 (default), fp32, bf16 or "
    "fp16; --world-size N is the ranks of the layout (default tp·pp·cp·dp with dp at most 2, and at most 8); with "
    "--no-eod-mask-loss all tokens count (default: uneven masks); --json prints the comparison as JSON. docs/parity.md "
    "explains the table.",
    [
        Flag("--steps N", "steps to train (3)", positive, default=3),
        Flag("--tolerance X", "largest relative difference (1e-9 in fp64)", not_negative),
        Flag(
            "--fuzz SECONDS",
            "draw random layouts and models for so long, with --seed N; prints a line that repeats each failure",
            not_negative,
        ),
    ],
    ("megalite parity --preset gpt2-124m --tp 2 --pp 2",),
    "Exit status: 0 the same, 1 different, 2 bad input.",
    settings=("--dry-run",),
    status_without_words=0,
)

DOCTOR = Command(
    "megalite doctor",
    "look at this machine: versions, devices, network, disk; test collectives and products; what to fix",
    "Look at versions, devices, kernels, network and disk, test matrix products and collectives for a few seconds, and "
    "say what to fix. Under torchrun all ranks of the job test together, and hosts that differ, fail or are slow are "
    "named. docs/doctor.md explains the findings.",
    [
        Flag("--run-dir DIR", "folder of which the disk is tested; need not be there yet (.)", Path, default=Path()),
        Flag("--device", "device that is tested (auto: cuda where there is one)", default="auto", choices=_DEVICE),
        Flag("--seconds N", f"that products and collectives take together ({DOCTOR_SECONDS:g})", float),
        Flag("--no-self-test", "look only: no products, no collectives", bool),
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
    "operations, their kernels, what can run here or why not, and what would be chosen",
    "Operations, their kernels of each backend, whether they can run here or why not, and which would serve a model of "
    "hidden size 4096, also with --kernels of a run. docs/kernels.md",
    [
        Flag("--device", "the device asked about (cuda where there is one)", choices=("cpu", "cuda")),
        Flag("--kernels CHOICES", "as a run takes it: apex, or apex,adam=torch"),
        IMPORT,
        _JSON,
    ],
    ("megalite kernels --device cpu --json", "megalite kernels --kernels torch"),
)

RUNS = Command(
    "megalite runs",
    "list runs, how they stand, and compare their curves",
    "List the runs in and below a folder: how each stands, its last loss, speed and goodput. Reads what runs leave in "
    "their --run-dir; a run that is under way may be looked at.",
    [
        Flag("folder DIR", "a run (its --run-dir), or a folder with runs in it", Path),
        Flag("--html FILE", "write one page with their curves; it needs nothing else", Path),
        Flag("--png FILE", "draw their curves (with matplotlib); the ending gives the format: .png, .svg, .pdf", Path),
        Flag("--json", "print the list, with the curves, as JSON", bool),
    ],
    ("megalite runs runs --html runs/compare.html", "megalite runs runs/first --png loss.svg"),
)
