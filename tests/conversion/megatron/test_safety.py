"""Malicious and damaged files are refused by name, and nothing is executed."""

import io
import os
import pickle
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.megatron import torch_file
from megalite.conversion.megatron.dist import CallRecord, Name, PickleError, describe, read_metadata
from megalite.conversion.megatron.torch_file import Inert, TorchFile
from megalite.conversion.native import write_native
from megalite.conversion.open import open_megatron
from megalite.conversion.weights import ConversionError
from tests.conversion.megatron import builder, dist_builder
from tests.conversion.megatron.builder import assert_same
from tests.conversion.samples import LLAMA, MadeUp


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Custom:
    def __init__(self) -> None:
        self.value = 1


def evil(mark: Path) -> dict[str, tuple[Any, str]]:
    """Objects that would create the file `mark`, or run code, and the name that the refusal must contain."""
    command = f"touch {mark}"
    return {
        "system": (Call(os.system, command), "posix.system"),
        "popen": (Call(os.popen, command), "os.popen"),
        "eval": (Call(eval, f"open({str(mark)!r}, 'w')"), "eval"),
        "exec": (Call(exec, f"open({str(mark)!r}, 'w')"), "exec"),
        "open": (Call(open, str(mark), "w"), "io.open"),
        "getattr": (Call(getattr, 1, "real"), "getattr"),
        "import": (Call(__import__, "antigravity"), "__import__"),
        "path": (Call(Path.touch, mark), "(Path.touch|getattr)"),
        "load": (Call(torch.load, str(mark)), "torch.serialization.load"),
        "bytes": (Call(torch.storage._load_from_bytes, b"x"), "_load_from_bytes"),
        "pickle": (Call(pickle.loads, b"x"), "loads"),
        "class": (Custom(), "Custom"),
    }


def places(content: dict[str, Any], bad: Any) -> dict[str, Any]:
    """A file's content with `bad` at some position."""
    args = Namespace(**vars(content["args"]))
    args.extra = [{"deep": (1, bad)}]
    return {
        "all": bad,
        "beside": content | {"rng_state": bad},
        "args": content | {"args": args},
        "model": content | {"model": content["model"] | {"decoder.layers.0._extra_state": bad}},
        "key": content | {"optimizer": OrderedDict(state=[bad])},
    }


def content_of(weights: MadeUp) -> dict[str, Any]:
    model = builder.stage(weights, range(2), 1, 0, first=True, last=True)
    return {"args": builder.arguments(weights, 1, 1), "checkpoint_version": 3.0, "model": model}


