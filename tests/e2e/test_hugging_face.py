"""From one Hugging Face folder to another: train, kill, resume and export, on any layout."""

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.model_commands import CONVERT
from megalite.cli.train import main
from megalite.config.errors import BAD_INPUT, DONE, NOT_SAVED, REQUEUE
from megalite.conversion.huggingface import weights
from tests.conversion.samples import contents
from tests.e2e.forked import fork_rank, train_forked
from tests.e2e.programs import TRAINING, Corpus, losses

pytestmark = pytest.mark.e2e

LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def llama(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it, with a SentencePiece tokenizer as Llama 2 has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **LLAMA)).save_pretrained(folder)
    shutil.copy(corpus.tokenizer, folder / "tokenizer.model")
    return folder


@pytest.fixture
def flags(corpus: Corpus, llama: Path, folder: Path) -> list[str]:
    """Flags of a run of six steps in `folder`; model and tokenizer come from the Hugging Face folder."""
    data = ("--data-path", str(corpus.prefix), "--split", "90,10,0", "--device", "cpu")
    out = ("--run-dir", str(folder), "--export-hf", str(folder.parent / "out"))
    return [*TRAINING, *data, "--load", f"hf:{llama}", *out, "--train-iters", "6"]


def convert_of(folder: Path, step: int, target: Path) -> dict[str, bytes]:
    words = [str(folder / "checkpoints"), str(target), "--to", "huggingface", "--step", str(step), "--no-verify"]
    assert CONVERT(words) == 0
    return contents(target)


def test_resume_on_another_layout_exports_the_same_folders(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """The second start resumes from the checkpoint; losses and folders equal those of an uninterrupted run."""
    more = ("--save-hf-interval", "2", "--keep-latest", "1", "--attention-dropout", "0.1")
    first = train_forked(2, *flags, *more, "--tp", "2", "--exit-interval", "4").require_success()
    assert "loaded the weights of" in first.out and not (tmp_path / "out").exists()
    second = train_forked(2, *flags, *more, "--pp", "2").require_success()
    assert (
        f"{folder}/checkpoints holds checkpoints: the run resumes from the newest of them, not from hf:" in second.out
    )
    assert "step-0000004 (written by tp 2" in second.out and "loaded the weights" not in second.out
    names = sorted(path.name for path in tmp_path.glob("out*"))
    assert names == ["out", "out-step-0000002", "out-step-0000004"]
    assert contents(tmp_path / "out") == convert_of(folder, 6, tmp_path / "converted")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    again = [word.replace(str(folder), str(tmp_path / "whole")) for word in flags]
    again[again.index("--export-hf") + 1] = str(tmp_path / "other")
    train_forked(1, *again, *more, "--tp", "1").require_success()
    pairs = zip(losses(folder), losses(tmp_path / "whole"), strict=True)
    assert all(ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], rel=1e-5) for ours, theirs in pairs)


