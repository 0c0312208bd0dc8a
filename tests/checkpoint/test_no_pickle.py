"""Nothing in the package can run code from a file, and a torch-free part stays so."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megalite.checkpoint.manifest as manifest_module

PACKAGE = Path(manifest_module.__file__).parent
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "zipfile",
}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "numpy.load",
    "np.load",
    "eval",
    "exec",
    "compile",
}


def offences(source: str) -> list[str]:
    """Imports and calls in `source` that could run code out of a file's content."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES or names & FORBIDDEN_CALLS:
                found += sorted(names)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            text = ast.unparse(node)
            if text in FORBIDDEN_CALLS or text.startswith("torch.distributed.checkpoint"):
                found.append(text)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_no_pickle() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) >= 8
    for path in files:
        assert offences(path.read_text()) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\nload = torch.load",
        "from torch import load",
        "import numpy as np\nnp.load('x')",
        "f('x', allow_pickle=True)",
        "eval('1')",
        "def f():\n    import marshal",
        "import torch\ntorch.distributed.checkpoint.load({})",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert offences(source)


def test_manifest_needs_no_torch() -> None:
    modules = ["manifest", "tiling", "files", "folders", "commit"]
    code = "; ".join(f"import megalite.checkpoint.{name}" for name in modules)
    code += "; import sys; sys.exit(int('torch' in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent.parent)
