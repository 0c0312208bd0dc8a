"""Settings that a run takes from a Hugging Face folder, a checkpoint, or a moved converted checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from megalite.checkpoint.manifest import MANIFEST_NAME
from megalite.config.describe import settings
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.conversion.model_folder import configure, settings_in
from megalite.conversion.native import write_native
from tests.conversion.huggingface.models import edit_config, saved
from tests.conversion.samples import GPT, MadeUp, byte_tokenizer


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    saved("llama3", tmp_path / "llama")
    return tmp_path / "llama"


def parsed(flags: str) -> dict[str, object]:
    model = parse_arguments(flags.split(), shape=settings_in).config
    return vars(validate(model, 1).model) | {"seq_length": model.training.seq_length} | vars(model.data)


def test_settings_from_a_hugging_face_folder(llama: Path) -> None:
    found = parsed(f"--load hf:{llama}")
    assert (found["num_layers"], found["num_query_groups"], found["activation"]) == (3, 2, "swiglu")
    assert (found["seq_length"], found["vocab_size"], found["tokenizer_model"]) == (12, 37, None)
    byte_tokenizer(llama)
    assert parsed(f"--load hf:{llama}")["tokenizer_model"] == str(llama)
    assert parsed(f"--load hf:{llama} --tokenizer-type ByteLevelTokenizer")["tokenizer_model"] is None


def test_training_settings_stay_those_of_the_run(tmp_path: Path) -> None:
    """GPT-2's config.json has dropout, which is off unless the run sets it."""
    saved("gpt2", tmp_path / "gpt2")
    assert json.loads((tmp_path / "gpt2" / "config.json").read_text())["resid_pdrop"] == 0.1
    assert parsed(f"--load hf:{tmp_path / 'gpt2'}")["hidden_dropout"] == 0.0
    assert parsed(f"--load hf:{tmp_path / 'gpt2'} --hidden-dropout 0.2")["hidden_dropout"] == 0.2


def test_given_settings_must_agree_with_the_folder(llama: Path, tmp_path: Path) -> None:
    same = "--num-layers 3 --swiglu --group-query-attention --num-query-groups 2 --make-vocab-size-divisible-by 8 --seq-length 6"
    assert parsed(f"--load hf:{llama} {same}")["make_vocab_size_divisible_by"] == 8
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 4\nkv_channels: null\n")
    with pytest.raises(ConfigError) as error:
        parsed(f"--load hf:{llama} --config {file} --activation gelu --hidden-size 16 --rotary-base 3")
    assert list(error.value.problems) == [
        f"num_layers is 4 by file {file}, and 3 in hf:{llama}; leave it out, or give another --load",
        f"rotary_base is 3.0 by flag --rotary-base, and 500000.0 in hf:{llama}; leave it out, or give another --load",
        f"activation is gelu by flag --activation, and swiglu in hf:{llama}; leave it out, or give another --load",
    ]


def test_finetune_extends_the_context(llama: Path) -> None:
    longer = f"--load hf:{llama} --seq-length 24 --max-position-embeddings 24"
    assert parsed(longer)["max_position_embeddings"] == 24
    assert parsed(f"{longer} --finetune --rotary-base 1e6")["rotary_base"] == 1e6
    with pytest.raises(ConfigError, match=r"rotary_base is 1000000\.0 by flag"):
        parsed(f"{longer} --rotary-base 1e6")


def test_written_config_of_the_run_loads_again(llama: Path, tmp_path: Path) -> None:
    found = parsed(f"--load hf:{llama}")
    lines = [f"{name}: {json.dumps(value)}" for name, value in found.items() if name in settings()]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert parsed(f"--config {tmp_path / 'config.yaml'} --load hf:{llama}") == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "there is no folder .*/llama; give one on disk, as hf:models/llama"),
        ({"model_type": "bert"}, "model_type is 'bert'; supported: gpt2, llama"),
        ({"auto_map": {"a": "b"}}, "names code in the folder, which is never run"),
    ],
)
def test_unreadable_folders_are_errors(llama: Path, changes: dict[str, object] | None, message: str) -> None:
    shutil.rmtree(llama) if changes is None else edit_config(llama, **changes)
    with pytest.raises(ConfigError, match=message):
        parsed(f"--load hf:{llama}")


def test_conflicting_settings_are_errors(llama: Path) -> None:
    for flag in ("--ckpt-step 3", "--fresh-if-missing"):
        with pytest.raises(ConfigError, match=f"{flag[2:].replace('-', '_').split()[0]}.* does not go with load hf:"):
            parsed(f"--load hf:{llama} {flag}")


def test_configure_takes_paths(tmp_path: Path) -> None:
    config = configure(data_path=[tmp_path / "a", tmp_path / "b"], run_dir=tmp_path)
    assert config.data.data_path == [f"{tmp_path}/a", f"{tmp_path}/b"] and config.logging.run_dir == str(tmp_path)
    assert configure(data_path=tmp_path).data.data_path == [str(tmp_path)]


def test_configure_starts_from_a_preset() -> None:
    model = configure(preset="gpt2-124m", num_layers=3).model
    assert (model.num_layers, model.hidden_size) == (3, 768)
    with pytest.raises(ConfigError, match="unknown preset gpt2: did you mean"):
        configure(preset="gpt2")


def test_settings_from_a_converted_checkpoint(tmp_path: Path) -> None:
    """Model, sequence and tokenizer, also after the folder has moved; nothing if a size is given."""
    weights = MadeUp(tmp_path, GPT, tokenizer_files=byte_tokenizer(tmp_path / "tokenizer-there"))
    write_native(weights, tmp_path / "imported")
    home = (tmp_path / "imported").rename(tmp_path / "moved")
    found = parsed(f"--load {home} --finetune")
    assert (found["num_layers"], found["hidden_size"], found["vocab_size"], found["seq_length"]) == (2, 32, 301, 24)
    assert found["vocab_file"] == str(home / "tokenizer" / "vocab.json")
    assert parsed(f"--load {home} --finetune --num-attention-heads 8")["hidden_size"] == 128
    with pytest.raises(ConfigError, match="vocab_size is 300 by flag --vocab-size, and 301 in"):
        parsed(f"--load {home} --vocab-size 300")
    shutil.rmtree(home / "tokenizer")
    assert parsed(f"--load {home} --finetune")["vocab_file"] is None
    assert parsed(f"--load {tmp_path / 'nothing'}")["num_layers"] == 2


def test_damaged_manifest_is_skipped(tmp_path: Path) -> None:
    """As in loading; without another manifest the fault is an error."""
    write_native(MadeUp(tmp_path, GPT), tmp_path / "run")
    later = tmp_path / "run" / "step-0000009"
    later.mkdir()
    (later / MANIFEST_NAME).write_text("{")
    assert parsed(f"--load {tmp_path / 'run'}")["vocab_size"] == 301
    shutil.rmtree(tmp_path / "run" / "step-0000000")
    with pytest.raises(ConfigError, match=r"step-0000009/manifest\.json"):
        parsed(f"--load {tmp_path / 'run'}")
