"""Test `megalite port` on scripts and YAML in Megatron-LM's form, without running anything."""

from pathlib import Path

import pytest
import yaml

from megalite.cli.main import main
from megalite.cli.port import Launch, command_line, port, read_launches, remarks
from megalite.cli.shell import Shell
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_megatron" / "train_gpt.sh"

Captured = pytest.CaptureFixture[str]


def commands(script: str, **given: str) -> list[list[str]]:
    """Return the commands that a script would run."""
    found: list[list[str]] = []
    Shell(lambda shell, words: found.append(words), given).run(script, "test")
    return found


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a=1; run --x $a ${a}2 '$a' \"$a b\" \\$a", [["run", "--x", "1", "12", "$a", "1 b", "$a"]]),
        ("A=(x 'y z' # no word\n w)\nA+=(v)\nrun ${A[@]}\nrun \"${A[@]}\" ${#A[@]} ${A[1]}", [
            ["run", "x", "y", "z", "w", "v"], ["run", "x", "y z", "w", "v", "4", "y", "z"]]),
        ("A='-a 1'\nA+=' -b'\nrun $A \"$A\"", [["run", "-a", "1", "-b", "-a 1 -b"]]),
        ("run ${X:-a b} ${X:-\"c\"} \"${Y}\" ${Y:+z} $X/f", [["run", "a", "b", "c", "${Y}", "$X/f"]]),
        ("N=3; run $((N*8+1)) $(( $N / 2 )) $((Z+1))", [["run", "25", "1", "$((Z+1))"]]),
        ("C=$1; D=${2:-dir}; H=$(hosts $L | head -n1); run --save $C --d $D $H:1 $(a b)/c", [
            ["run", "--save", "${C}", "--d", "dir", "$(hosts $L | head -n1):1", "$(a b)/c"]]),
        ("P=/a/b.sh; run ${P%.sh} ${P##*/} ${P/b/c} `date` $(pwd)/x", [
            ["run", "/a/b", "b.sh", "/a/c.sh", "`date`", "$(pwd)/x"]]),
        ("if [ -n \"$W\" ]; then run w; elif [[ 2 -gt 1 && -z \"$W\" ]]; then run e; else run x; fi; run end", [
            ["run", "e"], ["run", "end"]]),
        ("if [ ! -f x ]; then\n  echo no\n  exit 1\nfi\nrun", [["run"]]),
        ("case $K in a) run 1;; b*|c) run 2 ;; *) run 3;; esac", [["run", "3"]]),
        ("K=bee\ncase \"$K\" in\n a) run 1 ;;\n b*|c) run 2 ;;\nesac\nrun", [["run", "2"], ["run"]]),
        ("while [[ $# -gt 0 ]]; do case $1 in --x) A=$2; shift 2;; esac; done; for i in 1 2; do run $i; done", [
            ["run", "1"], ["run", "2"]]),
        ("f() { run inside\n}\nexport A=5 B=6\nrun $A \\\n  $B > log.txt 2>&1 | tee x", [["run", "5", "6"], ["tee", "x"]]),
        ("unset A; A=1 run $A && B=2\nrun $B", [["run", "1"], ["run", "2"]]),
        ("[ -n \"$X\" ] && A=x; [ -z \"$X\" ] && A=y || A=z\n[[ -n $X ]] || { B=1; C=2; }\nrun $A $B $C", [
            ["run", "y", "1", "2"]]),
        ("N=2; [[ $N == 2 && $N -gt 5 ]] && run no; ! false && run yes || run no; cd x || run no; test $N = 2 && run 2", [
            ["run", "yes"], ["cd", "x"], ["run", "2"]]),
        ("[ -n \"$X\" ] && { run a; run b; }; run c; N=-7; run $((N/2)) $((N%2))", [["run", "c"], ["run", "-3", "-1"]]),
        ("A=()\nrun \"${A[@]}\" \"$@\" \"\" x", [["run", "", "x"]]),
        (": \"${T:=2}\" ${P:=$T}; run $T $P", [[":", "2", "2"], ["run", "2", "2"]]),
        ("A=(\n --a 1\n # don't --b 2 \\\n --c 3 # so \\\n)\nrun ${A[@]}\n# old \\\nrun b", [["run", "--a", "1", "--c", "3"], ["run", "b"]]),
        ("N=2; if (( N > 1 && !(N == 3) )); then run a; fi; (( N >= 3 )) && run no; for ((i=0; i<N; i++)); do run i; done", [
            ["run", "a"]]),
        ("F=false; if $F; then run no; fi; N=2; if [ $N -eq 2 -a -z \"$X\" ]; then run and; fi; [ $N = 3 -o $N = 2 ] && run or", [
            ["run", "and"], ["run", "or"]]),
        ("function f {\n local a=$1; shift\n run $a $# ${#@} \"$@\" \"${@:2}\"\n}\ng() { f x \"$@\"; }\ng y zz", [["run", "x", "2", "2", "y", "zz", "zz"]]),
        ("main() { C=$1; run $C; }\nmain \"$@\"; A=(a b c); S=abcd; run ${A[@]:1:1} ${S:1:2} ${S^^}", [["run", "${C}"], ["run", "b", "bc", "ABCD"]]),
        ("declare -A L=([7b]=32 [\"1.3b\"]=24); S=7b; A=(x y z); I=1; A[3]=w; run ${L[$S]} ${L[1.3b]} ${#L[@]} ${A[$I]} ${A[3]} ${L[70b]}", [
            ["run", "32", "24", "2", "y", "w"]]),
        ("N=3\nread -r -d '' A <<EOF || true\n --n $N \\\n --q \"x\"\nEOF\nB=$(cat <<'EOF'\n--b $N\nEOF\n)\nC=\"$(cat <<-EOF\n\t--c $N\n\tEOF\n)\"\nrun $A $B $C", [
            ["read", "-r", "-d", "", "A"], ["run", "--n", "3", "--q", "\"x\"", "--b", "$N", "--c", "3"]]),
        ("T=2; run $([ $T -gt 1 ] && echo --s -p) `[ $T -gt 2 ] && echo --no` $(if $X; then echo \"a $T\"; fi) $(echo a | cut) $((100 * 10**9)) ${Q:-$(echo q)}", [
            ["run", "--s", "-p", "a", "2", "$(echo a | cut)", "100000000000", "q"]]),
        ("M=7b; if [ $M = 1b ]; then O=' --x'; N=3; A=(--y); fi; [ $U = a ] && P=--z; run $O ${A[@]} ${B[@]} $N $P", [
            ["run", "$N", "$P"]]),
        ("D=<path to data>_text; S=\"<where to>\"; run --d $D --s $S --t <TO X> < in > out", [
            ["run", "--d", "${path_to_data}_text", "--s", "${S}", "--t", "${TO_X}"]]),
        ("D=\"$( cd \"$( dirname \"$0\" )\" && pwd )\"; run $D/x ${T:?set T} ${U?}", [
            ["run", '$( cd "$( dirname "$0" )" && pwd )/x', "${T}", "${U}"]]),
    ],
)  # fmt: skip
def test_shell_scripts(script: str, expected: list[list[str]]) -> None:
    assert commands(script) == expected


