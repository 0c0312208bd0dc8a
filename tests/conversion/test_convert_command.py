"""`megalite convert` for users: outputs, messages, refusals and exit statuses."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.cli import convert
from megalite.cli.display import ByteProgress
from megalite.conversion.huggingface.weights import HuggingFaceWeights
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights
from megalite.conversion.output import workplace_of
from tests.conversion.samples import GPT, LLAMA, MadeUp, byte_tokenizer, contents, run, train
from tests.conversion.test_verify import Changed, flipped

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    weights = MadeUp(tmp_path, GPT, tokenizer_files=byte_tokenizer(tmp_path / "data"))
    return write_native(weights, tmp_path / "gpt")


def test_round_trip_through_all_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = train(tmp_path / "trained", 4, {**LLAMA, "tp": 2, "pp": 2, "precision": "bf16"})
    route = [
        ("trained", "a", "--to", "huggingface", "--max-shard-size", "40KB"),
        ("a", "b", "--to", "megatron", "--tp", "2", "--pp", "2"),
        ("b", "c", "--to", "native"),
        ("c", "d", "--to", "native", "--dtype", "bf16"),
    ]
    said = []
    for source, target, *flags in route:
        assert run(tmp_path / source, tmp_path / target, *flags) == 0, capsys.readouterr()
        said.append(capsys.readouterr().out)
    for name, values in tensors["main_param"].items():
        full, rounded = (open_weights(tmp_path / step).read(name) for step in ("c", "d"))
        vocab = 301 if name in ("embedding.word.weight", "head.weight") else None
        np.testing.assert_array_equal(full[:vocab].double().numpy(), values[:vocab], err_msg=name)
        assert torch.equal(rounded, full.to(torch.bfloat16)), name
    assert "fp32, written by tp 2, pp 2" in said[0]
    assert len(list((tmp_path / "a").glob("model-*-of-*.safetensors"))) > 3
    assert "verify   weights: bit-equal\n" in said[0] and "transformers" in said[0]
    assert all("verify   passed" in text for text in said)
    assert "15 tensors changed by rounding" in said[3]


USELESS = [
    ("native", ["--tp", "2"], "--tp has no effect with --to native; remove it, or use --to megatron"),
    ("huggingface", ["--pp", "1"], "--pp has no effect with --to huggingface"),
    ("native", ["--transformer-impl", "local"], "--transformer-impl has no effect with --to native"),
    ("megatron", ["--family", "llama"], "--family has no effect with --to megatron"),
    ("megatron", ["--max-shard-size", "1GB"], "use --to native or --to huggingface"),
    ("huggingface", ["--make-vocab-size-divisible-by", "8"], "--make-vocab-size-divisible-by has no effect"),
    ("megatron", ["--without-tokenizer"], "--without-tokenizer has no effect with --to megatron"),
    ("native", ["--make-vocab-size-divisible-by", "0"], "takes a whole number of at least 1, such as 4, got 0"),
    ("native", ["--max-shard-size", "many"], "takes a size with its unit such as 500MB or 4GiB, got many"),
    ("native", ["--step", "-1"], "no checkpoint of step -1; it has steps 0"),
    ("native", ["--step", "4"], "no checkpoint of step 4; it has steps 0"),
    ("native", ["--from", "huggingface"], "has no config.json"),
    ("native", ["--tokenizer-model", "nowhere"], "there is no tokenizer nowhere"),
    ("huggingface", ["--family", "llama"], "llama"),
]


@pytest.mark.parametrize(("to", "flags", "says"), USELESS, ids=lambda value: str(value)[:40])
def test_invalid_arguments_are_one_line_and_status_2(
    gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, flags: list[str], says: str
) -> None:
    assert run(gpt, tmp_path / "target", "--to", to, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert says in error
    assert not (tmp_path / "target").exists() and not workplace_of(tmp_path / "target").exists()


def test_ctrl_c_keeps_finished_files(
    gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = ByteProgress.advance

    def interrupted(progress: ByteProgress, count: int) -> None:
        advance(progress, count)
        if progress.done > 60_000:
            raise KeyboardInterrupt

    words = ["--to", "huggingface", "--max-shard-size", "20KB"]
    assert run(gpt, tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ByteProgress, "advance", interrupted)
        assert run(gpt, tmp_path / "target", *words) == 130
    kept_in = workplace_of(tmp_path / "target")
    said = f"interrupted; finished files are in {kept_in}: run the same command to continue, or remove the folder"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
    kept = {path.name: path.stat().st_ino for path in workplace_of(tmp_path / "target").rglob("*.safetensors")}
    assert run(gpt, tmp_path / "target", *words) == 0
    assert f"continues: {len(kept) - 1} of " in capsys.readouterr().out, "one file is incomplete"
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")
    same = [name for name, inode in kept.items() if (tmp_path / "target" / name).stat().st_ino == inode]
    assert len(same) >= 2


def test_error_names_checkpoints_one_level_below(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    gpt.rename(tmp_path / "run" / "checkpoints")
    assert run(tmp_path / "run", tmp_path / "target", "--to", "native") == 2
    assert f"but in {tmp_path / 'run' / 'checkpoints'}: give that folder" in capsys.readouterr().err


def test_target_and_family_are_checked_before_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    for target, flags, says in [
        (tmp_path / "file" / "deep", [], "Not a directory; give another target"),
        (tmp_path / "new", ["--family", "bert"], "bert"),
        (tmp_path / "new", ["--family", ""], "'' is not a supported family; use gpt2, llama"),
        (tmp_path / ("n" * 256), [], "File name too long; give a shorter path"),
        (Path("/"), [], "the target / already exists"),
    ]:
        assert run(tmp_path / "nowhere", target, "--to", "huggingface", *flags) == 2
        said = capsys.readouterr()
        assert says in said.err and "opening" not in said.out


def test_failed_verification_is_status_1(
    gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "layers.1.mlp.up.weight"

    def wrong(weights: Any, *arguments: Any, **named: Any) -> Path:
        return write_native(Changed(weights, name, flipped), *arguments, **named)

    monkeypatch.setattr(convert, "write_native", wrong)
    assert run(gpt, tmp_path / "target", "--to", "native") == 1
    said = capsys.readouterr()
    assert f"verify   weights: {name} differs by up to" in said.out and "FAILED" in said.out
    left = f"the target remains at {tmp_path / 'target'}; do not use it"
    assert said.err.splitlines()[-1].endswith(left)
    assert run(gpt, tmp_path / "unseen", "--to", "native", "--no-verify") == 0
    assert "verify" not in capsys.readouterr().out


def test_missing_disk_space_is_an_error_at_the_start(
    gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "free_bytes", lambda folder: 5000)
    assert run(gpt, tmp_path / "target", "--to", "native") == 2
    error = capsys.readouterr().err
    assert "more bytes, but 5,000 are free" in error
    assert not workplace_of(tmp_path / "target").exists()


def test_script_equals_the_command(gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(gpt), str(tmp_path / "target"), "--to", "huggingface", "--no-verify"]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *words])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
    assert HuggingFaceWeights(tmp_path / "target").family.name == "gpt2"


def test_tokenizer_is_given_by_a_flag(gpt: Path, tmp_path: Path) -> None:
    assert run(gpt, tmp_path / "without", "--to", "native", "--without-tokenizer", "--no-verify") == 0
    words = ["--to", "huggingface", "--no-verify", "--tokenizer-model", tmp_path / "data"]
    assert run(tmp_path / "without", tmp_path / "with", *words) == 0
    assert (tmp_path / "with" / "merges.txt").is_file()
