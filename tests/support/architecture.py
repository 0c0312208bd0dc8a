"""The house rules of the sources, as functions from one module's syntax tree to what is wrong with it.

`tests/test_architecture.py` applies them to the package, and to small sources that break each of them.
"""

import ast
from collections.abc import Callable, Iterator

from tests.support.layers import Module, imports, is_in

LATE_IMPORTS = {
    "megalite.cli.train": {
        *("megalite.training.trainer", "megalite.data_parallel.peers"),
        "torch.distributed.elastic.multiprocessing.errors",
    },
    "megalite.cli.inspect": {"megalite.cli.inspect_tensors"},
    "megalite.kernels.layer_ops": {"megalite.kernels.yarn"},
    "megalite.models.gpt": {"megalite.kernels.yarn", "megalite.models.offload"},
    "megalite.models.attention": {"megalite.tensor_parallel.shared_heads"},
    "megalite.training.step": {"megalite.training.qk_clip"},
}
"""Imports inside functions of what is always installed: help, dry run and listing start without torch, and most models need
neither YaRN nor shared heads."""

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
"""The only place that reads pickles, through torch's restricted reader."""

MAX_LINES, MAX_FUNCTION_LINES = 500, 80
VAGUE_NAMES = ("util", "helper", "manager", "common", "misc")
PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.distributed.checkpoint"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
RUNNING_TEXT = {"eval", "exec", "compile", "__import__"}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def late_imports(module: Module) -> list[str]:
    """Imports inside functions, and imports by name, beyond those that are stated."""
    wrong = []
    for function in _functions(module.tree):
        for name, _ in imports(function):
            stated = name.rpartition(".")[0] in LATE_IMPORTS.get(module.name, set())
            if not stated and not any(is_in(name, package) for package in OPTIONAL_PACKAGES):
                wrong.append(f"{name} is imported inside {function.name}")
    if module.name not in DISPATCHERS:
        texts = [ast.unparse(node) for node in ast.walk(module.tree) if isinstance(node, (ast.Name, ast.Attribute))]
        texts += [name for name, _ in imports(module.tree)]
        wrong += [text for text in texts if text.split(".")[-1] in ("import_module", "__import__")]
    return wrong


def relative_imports(module: Module) -> list[str]:
    """Imports that start with a dot: the other rules would not see through them."""
    return [name for name, _ in imports(module.tree) if name.startswith(".")]


def globals_changed(module: Module) -> list[str]:
    """`global` statements."""
    return [", ".join(node.names) for node in ast.walk(module.tree) if isinstance(node, ast.Global)]


def environment_reads(module: Module) -> list[str]:
    """The environment anywhere but at the command line and where the launcher's variables are read."""
    if module.inside("megalite.cli", "megalite.topology.topology"):
        return []
    texts = [ast.unparse(node) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    texts += [name for name, _ in imports(module.tree)]
    return [text for text in texts if text in ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv")]


def world_lookups(module: Module) -> list[str]:
    """`get_rank()` and `get_world_size()` without a group."""
    if module.inside("megalite.topology"):
        return []
    return [
        ast.unparse(node)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and not node.args
        and not node.keywords
        and ast.unparse(node.func).split(".")[-1] in ("get_rank", "get_world_size")
    ]


def prints(module: Module) -> list[str]:
    """`print` anywhere but at the command line."""
    if module.inside("megalite.cli"):
        return []
    return [
        f"line {node.lineno}" for node in ast.walk(module.tree) if isinstance(node, ast.Name) and node.id == "print"
    ]


def code_in_package_files(module: Module) -> list[str]:
    """An `__init__.py` that holds more than a docstring (megalite's also has the version and the public names)."""
    if not module.is_package or module.name == "megalite":
        return []
    body = module.tree.body
    wrong = [] if ast.get_docstring(module.tree) else ["no docstring"]
    for node in body[1:]:
        wrong.append(ast.unparse(node))
    return wrong


def code_from_data(module: Module) -> list[str]:
    """Whatever could run code out of a file or a message: pickle in any dress, and eval.

    Megatron-LM's files are pickles: their converter alone may call torch.load, every time with weights_only=True.
    """
    wrong = []
    allowed = set()
    if module.inside(MEGATRON_FILES):
        allowed = {"torch.load", "torch.save"}
        wrong += _unsafe_loads(module.tree)
    for name, _ in imports(module.tree):
        if name.lstrip(".").split(".")[0] in PICKLING_MODULES:
            wrong.append(name)
        wrong += [
            name
            for call in PICKLING_CALLS - allowed
            if name == call or name.startswith(call + ".") or is_tail(name, call)
        ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            wrong += [text for call in PICKLING_CALLS - allowed if text == call or is_tail(text, call)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in RUNNING_TEXT:
            wrong.append(node.id)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            wrong.append("allow_pickle")
    return wrong


def _unsafe_loads(tree: ast.AST) -> list[str]:
    """torch.load in any place but a call with a literal weights_only=True."""
    safe = [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
            for word in node.keywords
        )
    ]
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "load"]
    return [
        f"{ast.unparse(node)} without weights_only=True"
        for node in loads
        if ast.unparse(node).split(".")[0] == "torch" and node not in safe
    ]


def is_tail(text: str, call: str) -> bool:
    """A call given by its last name alone ends the dotted text."""
    return "." not in call and text.split(".")[-1] == call


def sizes(module: Module) -> list[str]:
    """Files and functions that are too long to be one job."""
    lines = len(module.text.splitlines())
    wrong = [f"{lines} lines"] if lines > MAX_LINES else []
    for function in _functions(module.tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            wrong.append(f"{function.name} has {length} lines")
    return wrong


def vague_names(module: Module) -> list[str]:
    """Names that say nothing of the job."""
    last = module.name.split(".")[-1]
    names = [last, *(node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))]
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
