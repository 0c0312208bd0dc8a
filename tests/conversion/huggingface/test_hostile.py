"""Broken or malicious folders: each is refused with one line that names the file and the fault."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.conversion.huggingface.config_json import MAX_JSON
from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.weights import ConversionError, parameter_shapes
from tests.conversion.huggingface.models import edit_config
from tests.support.tiny import words

CONFIG: dict[str, Any] = words(
    "model_type=llama num_hidden_layers=2 hidden_size=8 num_attention_heads=2 num_key_value_heads=1 "
    "intermediate_size=6 vocab_size=11 max_position_embeddings=16 rope_theta=100.0"
)
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
Break = Callable[[Path], Any]


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (11, 8), "lm_head.weight": (11, 8), NORM: (8,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (8, 8) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (4, 8) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (6, 8) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (8, 6)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    every = tensors()
    first = {name: tensor for name, tensor in every.items() if "layers.1" not in name}
    second = {name: tensor for name, tensor in every.items() if name not in first}
    save_file(first, folder / ONE)
    save_file(second, folder / TWO)
    places = {name: ONE if name in first else TWO for name in every}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return folder


def test_valid_folder_is_read(tmp_path: Path) -> None:
    weights = HuggingFaceWeights(make(tmp_path / "model"))
    assert torch.equal(weights.read("final_norm.weight"), tensors()[NORM])
    assert {weights.dtype(name) for name in parameter_shapes(weights.model)} == {torch.float32}


def config(**changes: Any) -> Break:
    return lambda folder: edit_config(folder, **changes)


def text(name: str, content: str | bytes) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def place(name: str, file: Any) -> Break:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def tensor(file: str, name: str, value: torch.Tensor | None) -> Break:
    def change(folder: Path) -> None:
        found = load_file(folder / file)
        found.pop(name, None)
        if value is not None:
            found[name] = value
        (folder / file).unlink()
        save_file(found, folder / file)

    return change


def both(*breaks: Break) -> Break:
    def change(folder: Path) -> None:
        for each in breaks:
            each(folder)

    return change


def remove(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def link(name: str, target: str) -> Break:
    """Move the file to `target` (relative to the folder) and put a link in its place."""

    def change(folder: Path) -> None:
        destination = Path(os.path.normpath(folder / target))
        destination.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(destination)
        (folder / name).symlink_to(target)

    return change


def loop(folder: Path) -> None:
    (folder / ONE).unlink()
    (folder / ONE).symlink_to(ONE)


def pickled(folder: Path) -> None:
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    # Unpickling this would write a file into the working directory.
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def huge_header(folder: Path) -> None:
    (folder / ONE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def lying_header(folder: Path) -> None:
    header = json.dumps({NORM: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (folder / ONE).write_bytes(len(header).to_bytes(8, "little") + header)


def cut(folder: Path) -> None:
    os.truncate(folder / ONE, (folder / ONE).stat().st_size - 4)


def large(folder: Path) -> None:
    os.truncate(folder / "config.json", MAX_JSON + 1)


FP8 = config(quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]})
UP, EIGHT = "model.layers.1.mlp.up_proj.weight", torch.ones(6, 8).to(torch.float8_e4m3fn)

HOSTILE: dict[str, tuple[Break, str]] = {
    # The configuration.
    "no config": (remove("config.json"), "has no config.json"),
    "not JSON": (text("config.json", "{"), r"config\.json: not JSON"),
    "not an object": (text("config.json", "[]"), r"config\.json: not a JSON object"),
    "deep": (text("config.json", '{"a":' * 100_000), r"config\.json: not JSON"),
    "huge number": (text("config.json", '{"a": ' + "9" * 5000 + "}"), r"config\.json: not JSON: Exceeds the limit"),
    "endless": (large, "more than 268435456 are not read"),
    "a folder": (both(remove("config.json"), lambda f: (f / "config.json").mkdir()), "not a plain file"),
    "a pipe": (both(remove("config.json"), lambda f: os.mkfifo(f / "config.json")), "not a plain file"),
    "unknown family": (config(model_type="falcon"), "model_type is 'falcon'; supported: gpt2, llama"),
    "no family": (config(model_type=...), "model_type is 'None'"),
    "auto_map": (config(auto_map={"AutoModelForCausalLM": "evil.Model"}), "auto_map names code"),
    "quantized": (
        config(quantization_config={"quant_method": "gptq"}),
        "quantization_config: supported: mxfp4, and fp8",
    ),
    "quantized without blocks": (config(quantization_config={"quant_method": "fp8"}), "weight_block_size is 'None'"),
    "no size": (config(hidden_size=...), "hidden_size is missing"),
    "text for a size": (config(hidden_size="8"), "hidden_size is '8'; it must be a whole number"),
    "absurd layers": (config(num_hidden_layers=10**9), "num_hidden_layers is '1000000000'; .* to 65536"),
    "too many layers": (config(num_hidden_layers=6_000), "has 6000 layers, the files have 21 tensors"),
    "absurd width": (config(hidden_size=2**24 - 8), r"embed_tokens\.weight is \[11, 8\]; config\.json requires"),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps is 'nan'; it must be a number"),
    "flag of text": (config(tie_word_embeddings="no"), "tie_word_embeddings is 'no'; it must be true or false"),
    "token of text": (config(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    # The index.
    "index leads out": (place(NORM, "../x.safetensors"), r"'\.\./x\.safetensors' is not the name of a file"),
    "index names a pickle": (place(NORM, "pytorch_model.bin"), "'pytorch_model.bin', which is no safetensors"),
    "index with a number": (place(NORM, 1), "weight_map must map each tensor to the name"),
    "index names the other file": (place(NORM, TWO), f"{NORM} is in {TWO}; it is in {ONE}"),
    "index names what is nowhere": (place("model.ghost", ONE), f"model.ghost is in {ONE}; it is in no file"),
    "missing file": (remove(TWO), f"{TWO}, which {INDEX} names, is missing"),
    # The tensors.
    "nothing": (remove(ONE, TWO, INDEX), r"has no model\.safetensors and no model\.safetensors\.index\.json"),
    "pickle alone": (pickled, "pytorch_model.bin, a pickle, which can run code; save it as safetensors"),
    "adapter": (both(remove(ONE, TWO, INDEX), text("adapter_config.json", "{}")), "contains an adapter, not a model"),
    "not indexed": (tensor(TWO, "model.extra", torch.ones(2)), f"contains model.extra, which {INDEX} does not"),
    "twice": (tensor(TWO, NORM, torch.ones(8)), f"{NORM} is in {ONE} and in {TWO}"),
    "missing": (
        both(remove(TWO, INDEX), lambda f: (f / ONE).rename(f / "model.safetensors")),
        r"model\.layers\.1\.input_layernorm\.weight is missing, which its config",
    ),
    "unknown": (
        both(tensor(ONE, "model.extra", torch.ones(2)), place("model.extra", ONE)),
        r"llama has no model\.extra",
    ),
    "shape": (tensor(ONE, NORM, torch.ones(9)), r"model\.norm\.weight is \[9\]; config.json requires \[8\]"),
    "whole numbers": (tensor(ONE, NORM, torch.ones(8, dtype=torch.int64)), "is I64; weights must be BF16, F16"),
    "eight bits": (tensor(ONE, NORM, torch.ones(8).to(torch.float8_e4m3fn)), "is F8_E4M3 and config.json has no quant"),
    "no scales": (both(FP8, tensor(TWO, UP, EIGHT)), f"{UP} is F8_E4M3, and {UP}_scale_inv is missing"),
    "scales of another block": (
        both(
            FP8, tensor(TWO, UP, EIGHT), tensor(TWO, f"{UP}_scale_inv", torch.ones(3, 2)), place(f"{UP}_scale_inv", TWO)
        ),
        r"has scales F32 \[3, 2\]; with blocks of \[4, 4\] they must be F32 or BF16 \[2, 2\]",
    ),
    "a vector in eight bits": (
        both(
            FP8,
            tensor(ONE, NORM, torch.ones(8).to(torch.float8_e4m3fn)),
            tensor(ONE, f"{NORM}_scale_inv", torch.ones(2)),
            place(f"{NORM}_scale_inv", ONE),
        ),
        r"is F8_E4M3 of shape \[8\]; only matrices",
    ),
    "truncated": (cut, f"{ONE}: its tensors take"),
    "huge header": (huge_header, f"{ONE}: declares a header of"),
    "a petabyte": (lying_header, f"{ONE}: its tensors take 4398046511104 bytes"),
    "empty file": (text(ONE, ""), f"{ONE}: 0 bytes are too few"),
    # Links.
    "weights elsewhere": (link(ONE, "../elsewhere/one.safetensors"), f"{ONE} is a link to .*elsewhere"),
    "no blobs outside a cache": (link(ONE, "../../blobs/one"), "is a link to .*outside of the folder"),
    "link to nowhere": (both(remove(ONE), lambda f: (f / ONE).symlink_to("gone")), f"{ONE}: broken link"),
    "link to itself": (loop, "broken link"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_folder_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_, message = HOSTILE[name]
    folder = make(tmp_path / "a" / "model")
    monkeypatch.chdir(tmp_path)
    break_(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConversionError, match=message) as caught:
        HuggingFaceWeights(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_hugging_face_cache_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "models--a--b" / "snapshots" / "0123abcd")
    for i, name in enumerate((ONE, TWO, INDEX, "config.json")):
        link(name, f"../../blobs/{i}")(folder)
    assert torch.equal(HuggingFaceWeights(folder).read("final_norm.weight"), tensors()[NORM])
    outside = tmp_path / "secret"
    (tmp_path / "models--a--b" / "blobs" / "0").rename(outside)
    (tmp_path / "models--a--b" / "blobs" / "0").symlink_to(outside)
    with pytest.raises(ConversionError, match=r"is a link to .*secret, outside of the folder"):
        HuggingFaceWeights(folder)


def test_links_within_the_folder_are_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    link(ONE, "parts/one.safetensors")(folder)
    assert torch.equal(HuggingFaceWeights(folder).read("final_norm.weight"), tensors()[NORM])
    (tmp_path / "name").symlink_to(folder)
    HuggingFaceWeights(tmp_path / "name")


def test_file_truncated_while_open_is_an_error(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    weights = HuggingFaceWeights(folder)
    os.truncate(folder / ONE, 600)
    with pytest.raises(ConversionError, match=ONE):
        for name in parameter_shapes(weights.model):
            weights.read(name)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil.T", null]}}', "auto_map names code"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: not a JSON object"),
        ("generation_config.json", '{"trust_remote_code": true}', "trust_remote_code names code"),
        ("tokenizer.json", "{}", "it has no model.vocab"),
        ("tokenizer.json", '{"model": {"vocab": 7}}', "it has no model.vocab"),
        ("tokenizer.model", "not one", "not a SentencePiece model"),
        ("tokenizer.model", "", "it has no pieces"),
        ("vocab.json", '{"a": 0}', "vocab.json are not a tokenizer; give a tokenizer.json"),
    ],
)
def test_bad_tokenizer_files_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / name).write_text(content)
    weights = HuggingFaceWeights(folder)
    with pytest.raises(ConversionError, match=message):
        write_huggingface(weights, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_tokenizer_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(ConversionError, match=r"tokenizer\.json is a link to /etc/hostname"):
        HuggingFaceWeights(folder)
