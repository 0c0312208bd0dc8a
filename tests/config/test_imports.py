"""`--import`: every process imports a user's modules before the config is checked; a broken one is one clear error."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megalite import configure
from megalite.config import registry
from megalite.config.data import DATASETS
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.files import load
from megalite.config.flags import parse_arguments
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.config.validate import validate

PLUGIN = "from megalite import OPTIMIZERS\n@OPTIMIZERS.register('{name}', states=())\nclass Mine: pass\n"
SIZES = "--num-layers 2 --vocab-size 64 --mock-data --train-iters 2"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Yield a working folder with modules that are unloaded after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(OPTIMIZERS, "entries", dict(OPTIMIZERS.entries))
    monkeypatch.setattr(DATASETS, "entries", {})
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_names_are_known_before_values_are_read(place: Path) -> None:
    (place / "mine_a.py").write_text(PLUGIN.format(name="mine-a"))
    (place / "mine_b.py").write_text(PLUGIN.format(name="mine-b"))
    config = parse_arguments(["--optimizer", "mine-a", "--import", "mine_a"]).config
    assert (config.optimizer.optimizer, config.training.imports) == ("mine-a", ["mine_a"])
    (place / "run.yaml").write_text("optimizer: {optimizer: mine-b}\nimports: [mine_b]\n")
    assert load(place / "run.yaml").optimizer.optimizer == "mine-b"
    both = parse_arguments(["--config", "run.yaml", "--import", "mine_a", "--import", "mine_b"])
    assert both.config.training.imports == ["mine_b", "mine_a"], "imports of files and flags are combined"
    assert configure(imports=["mine_a"], optimizer="mine-a").optimizer.optimizer == "mine-a"


def test_flag_may_name_an_addition_imported_by_a_file(place: Path) -> None:
    (place / "mine_c.py").write_text(PLUGIN.format(name="mine-c"))
    (place / "run.yaml").write_text("training:\n  import: [mine_c]\n")
    assert parse_arguments(["--config", "run.yaml", "--optimizer", "mine-c"]).config.optimizer.optimizer == "mine-c"


def test_validate_imports_modules_of_python_configs(place: Path) -> None:
    (place / "mine_d.py").write_text(PLUGIN.format(name="mine-d"))
    config = replace(RunConfig(), imports=["mine_d"], optimizer="mine-d", vocab_size=64)
    assert validate(config, 1).optimizer.optimizer == "mine-d"


BAD = {
    "absent": (
        None,
        r"--import absent cannot be imported: ModuleNotFoundError: No module named 'absent'; give a dotted",
    ),
    "lacks": ("import numby\n", r"--import lacks .* No module named 'numby' \(.*lacks.py, line 1\)$"),
    "raises": (
        "\nraise OSError('no disk')\n",
        r"--import raises cannot be imported: OSError: no disk \(.*raises.py, line 2\)$",
    ),
    "leaves": ("import sys\nsys.exit(3)\n", r"--import leaves cannot be imported: SystemExit: 3"),
    "wrong": ("def f(:\n", r"--import wrong cannot be imported: SyntaxError: .*wrong.py, line 1"),
    "taken": (
        PLUGIN.format(name="adam"),
        r"--import taken .* ConfigError: optimizer adam exists already; register it under",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("by_file", [False, True])
def test_failed_import_is_the_only_error(name: str, by_file: bool, place: Path) -> None:
    text, says = BAD[name]
    if text is not None:
        (place / f"{name}.py").write_text(text)
    (place / "run.yaml").write_text(f"imports: [{name}]\n")
    words = ["--config", "run.yaml"] if by_file else ["--import", name]
    with pytest.raises(ConfigError, match=says) as error:
        parse_arguments([*words, "--optimizer", "mine-e", "--nonsense", "3"])
    assert len(error.value.problems) == 1, "names that it would have registered are not reported"


def test_unknown_name_lists_registered_names(place: Path) -> None:
    (place / "mine_f.py").write_text(PLUGIN.format(name="mine-f"))
    with pytest.raises(
        ConfigError, match=r"cannot be 'mine-g': did you mean mine-f\? \(one of adam, .*, mine-f; --import"
    ):
        parse_arguments(["--import", "mine_f", "--optimizer", "mine-g"])
    with pytest.raises(ConfigError, match=r"dataset cannot be 'pile' \(nothing is registered for it; --import MODULE"):
        parse_arguments(["--dataset", "pile"])


def test_config_brings_its_modules_to_another_process(place: Path) -> None:
    (place / "mine_h.py").write_text(PLUGIN.format(name="mine-h"))
    config = configure(imports=["mine_h"], optimizer="mine-h")
    (place / "config.pickle").write_bytes(pickle.dumps(config))
    code = (
        "import pickle; config = pickle.load(open('config.pickle', 'rb')); "
        "from megalite.config.optimizer import OPTIMIZERS; print(OPTIMIZERS.get(config.optimizer.optimizer))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mine_h.Mine" in done.stdout


def installed(place: Path, target: str) -> None:
    """An installed package with an entry point."""
    info = place / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.PLUGINS}]\ntheirs = {target}\n")


def test_installed_package_needs_no_import(place: Path) -> None:
    installed(place, "their_module")
    (place / "their_module.py").write_text(f"{PLUGIN.format(name='theirs')}\nprint('loaded')\n")
    start = [sys.executable, "-m", "megalite.cli.main", "train", *SIZES.split(), "--dry-run", "--device", "cpu"]
    for words, loads in ((["--optimizer", "theirs"], True), ([], False)):
        done = subprocess.run([*start, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ("loaded" in done.stdout) == loads, "it is imported only for an unknown name"


def test_failing_entry_point_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(place, "their_broken")
    (place / "their_broken.py").write_text("raise KeyError('x')\n")
    monkeypatch.syspath_prepend(str(place))
    registry._load_entry_points.cache_clear()
    with pytest.raises(
        ConfigError, match=r"plug-in their_broken of the package their-package cannot be imported: KeyError"
    ):
        parse_arguments(["--optimizer", "theirs"])
    registry._load_entry_points.cache_clear()
