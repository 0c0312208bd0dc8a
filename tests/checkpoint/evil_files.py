"""Malicious files and folders: pickles under every name, links, pipes, devices, names outside of the folder."""

import io
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.checkpoint.evil_target import MANIFEST, OPTIMIZER, WEIGHTS, Bomb, Evil, Outcome, Target

HARMLESS, DAMAGED, PASSED_OVER, UNREADABLE = (
    Outcome.HARMLESS,
    Outcome.DAMAGED,
    Outcome.PASSED_OVER,
    Outcome.UNREADABLE,
)


def torch_file(target: Target) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(600), "bomb": Bomb(str(target.canary))}, buffer)
    return buffer.getvalue()


def numpy_file(target: Target) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb(str(target.canary))], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def archive(target: Target) -> bytes:
    """A zip archive with a member that would be extracted outside."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("../../canary", "x")
    return buffer.getvalue()


def python_source(target: Target) -> bytes:
    """A module that creates the canary when it is imported."""
    return f"open({str(target.canary)!r}, 'w').close()\n".encode()


def yaml_tags(target: Target) -> bytes:
    """YAML that runs a command under an unsafe loader."""
    return f"!!python/object/apply:os.system ['touch {target.canary}']\n".encode()


def beside(*names: str, content: Callable[[Target], bytes]) -> Evil:
    """Add extra files to the checkpoint and to its parent folder."""

    def build(target: Target) -> None:
        for folder in (target.newest, target.run):
            for name in names:
                (folder / name).write_bytes(content(target))

    return build


def instead(name: str, content: Callable[[Target], bytes], *, sealed: bool = False) -> Evil:
    """Replace the content of a file of the checkpoint; if `sealed`, also its length and hash in the manifest."""

    def build(target: Target) -> None:
        data = content(target)
        data += bytes(max(0, 4096 - len(data)))  # at least as long as the manifest says
        if sealed:
            target.replace(name, data)
        else:
            (target.newest / name).write_bytes(data)

    return build


def put(name: str, make: Callable[[Path], object]) -> Evil:
    """Put something that is not a plain file in the place of a path of the run's folder."""

    def build(target: Target) -> None:
        path = target.run / name
        if path.exists():
            path.rename(target.outside / f"former-{path.name}")
        make(path)

    return build


def link(name: str, to: Callable[[Target], str | Path]) -> Evil:
    """Put a link in the place of a path, which is moved outside."""

    def build(target: Target) -> None:
        put(name, lambda path: path.symlink_to(to(target)))(target)

    return build


def make_each(make: Callable[[Path], object], folder: Path, names: tuple[str, ...]) -> None:
    """Call `make` for each of the names."""
    for name in names:
        make(folder / name)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # paths of sockets must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    """Make an endless file: a device, or without root a link to one."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def executable(target: Target) -> None:
    path = target.newest / WEIGHTS
    path.write_text(f"#!/bin/sh\ntouch {target.canary}\n")
    path.chmod(0o755)


def endless_manifest(target: Target) -> None:
    os.truncate(target.newest / MANIFEST, 1 << 40)


