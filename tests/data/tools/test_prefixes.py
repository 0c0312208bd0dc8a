from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.tools.prefixes import find_prefixes, refuse_existing
from tests.data.tools.layout import MIXED, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a", "c.idx"):
        write(tmp_path / name, MIXED)
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def test_prefixes_files_and_folders(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in ("a", "b", "c.idx"))
    assert find_prefixes([b, a]) == [b, a]
    assert find_prefixes([f"{b}.bin", f"{b}.idx", f"{a}.json"]) == [b, a]
    assert find_prefixes([str(folder)]) == [a, b, c]
    assert find_prefixes([c]) == [c]
    assert find_prefixes([f"{b}.bin", a, f"{folder}/./b.idx"]) == [f"{b}", a]
    Path(f"{b}.bin").unlink()
    # Whoever opens it says what is missing.
    assert find_prefixes([str(folder)]) == [a, b, c] and find_prefixes([b]) == [b]
    (folder / "h.bin").write_bytes(b"")
    assert find_prefixes([f"{folder}/h.bin"]) == find_prefixes([f"{folder}/h"]) == [f"{folder}/h"]


def test_a_dataset_is_given_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called: laid end to end with itself, its documents would count twice."""
    monkeypatch.chdir(folder)
    (folder / "link").symlink_to(".")
    (folder / "links").mkdir()
    for suffix in (".bin", ".idx"):
        (folder / "links" / f"alias{suffix}").symlink_to(folder / f"a{suffix}")
    for entries, message in (
        (["a", "a"], "a is given twice; give each dataset once"),
        (["a.bin", "b", "a.bin"], "a.bin is given twice"),
        (["a", "./a"], "a and ./a are one dataset; give each dataset once"),
        (["a", "a.idx"], "a and a.idx are one dataset"),
        (["a.idx", "a"], "a.idx and a are one dataset"),
        (["a.bin", "./a.bin"], "a.bin and ./a.bin are one dataset"),
        (["b", str(folder / "b")], f"b and {folder}/b are one dataset"),
        (["a", "link/a"], "a and link/a are one dataset"),
        (["a", "links"], "a and links/alias are one dataset"),
        (["b", "."], "b is given twice"),
    ):
        with pytest.raises(ConfigError) as raised:
            find_prefixes(entries)
        assert message in str(raised.value)


def test_what_cannot_be_meant(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither .*zzz\.idx nor a folder"):
        find_prefixes([str(folder / "zzz")])
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no dataset"):
        find_prefixes([str(folder / "empty")])


def test_existing_outputs_are_refused(folder: Path) -> None:
    refuse_existing([str(folder / "new")])
    (folder / "new.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"new\.json is there already"):
        refuse_existing([str(folder / "other"), str(folder / "new")])
    for nameless in (f"{folder}/sub/", f"{folder}/..", ""):
        with pytest.raises(ConfigError, match=r"output_prefix .* has no name; give one such as .*whole"):
            refuse_existing([nameless])