@pytest.mark.parametrize("kind", evil(Path()))
def test_no_code_runs(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "ran"
    bad, name = evil(mark)[kind]
    weights = MadeUp(tmp_path, LLAMA)
    for place, content in places(content_of(weights), bad).items():
        folder = tmp_path / place
        builder.write(folder, "mp_rank_00", content)
        with pytest.raises(
            ConversionError, match=rf"model_optim_rng.pt contains [\w.]*{name}, which is not in the list of harmless"
        ):
            open_megatron(folder)
    assert not mark.exists()


@pytest.mark.parametrize("kind", evil(Path()))
@pytest.mark.parametrize("protocol", [0, 4])
def test_no_code_runs_in_torch_dist(tmp_path: Path, kind: str, protocol: int) -> None:
    mark = tmp_path / "ran"
    bad, name = evil(mark)[kind]
    weights = MadeUp(tmp_path, LLAMA)
    folder = dist_builder.save(tmp_path / "saved", weights)
    step = folder / "iter_0000007"
    sound = (step / ".metadata").read_bytes()
    found = pickle.loads(sound)
    found.planner_data = {"x": [bad]}
    for whole in (found, bad):
        (step / ".metadata").write_bytes(pickle.dumps(whole, protocol=protocol))
        with pytest.raises(ConversionError, match=r"\.metadata c(ontains|annot)"):
            open_megatron(folder)
    if protocol == 4:
        with pytest.raises(ConversionError, match=rf"contains [\w.]*{name}.*--ckpt-format torch"):
            open_megatron(folder)
    (step / ".metadata").write_bytes(sound)
    opened = open_megatron(folder)
    torch.save(bad, step / "__1_0.distcp")
    (step / "__0_0.distcp").write_bytes((step / "__1_0.distcp").read_bytes())
    with pytest.raises(ConversionError, match="distcp"):
        opened.read("final_norm.weight")
    torch.save({"args": bad}, step / "common.pt")
    with pytest.raises(ConversionError, match=rf"common.pt contains [\w.]*{name}"):
        open_megatron(folder)
    assert not mark.exists()


def test_old_and_other_formats_are_refused(tmp_path: Path) -> None:
    """torch before 1.6, TorchScript, a plain pickle, a compressed archive, and no file."""
    path = tmp_path / "f.pt"
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConversionError, match=r"not a whole file of torch.save .torch 1.6 or later."):
        TorchFile(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConversionError, match=r"not a whole file of torch.save"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f/data.pkl", pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(ConversionError, match="compressed"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("f/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        archive.writestr("f/constants.pkl", pickle.dumps((), protocol=2))
    with pytest.raises(ConversionError, match=r"f.pt cannot be read"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("f/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        archive.writestr("f/byteorder", "big")
    with pytest.raises(ConversionError, match="big-endian"):
        TorchFile(path)
    with pytest.raises(ConversionError, match=r"cannot be read: .*No such file"):
        TorchFile(tmp_path / "none.pt")


def test_large_metadata_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    monkeypatch.setattr(torch_file, "LARGEST_ENTRY", 1000)
    TorchFile(path)  # tensors may have any size
    torch.save({"a": "x" * 1000}, path)
    with pytest.raises(ConversionError, match=r"data.pkl has \d+ bytes; settings and names have at most 1000"):
        TorchFile(path)


def test_flipped_bits_are_detected_or_harmless(tmp_path: Path) -> None:
    """torch.load ignores the archive's checksums; here no flipped bit of a weight or setting is accepted."""
    weights = MadeUp(tmp_path, LLAMA)
    folder = builder.save(tmp_path / "saved", weights)
    path = folder / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    sound = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    found = 0
    for place in torch.randint(len(sound), (30,), generator=generator).tolist():
        data = bytearray(sound)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        try:
            opened = open_megatron(folder)
            assert_same(opened, weights)
        except ConversionError:
            found += 1
    assert found > 20  # the rest is padding between the archive's entries


def test_flipped_bit_of_a_tensor_stops_the_conversion(tmp_path: Path) -> None:
    """A tensor read block by block is compared with its checksum after the last block; for a slice all of it is read."""
    weights = MadeUp(tmp_path, LLAMA | {"make_vocab_size_divisible_by": 128})
    folder = builder.save(tmp_path / "saved", weights)
    path = folder / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    sound, stored = path.read_bytes(), TorchFile(path)
    for record in list(stored._records.values()):
        if "/data/" not in record.name or not record.length:
            continue
        data = bytearray(sound)
        data[record.start + record.length // 3] ^= 1
        path.write_bytes(data)
        for number, write in enumerate((write_native, partial(write_huggingface, family=None))):
            with pytest.raises(ConversionError, match="is damaged: checksum"):
                write(open_megatron(folder), tmp_path / f"out{number}", dtype=None, advance=lambda count: None)


def test_training_objects_are_ignored(tmp_path: Path) -> None:
    """Random states, enumerations and similar objects become empty placeholders."""
    numpy = pytest.importorskip("numpy")
    state = numpy.random.RandomState(1).get_state()
    rng = [{"np_rng_state": state, "random_rng_state": (3, (1, 2), None), "torch": torch.get_rng_state()}]
    weights = MadeUp(tmp_path, LLAMA)
    content = content_of(weights) | {"rng_state": rng, "path": Path("/a"), "io": io.BytesIO(b"x")}
    content["args"].save = Path("/b")
    path = builder.write(tmp_path / "saved", "mp_rank_00", content)
    assert_same(open_megatron(tmp_path / "saved"), weights)
    found = TorchFile(path).content
    assert isinstance(found["path"], Inert)
    assert isinstance(found["rng_state"][0]["np_rng_state"][1], Inert)


def test_gpu_tensors_are_read_on_a_cpu(tmp_path: Path) -> None:
    """Tensors are stored for cuda:0."""
    tensor = torch.arange(6.0)
    path, moved = tmp_path / "cpu.pt", tmp_path / "cuda.pt"
    torch.save({"w": tensor}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(moved, "w") as target:
        for name in source.namelist():
            data = source.read(name).replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            target.writestr(name.replace("cpu/", "cuda/"), data)
    file = TorchFile(moved)
    assert torch.equal(file.read(file.content["w"], 0, 6), tensor)


def test_describe_equals_unpickling() -> None:
    """The same values as unpickling, except that names and calls are not resolved."""
    value = {"a": [1, 2.5, None, True, "y" * 300], "b": ((), 2**70, -3, (1, 2, 3, 4)), "c": {}}
    for protocol in range(2, 6):
        assert describe(pickle.dumps(value, protocol=protocol), ()) == value
    assert describe(pickle.dumps([b"x", {1, 2}]), ()) == [b"x", {1, 2}]
    same = [1]
    pair = describe(pickle.dumps((same, same)), ())
    assert pair[0] is pair[1]
    made = describe(pickle.dumps(torch.Size([2, 3])), {"torch.Size"})
    assert isinstance(made, CallRecord)
    assert (made.name, made.arguments) == ("torch.Size", ((2, 3),))
    assert describe(pickle.dumps(torch.float16), {"torch.float16"}) == Name("torch.float16")
    for bad in (b"", b"\x80", b"junk", b".", b"]q\x00(K\x01", b"0.", b"h\x05.", b"(K\x01t", b"R."):
        with pytest.raises(PickleError):
            describe(bad, ())


DEEP = 200_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"(" * DEEP + b"t" * DEEP, "is not what this torch writes"),
        (b"]" * DEEP + b"a" * (DEEP - 1), "is not what this torch writes"),
        (b"}" + b"(" * DEEP + b"t" * DEEP + b"Ns", "tuple as a key"),  # hashing it would crash the process
    ],
)
def test_deeply_nested_metadata_is_refused_quickly(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x04" + content + b".")
    start = time.process_time()
    with pytest.raises(ConversionError, match=says):
        read_metadata(path)
    assert time.process_time() - start < 10.0


def test_metadata_of_exponential_size_is_refused(tmp_path: Path) -> None:
    """A tuple of two references to a tuple of two references to ...: 2^60 items if printed."""
    twice = b"(K\x01K\x01t" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))
    size = b"ctorch\nSize\n" + twice + b"\x85R"
    stored = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}U\x04size" + size + b"sb"
    top = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}U\x13state_dict_metadata}U\x01a" + stored
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x02" + top + b"ssU\x0cstorage_data}sb.")
    with pytest.raises(ConversionError, match="found a tuple instead of a int"):
        read_metadata(path)
