"""`megalite inspect`: what it reports on checkpoints and on other folders."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.cli.inspect import DAMAGED, DIFFERENT, OK
from megalite.config.describe import replace, sectioned, values_of
from megalite.config.files import load as load_config
from megalite.config.run import RunConfig
from tests.checkpoint.inspecting import WEIGHTS, Captured, Tensors, flip_last_bit, inspect, refused, said, save_tensors
from tests.checkpoint.samples import edit_manifest
from tests.support.tiny import LLAMA, tiny_config


def test_report_of_a_checkpoint(real: Path, capsys: Captured) -> None:
    assert inspect(real / "step-0000002") == OK
    text = said(capsys)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert f"checkpoint {real / 'step-0000002'}" in lines
    assert any(
        line.startswith("step 2, by megalite ")
        and ", files of 2" in line
        and f"torch {torch.__version__}" in line
        and ", kernels torch" in line
        for line in lines
    )
    assert any(line.startswith("layout tp 1, pp 1, dp 1, cp 1, ep 1") for line in lines)
    assert "counters consumed_samples 16, loss_scaler {}, optimizer_updates 2, step 2" in lines
    assert f"tokenizer sha256 {'ab' * 32}" in lines
    assert "weights 27 tensors, 37,152 elements, 72.56 KiB" in lines
    assert "layers.{0..3}.attention.qkv.weight [64, 32] BF16 x4" in lines
    assert "embedding.word.weight [96, 32] BF16" in lines
    assert "exp_avg_sq 27 tensors F32 145.12 KiB" in lines
    assert any(line.startswith("model num_layers 4, hidden_size 32, num_attention_heads 8") for line in lines)
    assert "sequence_parallel" not in text, "it has its default"
    size = sum(path.stat().st_size for path in (real / "step-0000002").glob("*.safetensors"))
    assert f"verified 2 files, {size / 1024:.2f} KiB: sha256 OK" in lines


def test_report_folds_similar_tensors(tmp_path: Path, capsys: Captured) -> None:
    """Gaps in numbers, rows for other shapes and dtypes, tensors in parts, many files."""
    tensors: Tensors = {("weight", "", f"layers.{n}.w2.weight"): torch.ones(20, 4) for n in (0, 1, 2, 5, 9, 10, 11)}
    tensors["weight", "", "layers.3.w2.weight"] = torch.ones(20, 6)
    tensors["weight", "", "layers.4.w2.weight"] = torch.ones(20, 4).half()
    tensors["weight", "", "layers.7.experts.0.weight"] = torch.ones(40)
    tensors["weight", "", "layers.8.experts.1.weight"] = torch.ones(40)
    path = save_tensors(tmp_path, tensors, ranks=20)
    (path / "model.pt").write_text("")
    assert inspect(path) == OK
    lines = [" ".join(line.split()) for line in said(capsys).splitlines()]
    assert "layers.{0..2,5,9..11}.w2.weight [20, 4] F32 x7 in 20 parts" in lines
    assert "layers.3.w2.weight [20, 6] F32 in 20 parts" in lines
    assert "layers.4.w2.weight [20, 4] F16 in 20 parts" in lines
    assert "layers.{7..8}.experts.{0..1}.weight [40] F32 x2 in 20 parts" in lines
    assert any(line.startswith("weights-{00000..00019}.safetensors x20, ") for line in lines)
    assert "optimizer none" in lines and "tokenizer none" in lines
    assert "other files model.pt (not read)" in lines


def test_listing_does_not_import_torch(real: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom megalite.cli.model_commands import INSPECT as main; sys.exit(main(['{real}']))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "sha256 OK" in done.stdout and done.stderr == ""


def test_table_of_several_checkpoints(folder: Path, capsys: Captured) -> None:
    assert inspect(folder) == OK
    table, rest = said(capsys).split("\n\n", 1)
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["step-0000002", "step-0000001"]
    assert table.splitlines()[1].endswith("verified") and table.splitlines()[2].endswith("complete")
    assert rest.startswith(f"checkpoint   {folder / 'step-0000002'}")
    flip_last_bit(folder / "step-0000002" / WEIGHTS)
    assert inspect(folder) == DAMAGED
    table, rest = said(capsys).split("\n\n", 1)
    assert f"damaged: {WEIGHTS}: sha256 is" in table.splitlines()[1]
    assert rest.startswith(f"checkpoint   {folder / 'step-0000001'}") and "sha256 OK" in rest
    last = rest.splitlines()[-1]
    assert last.startswith(f"step-0000002 is damaged: {WEIGHTS}: sha256 is"), "it must be visible"
    assert last.endswith("; shown is step-0000001")
    assert inspect(folder, "--tensors", "final_norm.*") == DAMAGED and said(capsys).endswith(f"{last}\n")
    assert inspect(folder, "--step", "1") == OK
    assert "checkpoint    files" not in said(capsys)
    assert inspect(folder, "--step", "2") == DAMAGED
    assert f"damaged:\n  {WEIGHTS}: sha256 is" in said(capsys)


def test_without_hashing_lengths_are_checked(folder: Path, capsys: Captured) -> None:
    newest = folder / "step-0000002"
    flip_last_bit(newest / WEIGHTS)
    assert inspect(newest, "--no-verify") == OK
    assert "with the right length; not hashed" in said(capsys)
    (newest / WEIGHTS).write_bytes(b"")
    assert inspect(newest, "--no-verify") == DAMAGED
    assert f"{WEIGHTS}: 0 bytes long, the manifest says" in said(capsys)
    (newest / WEIGHTS).unlink()
    (newest / "optimizer-00000.safetensors").unlink()
    assert inspect(newest) == DAMAGED
    text = said(capsys)
    assert f"{WEIGHTS}: No such file" in text and "optimizer-00000.safetensors: No such file" in text
    (newest / "manifest.json").unlink()
    assert inspect(newest) == DAMAGED
    assert "no manifest.json: not complete, or not a checkpoint" in said(capsys)


def test_manifest_with_valid_hashes_and_wrong_dtype_is_damaged(folder: Path, capsys: Captured) -> None:
    norm = "weight:final_norm.weight"
    edit_manifest(folder / "step-0000002", lambda body: body["tensors"][norm].update(dtype="F16"))
    assert inspect(folder / "step-0000002") == DAMAGED
    assert f"{WEIGHTS}: the manifest says final_norm.weight is F16 [32], the file has BF16 [32]" in said(capsys)


def test_json_output(real: Path, capsys: Captured) -> None:
    assert inspect(real, "--json", "--tensors", "final_norm.*") == OK
    data = json.loads(said(capsys))
    manifest = json.loads((real / "step-0000002" / "manifest.json").read_text())
    for field in ("step", "megalite_version", "code", "layout", "counters", "tokenizer", "config", "files"):
        assert data[field] == manifest[field]
    assert data["tensors"].keys() == manifest["tensors"].keys()
    assert data["tensors"]["weight:final_norm.weight"] == {"dtype": "BF16", "shape": [32], "parts": 1}
    assert (data["state"], data["faults"]) == ("verified", [])
    assert [item["step"] for item in data["checkpoints"]] == [2, 1]
    assert data["statistics"]["final_norm.weight"]["elements"] == 32


def test_config_is_written_as_yaml(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """The config of the training run, even if other files are damaged."""
    (folder / "step-0000002" / WEIGHTS).unlink()
    assert inspect(folder, "--config") == OK
    (tmp_path / "config.yaml").write_text(said(capsys))
    assert load_config(tmp_path / "config.yaml") == tiny_config(1, precision="bf16", **LLAMA)
    assert inspect(folder, "--config", "--json", "--step", "1") == OK
    assert json.loads(said(capsys))["model"]["num_layers"] == 4
    (folder / "step-0000002" / "manifest.json").write_text("{")
    assert "step-0000002 is damaged: manifest.json: not valid JSON" in refused(
        capsys, folder / "step-0000002", "--config"
    )


def test_config_can_start_another_run(tmp_path: Path, capsys: Captured) -> None:
    """Without settings that would lead it into the folders of the run that wrote the checkpoint."""
    own = {
        "save": "old/checkpoints\nlr: 1",
        "load": "older",
        "ckpt_step": 7,
        "fresh_if_missing": True,
        "finetune": True,
        "run_dir": "old",
        "tensorboard_dir": "old/events",
    }
    usual = {name: values_of(RunConfig())[name] for name in own}
    config = tiny_config(1, save_interval=5, keep_latest=2, tokenizer_model="tok.model", **own)
    path = save_tensors(tmp_path, {("weight", "", "w"): torch.ones(2)}, config=sectioned(config))
    assert inspect(path, "--config") == OK
    text = said(capsys)
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == replace(config, **usual)
    head, rest = text.split("\n", 1)
    assert head.startswith(f'# "{path}", without') and 'run_dir "old"' in head and "ckpt_step 7" in head
    assert "old" not in rest.replace("threshold", ""), rest
    assert inspect(path, "--config", "--json") == OK
    assert set(own).isdisjoint(name for values in json.loads(said(capsys)).values() for name in values)


def test_diff_ignores_paths_of_the_runs(tmp_path: Path, capsys: Captured) -> None:
    """They always differ between runs, so no two checkpoints would be equal."""
    sides = []
    for name in ("a", "b"):
        config: dict[str, dict[str, Any]] = {
            "checkpoint": {"save": name},
            "logging": {"run_dir": name},
            "data": {"tokenizer_model": f"{name}/tok.model", "split": "9,1,0"},
        }
        tensors: Tensors = {("weight", "", "w"): torch.ones(2)}
        sides.append(save_tensors(tmp_path / name, tensors, config=config))
    assert inspect("--diff", *sides) == OK
    lines = [" ".join(line.split()) for line in said(capsys).splitlines()]
    at = lines.index("paths and the like that differ and do not count (A | B):")
    assert "config.data.tokenizer_model a/tok.model | b/tok.model" in lines[at:]
    assert lines[-1] == "equal: 1 tensor, bit for bit, except fields that do not count"
    assert inspect("--diff", *sides, "--json") == OK
    data = json.loads(said(capsys))
    assert data["same"] and data["fields"] == {}
    assert data["fields_not_counted"]["config.logging.run_dir"] == ["a", "b"]
    config["data"]["split"] = "8,2,0"
    third = save_tensors(tmp_path / "c", tensors, config=config)
    assert inspect("--diff", sides[1], third) == DIFFERENT
    assert "config.data.split" in said(capsys)


def test_bad_input_is_one_error(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    newest = folder / "step-0000002"
    cases: Sequence[tuple[list[str | Path], str]] = [
        ([], "give one checkpoint to inspect, or two after --diff"),
        ([folder, "--diff", folder, folder], "give one checkpoint"),
        ([folder, "--config", "--tensors", "*"], "--tensors has no effect with --config"),
        ([folder, "--config", "--no-verify"], "--no-verify has no effect"),
        (["--diff", folder, folder, "--config"], "--diff has no effect"),
        ([tmp_path / "checkpoint"], f"does not exist; there is {folder}"),
        ([tmp_path], f"no checkpoint directly in {tmp_path}, but in {folder}"),
        ([newest / WEIGHTS], f"is a file; give its folder, {newest}"),
        ([newest / "manifest.json"], f"is a file; give its folder, {newest}"),
        ([folder / "latest"], "is a file; give a folder of checkpoints, or one of them"),
        ([folder / ".tmp-step-3"], "is an unfinished save"),
        ([folder, "--step", "7"], "has no checkpoint of step 7; it has steps 1, 2"),
        ([newest, "--step", "1"], "is the checkpoint of step 2, not of step 1"),
        ([folder, "--tensors", "qkv"], "; try '*qkv*'"),
        ([folder, "--tensors", "nothing*"], "has no tensor of such a name; it has "),
        ([folder, "--tensors", "nothing*"], "; try '*nothing*'"),
        ([tmp_path / "theirs"], "imported --to native"),
        (["--diff", folder, folder, "--tensors", "nothing*"], "neither checkpoint has a tensor of such a name"),
    ]
    (folder / ".tmp-step-3").mkdir()
    (tmp_path / "theirs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "theirs" / name).write_text("{}")
    for arguments, message in cases:
        assert message in refused(capsys, *arguments), arguments