STEP = "step-0000002"
FILES: dict[str, tuple[Outcome, Evil]] = {
    # Code that runs if a reader unpickles, imports or parses too much.
    "pickle as weights": (DAMAGED, instead(WEIGHTS, Target.payload)),
    "pickle as weights, sealed": (UNREADABLE, instead(WEIGHTS, Target.payload, sealed=True)),
    "protocol 0 pickle as optimizer, sealed": (
        UNREADABLE,
        instead(OPTIMIZER, lambda target: target.payload(0), sealed=True),
    ),
    "torch.save as weights": (DAMAGED, instead(WEIGHTS, torch_file)),
    "torch.save as weights, sealed": (UNREADABLE, instead(WEIGHTS, torch_file, sealed=True)),
    "numpy objects as weights, sealed": (UNREADABLE, instead(WEIGHTS, numpy_file, sealed=True)),
    "zip as optimizer, sealed": (UNREADABLE, instead(OPTIMIZER, archive, sealed=True)),
    "pickle as manifest": (DAMAGED, instead(MANIFEST, Target.payload)),
    "protocol 0 pickle as manifest": (DAMAGED, instead(MANIFEST, lambda target: target.payload(0))),
    "YAML as manifest": (DAMAGED, instead(MANIFEST, yaml_tags)),
    "Python as manifest": (DAMAGED, instead(MANIFEST, python_source)),
    "script as weights": (DAMAGED, executable),
    "pickle as latest": (HARMLESS, lambda target: (target.run / "latest").write_bytes(target.payload())),
    "DCP files beside": (HARMLESS, beside(".metadata", "__0_0.distcp", content=Target.payload)),
    "pickles beside": (
        HARMLESS,
        beside("model.pt", "optimizer.pt", "model.pkl", "common.pt", content=Target.payload),
    ),
    "torch files beside": (
        HARMLESS,
        beside("model_optim_rng.pt", "pytorch_model.bin", "rng_state.pth", "model.ckpt", content=torch_file),
    ),
    "numpy files beside": (HARMLESS, beside("loader.npy", "state.npz", "weights.npy", content=numpy_file)),
    "unlisted shards beside": (
        HARMLESS,
        beside("weights-00001.safetensors", "model.safetensors", content=Target.payload),
    ),
    "YAML beside": (HARMLESS, beside("config.yaml", "config.yml", content=yaml_tags)),
    "Python beside": (
        HARMLESS,
        beside("sitecustomize.py", "__init__.py", "json.py", "torch.py", "modeling.py", content=python_source),
    ),
    "path files beside": (HARMLESS, beside("evil.pth", content=lambda target: b"import os; os.abort()\n")),
    # Links.
    "weights are a link to a sound copy": (DAMAGED, link(f"{STEP}/{WEIGHTS}", lambda target: target.outside / f"former-{WEIGHTS}")),
    "weights are a link to /etc/passwd": (DAMAGED, link(f"{STEP}/{WEIGHTS}", lambda target: "/etc/passwd")),
    "optimizer is a link to itself": (DAMAGED, link(f"{STEP}/{OPTIMIZER}", lambda target: OPTIMIZER)),
    "optimizer is a link to nothing": (DAMAGED, link(f"{STEP}/{OPTIMIZER}", lambda target: "nothing")),
    "manifest is a link to a sound copy": (DAMAGED, link(f"{STEP}/{MANIFEST}", lambda target: target.outside / f"former-{MANIFEST}")),
    "manifest is a link to /dev/zero": (DAMAGED, link(f"{STEP}/{MANIFEST}", lambda target: "/dev/zero")),
    "latest is a link out": (HARMLESS, link("latest", lambda target: target.outside / "precious.txt")),
    "a checkpoint is a link to /": (PASSED_OVER, link("step-0000003", lambda target: "/")),
    "a checkpoint is a link to its folder": (PASSED_OVER, link("step-0000003", lambda target: ".")),
    "a checkpoint is a link to itself": (PASSED_OVER, link("step-0000003", lambda target: "step-0000003")),
    "a checkpoint is a link to another": (PASSED_OVER, link("step-0000003", lambda target: "step-0000001")),
    "an unfinished save is a link out": (HARMLESS, link(".tmp-step-3", lambda target: target.outside)),
    # Neither file nor folder.
    "weights are a pipe": (DAMAGED, put(f"{STEP}/{WEIGHTS}", os.mkfifo)),
    "manifest is a pipe": (DAMAGED, put(f"{STEP}/{MANIFEST}", os.mkfifo)),
    "latest is a pipe": (HARMLESS, put("latest", os.mkfifo)),
    "a pipe beside": (HARMLESS, put(f"{STEP}/{WEIGHTS}.pipe", os.mkfifo)),
    "a checkpoint is a pipe": (PASSED_OVER, put("step-0000003", os.mkfifo)),
    "weights are a socket": (DAMAGED, put(f"{STEP}/{WEIGHTS}", make_socket)),
    "manifest is a socket": (DAMAGED, put(f"{STEP}/{MANIFEST}", make_socket)),
    "optimizer is a device": (DAMAGED, put(f"{STEP}/{OPTIMIZER}", make_device)),
    "manifest is a device": (DAMAGED, put(f"{STEP}/{MANIFEST}", make_device)),
    "weights are a folder": (DAMAGED, put(f"{STEP}/{WEIGHTS}", Path.mkdir)),
    "manifest is a folder": (DAMAGED, put(f"{STEP}/{MANIFEST}", Path.mkdir)),
    "a terabyte of manifest": (DAMAGED, endless_manifest),
    # Names.
    "a checkpoint is a file": (PASSED_OVER, lambda target: (target.run / "step-0000003").write_bytes(target.payload())),
    "a checkpoint of step 10^18 - 1": (PASSED_OVER, put("step-999999999999999999", Path.mkdir)),
    "a checkpoint of step 10^199": (HARMLESS, put("step-1" + "0" * 199, Path.mkdir)),
    "names that are nearly a checkpoint's": (
        HARMLESS,
        lambda target: make_each(
            Path.mkdir,
            target.run,
            ("step-", "step--000003", "step-0000003 ", "step-0x00003", "STEP-0000003", "step-٠٠٠٠٠٠٣"),
        ),
    ),
    "names that write on the screen": (
        HARMLESS,
        lambda target: make_each(Path.touch, target.newest, ("\x1b[2Jx", "a\nb", "\u202etxt")),
    ),
    "a name that is not UTF-8": (
        HARMLESS,
        lambda target: os.close(os.open(os.fsencode(target.newest) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY)),
    ),
}  # fmt: skip