def test_export_with_bf16_and_async_save_holds_main_parameters(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """The folders hold the main parameters, as a conversion does."""
    more = ("--bf16", "--async-save", "--save-hf-interval", "3", "--dp-strategy", "distributed-optimizer")
    train_forked(2, *flags, *more).require_success()
    for name, step in (("out", 6), ("out-step-0000003", 3)):
        assert contents(tmp_path / name) == convert_of(folder, step, tmp_path / f"converted-{step}")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


@contextlib.contextmanager
def exporting_with(work: Any) -> Iterator[None]:
    """Replace the export function by `work`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "export_checkpoint", work)
        yield


def test_failed_export_is_repeated_by_the_same_command(
    flags: list[str], folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: Any) -> Path:
        raise OSError(28, "No space left on device")

    with exporting_with(fail):
        assert main([*flags, "--save-hf-interval", "3"]) == NOT_SAVED
    out = capfd.readouterr().out
    by_hand = f"megalite convert {folder}/checkpoints {tmp_path}/out{{}} --to huggingface --step {{}} makes it"
    assert "No space left on device; training continues. " + by_hand.format("-step-0000003", 3) in out
    assert "error: cannot export: [Errno 28] No space left on device; " + by_hand.format("", 6) in out
    ending = json.loads((folder / "exit.json").read_text())
    assert (ending["status"], ending["step"], ending["exit_code"]) == ("finished", 6, NOT_SAVED)
    assert not list(tmp_path.glob("out*"))
    assert main(flags) == DONE, "the same command writes the missing export"
    assert contents(tmp_path / "out") == convert_of(folder, 6, tmp_path / "converted")
    assert main(flags) == DONE and "/out exists already" in capfd.readouterr().out


def test_checkpoint_is_kept_while_it_is_exported(
    flags: list[str], folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While an export is slow, the next one is skipped with a warning, and the exported checkpoint is not removed."""
    write, later = weights.export_checkpoint, threading.Event()

    def wait(checkpoints: Path, step: int, *words: Any) -> Path:
        if step == 2:
            assert later.wait(60)
            assert (checkpoints / "step-0000002").is_dir() and not (checkpoints / "step-0000004").exists()
        path: Path = write(checkpoints, step, *words)
        return path

    def say(line: str) -> None:
        if "saved" in line and "step-0000005" in line:
            later.set()

    with exporting_with(wait), pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.cli.train.RunLog.__call__", lambda log, line: (print(line), say(line)))
        assert main([*flags, "--save-hf-interval", "2", "--save-interval", "1", "--keep-latest", "1"]) == DONE
    assert "warning: step 2 is still being exported; megalite convert" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out-step-0000002"]


def test_stop_request_during_export_ends_the_run(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """The run ends at once with the requeue status; the next start exports the rest."""

    def ask(checkpoints: Path, step: int, target: Path, advance: Any, *words: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        advance(1)
        raise AssertionError("it was asked to stop")

    with exporting_with(ask):
        assert main(flags) == REQUEUE
    assert json.loads((folder / "exit.json").read_text())["status"] == "requeue"
    assert main(flags) == DONE and (tmp_path / "out" / "config.json").exists()


def _dies_exporting() -> None:
    def die(*words: Any) -> Path:
        os._exit(9)

    weights.export_checkpoint = die


def test_killed_export_is_repeated_by_the_next_start(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """Also for an export during training: its checkpoint is exported by the next start."""
    words = [*flags, "--save-hf-interval", "5"]
    process = fork_rank(0, 1, None, words, tmp_path / "log", before=_dies_exporting)
    process.join(60)
    assert process.exitcode == 9
    assert main(words) == DONE
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out-step-0000005"]


def test_impossible_export_is_refused_before_training(
    flags: list[str], folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    assert main(flags) == BAD_INPUT
    assert "out exists and is not empty (a); give another target, or remove it" in capfd.readouterr().err
    model = "--activation squared_relu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 384"
    without = [*flags[: flags.index("--load")], *flags[flags.index("--load") + 2 :], *model.split()]
    for words in (without, [*without, "--dry-run"]):
        assert main(words) == BAD_INPUT
        assert "no Hugging Face family is this model" in capfd.readouterr().err
    assert not (folder / "checkpoints").exists() or not list((folder / "checkpoints").glob("step-*"))


def test_dry_run_of_hugging_face_folder_and_contradicting_settings(
    llama: Path, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--load", f"hf:{llama}", "--dry-run", "--json", "--tp", "2", "--world-size", "4"]) == DONE
    report = json.loads(capfd.readouterr().out)
    assert report["config"]["model"]["num_layers"] == 2 and report["config"]["data"]["tokenizer_model"] == str(llama)
    assert main([*flags, "--num-layers", "3"]) == BAD_INPUT
    assert f"num_layers is 3 by flag --num-layers, and 2 in hf:{llama}" in capfd.readouterr().err
