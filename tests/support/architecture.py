"""The rules of the source code, as functions from a module's syntax tree to its violations.

`tests/test_architecture.py` applies them to the package, and to small sources that break each rule."""

import ast
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.support.layers import Module, is_in

LATE_IMPORTS = {
    "megalite.cli.train": {
        *("megalite.training.trainer", "megalite.topology.lost_peers"),
        "torch.distributed.elastic.multiprocessing.errors",
    },
    "megalite.cli.inspect": {"megalite.cli.inspect_tensors"},
}
"""Allowed imports inside functions of packages that are always installed: help, dry run and listing start without torch."""

DISPATCHERS = {
    "megalite",
    "megalite.cli.command",
    "megalite.config.registry",
    "megalite.kernels.registry",
    "megalite.kernels.probes",
}
"""Modules that import by name: the public names, a command's module, a kernel's module, and apex's extensions to see if they
load."""

OPTIONAL_PACKAGES = {
    *("matplotlib", "pyarrow", "tensorboard", "tiktoken", "tokenizers", "torch.utils.tensorboard"),
    *("transformers", "triton", "wandb", "mlflow", "comet_ml", "zstandard", "jinja2", "rich", "fsspec", "datasets"),
    "ray",
}
"""Third-party packages of the extras, and packages that help starts without; imported where they are used."""

MEGATRON_FILES = "megalite.conversion.megatron"
"""The only package that reads pickles, by torch's restricted reader: torch.load with weights_only=True."""

MAX_LINES, MAX_FUNCTION_LINES = 500, 80
VAGUE_NAMES = ("util", "helper", "manager", "common", "misc")
RUN_CODE_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "hickle"),
    *("marshal", "shelve", "dbm", "runpy", "code", "codeop", "imp"),
}
PICKLING_CALLS = {
    f"{name}_object{end}"
    for name in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for end in ("", "_list")
}
"""Functions of torch.distributed that pickle, refused on any object."""
RUN_CODE = {
    *(f"torch.{name}" for name in ("save", "jit.load", "jit.script", "package", "hub", "utils.cpp_extension")),
    *(f"torch.serialization{name}" for name in ("", ".load", ".add_safe_globals")),
    *(f"torch.distributed.checkpoint{name}" for name in ("", ".load")),
    *(f"yaml.{name}" for name in ("unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all")),
    *(f"yaml.{kind}Loader" for kind in ("", "Unsafe", "Full", "C", "CUnsafe", "CFull")),
    *("os.system", "os.popen", "numpy.lib.format", "numpy.lib.npyio", "pandas.read_pickle"),
    *("eval", "exec", "compile", "__import__"),
}
"""Dotted names that no module may use, under any alias."""
ALLOWED_THERE = {"torch.save", "torch.serialization"}
"""Names of `RUN_CODE` that `MEGATRON_FILES` may use: it also writes such files, and names the classes that torch may build."""
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "megalite.config.yaml_text.UniqueKeyLoader"}
LOADS = {"torch.load", "numpy.load", "yaml.load"}
"""Functions that are safe with the right arguments."""