@pytest.mark.parametrize("script", ["A=(a b", "run 'x", 'run "x', "if true; then run", "run ${x", "case x in"])
def test_shell_errors_are_user_errors(script: str) -> None:
    with pytest.raises(ConfigError):
        commands(script)


LAUNCHES = {
    "torchrun": ("torchrun --nproc_per_node 4 --nnodes=2 pretrain_gpt.py --tp 2 --bf16", 8),
    "module": ("python -m torch.distributed.run --nproc-per-node=2 /opt/pretrain_gpt.py --tp 2 --bf16", 2),
    "srun": ("srun -N 4 --ntasks-per-node=8 python -u pretrain_gpt.py --tp 2 --bf16", 32),
    "string": ("CMD=\"python -u $D/pretrain_gpt.py --tp 2 --bf16\"\nsrun -n 16 -l sh -c \"${CMD}\"", 16),
    "sbatch": ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\nsrun bash -c 'python pretrain_gpt.py --tp 2 --bf16'", 8),
    "eval": ('run="torchrun --nproc_per_node 8 pretrain_gpt.py --tp 2 --bf16"\neval $run', 8),
    "document": ("F='--tp 2 --bf16'\nsbatch --nodes=2 <<EOF\nsrun --ntasks-per-node=4 python pretrain_gpt.py $F\nEOF", 8),
    "variables": ("#SBATCH -A me -N 4 --gpus-per-node=8 # nodes -n\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node ${SLURM_GPUS_ON_NODE} pretrain_gpt.py --tp 2 --bf16", 32),
    "expanded": ("L='torchrun --nproc_per_node 4'; C='pretrain_gpt.py --tp 2 --bf16'\nsrun bash -c '$L --node_rank $R $C'", 4),
    "deepspeed": ("deepspeed --num_nodes 2 --num_gpus 4 --hostfile h pretrain_gpt.py --tp 2 --bf16", 8),
    "word": ("mpirun -np 2 bash start pretrain_gpt.py ' --tp 2 --bf16'", 2),
    "mpirun": ("mpirun -np 16 -x PATH python pretrain_gpt.py --tp 2 --bf16", 16),
    "alone": ("python pretrain_gpt.py --tp 2 --bf16", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAUNCHES)
def test_flags_of_launchers(kind: str, tmp_path: Path) -> None:
    text, ranks = LAUNCHES[kind]
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    (launch,) = read_launches(script, {})
    assert launch.words == ["--tp", "2", "--bf16"]
    assert launch.ranks == ranks


def test_script_that_writes_a_job_script(tmp_path: Path) -> None:
    """In a here-document two backslashes are one, and variables of the job are kept."""
    (tmp_path / "run.sh").write_text(
        "cat > $OUT/job.sh <<EOF\nsrun torchrun \\\\\n --nnodes=2 --nproc_per_node=4 --rdzv_id=\\$JOB_ID \\\\\n"
        ' --rdzv_endpoint=\\$(first "\\$HOST_NAMES") pretrain_gpt.py --tp 2 \\\\\n --bf16\nEOF\nsbatch $OUT/job.sh\n'
    )
    (launch,) = read_launches(tmp_path / "run.sh", {})
    assert (launch.words, launch.ranks) == (["--tp", "2", "--bf16"], 8)
    said = 'torchrun --nnodes=2 --nproc-per-node=4 "--rdzv-id=$JOB_ID" "--rdzv-endpoint=$(first "$HOST_NAMES")" pretrain_gpt.py'
    assert command_line(port(launch), "run.yaml") == f"{said} --config run.yaml"


def test_scripts_that_source_other_scripts(tmp_path: Path) -> None:
    (tmp_path / "flags.sh").write_text('FLAGS=" --num-layers ${LAYERS} \\\n --bf16 "')
    (tmp_path / "start.sh").write_text("#!/bin/bash\nsrun python pretrain_gpt.py ${FLAGS}\n")
    (tmp_path / "run.sh").write_text(
        "LAYERS=7\n. `pwd`/flags.sh\nsbatch --nodes=2 --ntasks-per-node=8 start.sh\nexit 0\n"
    )
    (launch,) = read_launches(tmp_path / "run.sh", {})
    assert (launch.words, launch.ranks) == (["--num-layers", "7", "--bf16"], 16)


def test_example_script(capsys: Captured, tmp_path: Path) -> None:
    """Config and flags agree, and Megatron-LM's differing defaults are written out."""
    output = tmp_path / "run.yaml"
    assert main(["port", str(EXAMPLE), "--set", "1=ckpt", "--set", "DATA_PATH=d", "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --config" in said
    for line in (
        "--use-mcore-models: there is one implementation of the model",
        "--no-gradient-accumulation-fusion: kernels and fusions",
        "hidden_dropout 0.1 is Megatron-LM's default",
        "fresh_if_missing True is Megatron-LM's default",
    ):
        assert line in said
    assert "no value yet" not in said
    ported = parse_arguments(["--config", str(output)]).config
    assert (ported.parallel.tp, ported.parallel.sequence_parallel, ported.training.global_batch_size) == (2, True, 32)
    assert (ported.checkpoint.save, ported.data.data_path, ported.model.hidden_dropout) == ("ckpt", ["d"], 0.1)


def test_variables_without_a_value_are_kept(capsys: Captured) -> None:
    assert main(["port", str(EXAMPLE)]) == 0
    said = capsys.readouterr().out
    assert '--save "${CHECKPOINTS}"' in said
    assert said.rstrip().endswith("# has no value yet (--set NAME=VALUE)\n#   ${CHECKPOINTS}")


CASE = {
    "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1},
    "TEST_TYPE": "ckpt-resume",
    "MODEL_ARGS": {
        "--num-layers": 12,
        "--hidden-size": 512,
        "--num-attention-heads": 8,
        "--log-params-norm": True,
        "--log-num-zeros-in-grad": True,
        "--log-timers-to-tensorboard": True,
        "--tensorboard-dir": "${TENSORBOARD_PATH}",
        "--micro-batch-size": 4,
        "--global-batch-size": 32,
        "--seq-length": 1024,
        "--max-position-embeddings": 1024,
        "--train-iters": 50,
        "--timing-log-level": 0,
        "--lr-decay-iters": 320000,
        "--save": "${CHECKPOINT_SAVE_PATH}",
        "--load": "${CHECKPOINT_LOAD_PATH}",
        "--data-path": "${DATA_PATH}/my-gpt3_00_text_document",
        "--vocab-file": "${DATA_PATH}/bpe/vocab.json",
        "--merge-file": "${DATA_PATH}/bpe/merges.txt",
        "--split": "949,50,1",
        "--lr": 0.00015,
        "--lr-warmup-fraction": ".01",
        "--eval-interval": 1000,
        "--eval-iters": 10,
        "--transformer-impl": "transformer_engine",
        "--pipeline-model-parallel-size": 4,
        "--num-layers-per-virtual-pipeline-stage": 1,
        "--decoupled-lr": 0.0002,
        "--deterministic-mode": True,
        "--no-rope-fusion": False,
        "--use-checkpoint-opt_param-scheduler": True,
        "--ckpt-format": "torch_dist",
        "--bf16": True,
        "--window-size": "(127,0)",
        "--hierarchical-context-parallel-sizes": "[2 2]",
    },
}


def test_megatron_test_case_dry_runs(capsys: Captured, tmp_path: Path) -> None:
    """The case passes unchanged, although its files are missing, and as ported."""
    case, ported = tmp_path / "model_config.yaml", tmp_path / "run.yaml"
    case.write_text(yaml.safe_dump(CASE))
    (launch,) = read_launches(case, {})
    sizes = launch.words.index("--hierarchical-context-parallel-sizes")
    assert launch.words[sizes + 1 : sizes + 3] == ["2", "2"] and "(127,0)" in launch.words
    assert "--no-rope-fusion" not in launch.words and "--deterministic-mode" in launch.words
    assert main(["train", *launch.words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "is missing: a vocabulary of 50257 is assumed" in said.err
    assert "already so: --log-timers-to-tensorboard --transformer-impl; no effect here: --ckpt-format" in said.err
    assert main(["port", str(case), "--output", str(ported)]) == 0
    assert main(["train", "--config", str(ported), "--dry-run"]) == 0
    config = parse_arguments(["--config", str(ported)]).config
    assert (config.parallel.vpp, config.model.sliding_window, config.optimizer.decoupled_lr) == (3, 128, 0.0002)


def test_ranks_per_node_are_those_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#SBATCH --nodes=3 --ntasks-per-node=4\nsrun python pretrain_gpt.py --tp 2\n")
    (launch,) = read_launches(tmp_path / "run.sh", {})
    assert command_line(port(launch), "run.yaml").startswith("torchrun --nproc-per-node 4 --nnodes 3 ")


def test_missing_value_names_its_cause(capsys: Captured, tmp_path: Path) -> None:
    script = "MODEL=$1\ncase $MODEL in 7b) L=32;; 70b) L=80; O=--bf16;; esac\npretrain_gpt.py --num-layers $L $O --mock-data\n"
    (tmp_path / "run.sh").write_text(script)
    assert main(["port", str(tmp_path / "run.sh")]) == 2
    said = "$L has no value; give it by --set MODEL=VALUE, by which the script chooses it, or --set NAME=VALUE"
    assert said in capsys.readouterr().err
    (launch,) = read_launches(tmp_path / "run.sh", {"1": "7b"})
    assert launch.words == ["--num-layers", "32", "--mock-data"]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_data_has_the_default_batches_of_megatron(split: str) -> None:
    found = port(Launch(f"--train-data-path a --{split}-data-path b --vocab-size 64 --train-iters 9".split()))
    assert (found.problems, found.config.training.eval_iters) == ([], 100)


def test_flags_of_megatron_forks() -> None:
    """DeepSpeed's flags, and those that a launcher passes on."""
    words = (
        "--mock-data --vocab-size 64 --normalization rmsnorm --num-key-value-heads 2 --zero-stage 1 --deepspeed "
        "--deepspeed_config ds.json --activations-checkpoint-method uniform --eval-interval 5 --eval-iters -1 "
        "--save_interval 5 --rank ${RANK} --world-size=8 --num-experts 4 --moe-expert-capacity-factor 1"
    )
    found = port(Launch(words.split()))
    assert found.problems == []
    training, model = found.config.training, found.config.model
    assert (training.recompute_granularity, training.recompute_method, training.eval_iters) == ("full", "uniform", 0)
    assert (model.normalization, model.num_query_groups) == ("RMSNorm", 2)
    assert (found.config.parallel.dp_strategy, found.config.checkpoint.save_interval) == ("distributed-optimizer", None)
    said = dict(remarks(found))
    dropped = "\n".join(said["dropped, no effect here"])
    assert (
        "--save-interval: nothing is saved" in dropped
        and "--rank --world-size: ranks come from the launcher" in dropped
    )
    assert any("DeepSpeed's file is not read" in line for line in said["differs"])
    assert any("expert capacity applies to each sequence" in line for line in said["differs"])


def test_lists_in_megatron_yaml(tmp_path: Path) -> None:
    case = tmp_path / "model_config.yaml"
    case.write_text('MODEL_ARGS: {--a: "[2 2]", --b: 2 2, --c: "a b", --d: [3, 4]}')
    (launch,) = read_launches(case, {})
    assert launch.words == ["--a", "2", "2", "--b", "2", "2", "--c", "a b", "--d", "3", "4"]


def test_one_error_names_all_unsupported_settings(capsys: Captured, tmp_path: Path) -> None:
    case = tmp_path / "model_config.yaml"
    refused = {
        "--qk-l2-norm": True,
        "--init-method-xavier-uniform": True,
        "--seed": "${SEED}",
        "--train-iters": "$(steps)",
        "--dsa-indexer-skip-topk-offset": 3,
    }
    case.write_text(yaml.safe_dump({"MODEL_ARGS": {**CASE["MODEL_ARGS"], **refused}}))  # type: ignore[dict-item]
    assert main(["port", str(case)]) == 2
    said = capsys.readouterr()
    assert "--num-layers 12" in said.out and "--qk-l2-norm" not in said.out
    for part in (
        "there are 6 problems",
        "--qk-l2-norm is refused",
        "--init-method-xavier-uniform is refused",
        "${SEED} has no value; give it by --set NAME=VALUE",
        "$(steps) has no value; replace it in the script by its output",
    ):
        assert part in said.err
    assert main(["port", str(case), "--set", "SEED=7"]) == 2
    assert "SEED" not in capsys.readouterr().err


def test_too_few_ranks_are_reported(tmp_path: Path) -> None:
    """The script's default of one node with 8 ranks is too small for its experts and stages."""
    words = [
        *("--num-layers", "8", "--pp", "4", "--num-experts", "8", "--ep", "8"),
        *("--vocab-size", "64", "--disable-bias-linear", "--mock-data"),
    ]
    found = port(Launch(words, ranks=8))
    assert found.problems == []
    assert port(Launch(words), world_size=8).problems != []


def test_experts_without_biases_are_reported() -> None:
    words = ["--num-layers", "2", "--num-experts", "8", "--vocab-size", "64", "--mock-data"]
    for more, said in (((), True), (("--disable-bias-linear",), False), (("--moe-add-bias-linear",), False)):
        differs = dict(remarks(port(Launch([*words, *more]))))["differs"]
        assert any(line.startswith("experts have no biases") for line in differs) is said


def test_latent_attention_without_rope_is_reported() -> None:
    words = ["--num-layers", "2", "--multi-latent-attention", "--vocab-size", "64", "--mock-data"]
    for more, said in (((), True), (("--position-embedding-type", "rope"), False)):
        differs = dict(remarks(port(Launch([*words, *more]))))["differs"]
        assert any(line.startswith("multi-latent attention has no RoPE") for line in differs) is said


@pytest.mark.parametrize(
    ("flags", "sequences"), [("", 4), ("aux_loss", 4), ("seq_aux_loss", 1), ("none", 1), ("aux_loss --tp 2", 4)]
)
def test_load_balancing_is_per_microbatch(flags: str, sequences: int) -> None:
    words = (
        f"--num-experts 8 --moe-aux-loss-coeff {0.0 if flags == 'none' else 0.1} --micro-batch-size 4 --vocab-size 64"
    )
    more = f"--moe-router-load-balancing-type {flags}".split() if flags else []
    found = port(Launch([*words.split(), "--mock-data", *more]))
    assert found.problems == [] and found.config.training.moe_aux_loss_sequences == sequences


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "echo pretrain_gpt.py --tp 2\n", "has no command that runs pretrain_gpt.py"),
        ("run.yaml", "a: 1\n", "has no MODEL_ARGS of flags"),
        ("run.sh", "A=(1\n", "an array is not closed"),
    ],
)
def test_files_without_a_launch_are_errors(
    name: str, text: str, message: str, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["port", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert main(["port", str(EXAMPLE), "--set", "x"]) == 2
    assert "--set takes NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "offset"),
    [
        ("--lr-decay-style constant", "step-end"),
        ("--lr-decay-style constant --lr-warmup-iters 5", "megatron"),
        ("", "megatron"),  # linear, without a warm-up: Megatron-LM's first step is at the peak
        (
            "--lr-decay-style constant --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
            "megatron",
        ),
    ],
)
def test_schedules_equal_megatron(flags: str, offset: str) -> None:
    words = f"--mock-data --vocab-size 64 --train-iters 30 {flags}".split()
    assert port(Launch(words)).config.optimizer.lr_schedule_offset == offset
