"""Nothing in the package can run code from a file, and the torch-free parts of checkpoints stay so.

One place may read other programs' pickles: the import of Megatron-LM's files, and there torch's restricted unpickler
alone, asked for by name at each call.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from megalite.config.yaml_text import UniqueKeyLoader
from tests.support.layers import Module, read_modules

ROOT = Path(__file__).parents[2]

RESTRICTED = "megalite.conversion.megatron"
"""The one package that may call torch.load."""

MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "hickle"),
    *("marshal", "shelve", "dbm", "runpy", "code", "codeop", "imp"),
}
CALLS = {
    *(f"torch.{name}" for name in ("save", "jit.load", "jit.script", "package", "hub", "utils.cpp_extension")),
    *(f"torch.serialization{name}" for name in ("", ".load", ".add_safe_globals")),
    *(f"torch.distributed.checkpoint{name}" for name in ("", ".load")),
    *(f"yaml.{name}" for name in ("unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all")),
    *(f"yaml.{kind}Loader" for kind in ("", "Unsafe", "Full", "C", "CUnsafe", "CFull")),
    *("os.system", "os.popen", "numpy.lib.format", "numpy.lib.npyio", "pandas.read_pickle"),
    *("eval", "exec", "compile", "__import__"),
}
"""Dotted names that no module says, whatever it calls them."""

ALLOWED_THERE = {"torch.save", "torch.serialization"}
"""Of these, what that package says: it writes such files too, and names the classes that torch may build."""

SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "megalite.config.yaml_text.UniqueKeyLoader"}


def names_of(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as: `np` -> `numpy`, `ld` -> `torch.load`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`torch.load` of `t.load` after `import torch as t`; of anything else its text."""
    head, dot, rest = ast.unparse(node).partition(".")
    return names.get(head, head) + dot + rest


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def call_is_safe(call: ast.Call, called: str, module: Module, safe_loaders: set[str], names: dict[str, str]) -> bool:
    if called == "torch.load":
        return module.inside(RESTRICTED) and is_constant(keyword(call, "weights_only"), True)
    if called == "numpy.load":
        return is_constant(keyword(call, "allow_pickle"), False)
    loader = keyword(call, "Loader") or (call.args[1] if len(call.args) > 1 else None)
    return loader is not None and dotted(loader, names) in safe_loaders


def offences(module: Module) -> Iterator[str]:
    tree = module.tree
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            whole = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in whole if name.split(".")[0] in MODULES or name in CALLS)
    for name in names.values():
        if name.split(".")[0] in MODULES or name in CALLS:
            yield name
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    safe_loaders = SAFE_LOADERS | {
        node.name for node in classes if {dotted(base, names) for base in node.bases} & SAFE_LOADERS
    }
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or isinstance(node.ctx, ast.Store):
            continue
        name = dotted(node, names)
        if name in ("torch.load", "numpy.load", "yaml.load"):
            call = called.get(id(node))
            if call is None or not call_is_safe(call, name, module, safe_loaders, names):
                yield f"{name} on line {node.lineno}"
        elif name in CALLS and not (name in ALLOWED_THERE and module.inside(RESTRICTED)):
            yield f"{name} on line {node.lineno}"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_constant(node.value, False):
            yield f"allow_pickle on line {node.value.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "shell" and not is_constant(node.value, False):
            yield f"shell on line {node.value.lineno}"


def test_our_loader_is_a_safe_one() -> None:
    assert UniqueKeyLoader.__mro__[1] is yaml.SafeLoader
    own = {name for name in vars(UniqueKeyLoader) if not name.startswith("__")}
    assert own == {"construct_mapping", "yaml_implicit_resolvers"}
    assert UniqueKeyLoader.yaml_constructors is yaml.SafeLoader.yaml_constructors


def test_no_pickle() -> None:
    modules = read_modules(ROOT)
    assert len(modules) >= 100
    assert {module.name: found for module in modules if (found := list(offences(module)))} == {}
    restricted = "import torch as t\nload = t.load('x', weights_only=True)"
    assert list(offences(Module(f"{RESTRICTED}.read", restricted))) == []
    for source in (restricted, "from pickle import loads", "import numpy as np\nnp.load('x')", "run = exec"):
        assert list(offences(Module("megalite.data.x", source))), source


def test_parts_that_need_no_torch() -> None:
    modules = ["manifest", "tiling", "files", "folders", "commit", "safetensors_header", "survey"]
    code = "; ".join(f"import megalite.checkpoint.{name}" for name in modules)
    code += "; import sys; sys.exit(int('torch' in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
