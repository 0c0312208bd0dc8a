"""Python, megalite and the packages it needs or can use: versions, and which extra brings what is missing."""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import megalite
from megalite.doctor.host import Finding, finding

TOPIC = "versions"
_found = partial(finding, TOPIC)
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Package:
    """A distribution, as pyproject.toml names it."""

    name: str
    least: str = ""
    """Oldest version that will do, where there is one."""
    extra: str | None = None
    """Of megalite, that brings it; None for what is always needed."""
    use: str = ""
    """Of an optional one."""


PACKAGES = (
    Package("torch", "2.11"),
    Package("numpy"),
    Package("safetensors", "0.5"),
    Package("pyyaml"),
    Package("sentencepiece", "0.2.1"),
    Package("regex"),
    Package("rich", "13"),
    Package("jinja2"),
    Package("tokenizers", "0.20", "tokenizers", "Hugging Face tokenizers"),
    Package("tiktoken", "0.7", "tokenizers", "tiktoken files"),
    Package("zstandard", "0.19", "data", ".zst input"),
    Package("pyarrow", "", "data", ".parquet input"),
    Package("tensorboard", "", "tensorboard", "--tensorboard-dir"),
    Package("matplotlib", "", "plot", "megalite plot"),
    Package("wandb", "0.19", "wandb", "--metrics wandb"),
    Package("triton", "3.6", "dev", "our fused kernels; wheels of torch for CUDA bring it"),
    Package("transformers", "5", "dev", "comparisons with Hugging Face's models"),
)
"""As in pyproject.toml, but for tools of development."""


def examine(version_of: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """A finding for Python, for megalite and for each package.

    Args:
        version_of: installed version of a distribution, or None; default: of this environment.
    """
    version, system = platform.python_version(), f"{platform.system()} {platform.release()}, {platform.machine()}"
    data = {"version": version, "executable": sys.executable, "system": system}
    yield _found("python", f"{version} ({sys.executable}) on {system}", data)
    yield _found("megalite", megalite.__version__, {"version": megalite.__version__})
    for package in PACKAGES:
        yield _package(package, (version_of or installed_version)(package.name))


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(package: Package, version: str | None) -> Finding:
    least, extra = package.least, package.extra
    install = f"pip install 'megalite[{extra}]'" if extra else f"pip install '{package.name}{least and '>=' + least}'"
    text, wrong = version or "not installed", version is None and extra is None
    if version is None and extra is not None:
        text = f"not installed; for {package.use}: {install}"
    elif version is not None and least and _numbers(version) < _numbers(least):
        text, wrong = f"{version}, older than {least}", True
    data = {"version": version, "least": least or None, "extra": extra}
    return _found(package.name, text, data, install if wrong else None, "error" if extra is None else "warning")


def _numbers(version: str) -> tuple[int, ...]:
    """The release as numbers: (2, 11, 0) of `2.11.0a0+cu128`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
