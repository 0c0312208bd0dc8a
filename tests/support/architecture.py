"""The house rules of the sources, as functions from one module's syntax tree to what is wrong with it.

`tests/test_architecture.py` applies them to the package, and to small sources that break each of them.
"""

import ast
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.support.layers import Module, is_in

LATE_IMPORTS = {
    "megalite.cli.train": {
        *("megalite.training.trainer", "megalite.data_parallel.peers"),
        "torch.distributed.elastic.multiprocessing.errors",
    },
    "megalite.cli.inspect": {"megalite.cli.inspect_tensors"},
    "megalite.models.gpt": {"megalite.models.offload"},
    "megalite.training.step": {"megalite.training.qk_clip"},
}
"""Imports inside functions of what is always installed: help, dry run and listing start without torch."""

DISPATCHERS = {
    "megalite",
    "megalite.cli.command",
    "megalite.config.registry",
    "megalite.kernels.registry",
    "megalite.kernels.probes",
}
"""Modules that import by name: public names, when they are used; one command's module, when it is called; a kernel's, when it is chosen; apex's
extensions, to see whether they load."""

OPTIONAL_PACKAGES = {
    *("matplotlib", "pyarrow", "tensorboard", "tiktoken", "tokenizers", "torch.utils.tensorboard"),
    *("transformers", "triton", "wandb", "mlflow", "comet_ml", "zstandard", "jinja2", "rich", "fsspec", "datasets"),
    "ray",
}
"""Third-party packages of the extras, and those that help starts without: imported where they are used."""

MEGATRON_FILES = "megalite.conversion.megatron"
"""The only place that reads pickles, through torch's restricted reader: torch.load with weights_only=True."""

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
"""Of torch.distributed; whatever they are called on."""
RUN_CODE = {
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
"""Of these, what `MEGATRON_FILES` says: it writes such files too, and names the classes that torch may build."""
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "megalite.config.yaml_text.UniqueKeyLoader"}
LOADS = {"torch.load", "numpy.load", "yaml.load"}
"""Safe with the right arguments."""


def _functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _names(module: Module) -> dict[str, str]:
    """Local name -> what it was imported as: `np` -> `numpy`, `ld` -> `torch.load`."""
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
    """`torch.load` of `t.load` after `import torch as t`; nothing of what is more than names and dots."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def late_imports(module: Module) -> list[str]:
    """Imports inside functions, and imports by name, beyond those that are stated."""
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
    """Imports that start with a dot: the other rules would not see through them."""
    return [name for name, _ in module.imports if name.startswith(".")]


def globals_changed(module: Module) -> list[str]:
    """`global` statements."""
    return [", ".join(node.names) for node in module.nodes if isinstance(node, ast.Global)]


def environment_reads(module: Module) -> list[str]:
    """The environment anywhere but at the command line and where the launcher's variables are read."""
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
    """`print` anywhere but at the command line."""
    if module.inside("megalite.cli"):
        return []
    return [f"line {node.lineno}" for node in module.nodes if isinstance(node, ast.Name) and node.id == "print"]


def code_in_package_files(module: Module) -> list[str]:
    """An `__init__.py` that holds more than a docstring (megalite's also has the version and the public names)."""
    if not module.is_package or module.name == "megalite":
        return []
    wrong = [] if ast.get_docstring(module.tree) else ["no docstring"]
    return [*wrong, *(ast.unparse(node) for node in module.tree.body[1:])]


def code_from_data(module: Module) -> list[str]:
    """Whatever could run code out of a file or a message: pickle in any dress, eval, unsafe YAML, a shell."""
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
    """Files and functions that are too long to be one job."""
    lines = len(module.text.splitlines())
    wrong = [f"{lines} lines"] if lines > MAX_LINES else []
    for function in _functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            wrong.append(f"{function.name} has {length} lines")
    return wrong


def vague_names(module: Module) -> list[str]:
    """Names that say nothing of the job."""
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
"""Rules that look at one module alone; `layer_order` needs to know all, and `cycle` their graph."""