def _functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _names(module: Module) -> dict[str, str]:
    """Local name -> the name that it was imported as: `np` -> `numpy`, `ld` -> `torch.load`."""
    found = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _dotted(node: ast.AST, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return `torch.load` for `t.load` after `import torch as t`; "" if the node is not a dotted name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def late_imports(module: Module) -> list[str]:
    """Imports inside functions, and imports by name, beyond the allowed ones."""
    wrong, functions = [], _functions(module)
    for name, line in module.imports:
        stated = name.rpartition(".")[0] in LATE_IMPORTS.get(module.name, set())
        if not stated and not any(is_in(name, package) for package in OPTIONAL_PACKAGES):
            inside = [each.name for each in functions if each.lineno <= line <= (each.end_lineno or 0)]
            wrong += [f"{name} is imported inside {function}" for function in inside]
    if module.name not in DISPATCHERS:
        names = [node.attr for node in module.nodes if isinstance(node, ast.Attribute)]
        names += [node.id for node in module.nodes if isinstance(node, ast.Name)]
        names += [name.split(".")[-1] for name, _ in module.imports]
        wrong += [name for name in names if name in ("import_module", "__import__")]
    return wrong


def relative_imports(module: Module) -> list[str]:
    """Imports that start with a dot: other rules do not resolve them."""
    return [name for name, _ in module.imports if name.startswith(".")]


def globals_changed(module: Module) -> list[str]:
    """`global` statements."""
    return [", ".join(node.names) for node in module.nodes if isinstance(node, ast.Global)]


def environment_reads(module: Module) -> list[str]:
    """Reads of the environment outside the command line and the module that reads the launcher's variables."""
    if module.inside("megalite.cli", "megalite.topology.topology"):
        return []
    texts = [_dotted(node) for node in module.nodes if isinstance(node, ast.Attribute)]
    texts += [name for name, _ in module.imports]
    return [text for text in texts if text in ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv")]


def world_lookups(module: Module) -> list[str]:
    """`get_rank()` and `get_world_size()` without a group."""
    if module.inside("megalite.topology"):
        return []
    calls = [node for node in module.nodes if isinstance(node, ast.Call) and not node.args and not node.keywords]
    called = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    return [name for name in called if name in ("get_rank", "get_world_size")]


def prints(module: Module) -> list[str]:
    """`print` outside the command line."""
    if module.inside("megalite.cli"):
        return []
    return [f"line {node.lineno}" for node in module.nodes if isinstance(node, ast.Name) and node.id == "print"]


def code_in_package_files(module: Module) -> list[str]:
    """Code in an `__init__.py` beyond a docstring (megalite's also has the version and the public names)."""
    if not module.is_package or module.name == "megalite":
        return []
    wrong = [] if ast.get_docstring(module.tree) else ["no docstring"]
    return [*wrong, *(ast.unparse(node) for node in module.tree.body[1:])]


def code_from_data(module: Module) -> list[str]:
    """Calls that could run code from a file or a message: pickle in any form, eval, unsafe YAML, a shell."""
    names = _names(module)
    imported = [name for name, _ in module.imports] + [name.rpartition(".")[0] for name, _ in module.imports]
    said = [*imported, *names.values()]
    wrong = [name for name in said if name.split(".")[0] in RUN_CODE_MODULES or name in RUN_CODE]
    bases = {
        node.name: {_dotted(base, names) for base in node.bases}
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    loaders = SAFE_LOADERS | {name for name, of in bases.items() if of & SAFE_LOADERS}
    calls = {id(node.func): node for node in module.nodes if isinstance(node, ast.Call)}
    allowed = ALLOWED_THERE if module.inside(MEGATRON_FILES) else set()
    for node in module.nodes:
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell") and not _is(node.value, False):
            wrong.append(f"{node.arg} on line {node.value.lineno}")
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Store):
            continue
        name = _dotted(node, names)
        safe = name in LOADS and id(node) in calls and _is_safe(calls[id(node)], name, module, loaders, names)
        is_pickling = name.split(".")[-1] in PICKLING_CALLS or getattr(node, "attr", "") in PICKLING_CALLS
        if (name in LOADS and not safe) or (name in RUN_CODE and name not in allowed) or is_pickling:
            wrong.append(f"{name} on line {node.lineno}")
    return wrong


def _is_safe(call: ast.Call, called: str, module: Module, loaders: set[str], names: Mapping[str, str]) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    if called == "torch.load":
        return module.inside(MEGATRON_FILES) and _is(given.get("weights_only"), True)
    if called == "numpy.load":
        return _is(given.get("allow_pickle"), False)
    loader = given.get("Loader") or (call.args[1] if len(call.args) > 1 else None)
    return loader is not None and _dotted(loader, names) in loaders


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def sizes(module: Module) -> list[str]:
    """Files and functions that are too long."""
    lines = len(module.text.splitlines())
    wrong = [f"{lines} lines"] if lines > MAX_LINES else []
    for function in _functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            wrong.append(f"{function.name} has {length} lines")
    return wrong


def vague_names(module: Module) -> list[str]:
    """Names that do not describe a job."""
    names = [module.name.split(".")[-1], *(node.name for node in module.nodes if isinstance(node, ast.ClassDef))]
    return [name for name in names if any(word in name.lower() for word in VAGUE_NAMES)]


Rule = Callable[[Module], list[str]]
RULES: tuple[Rule, ...] = (
    late_imports,
    relative_imports,
    globals_changed,
    environment_reads,
    world_lookups,
    prints,
    code_in_package_files,
    code_from_data,
    sizes,
    vague_names,
)
"""Rules for one module; `layer_order` needs the known modules, and `cycle` the import graph."""
