"""Modules of the project as syntax trees, the rows that they belong to, and their imports."""

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROWS: tuple[tuple[str, ...], ...] = (
    ("megalite", "megalite.config"),
    (
        "megalite.topology.layout",
        "megalite.models.shapes",
        "megalite.data_parallel.facts",
        "megalite.pipeline.ir",
        "megalite.checkpoint.manifest",
        "megalite.checkpoint.files",
        "megalite.checkpoint.folders",
        "megalite.checkpoint.safetensors_header",
        "megalite.watchdog",
        "megalite.tokenizers",
    ),
    ("megalite.topology", "megalite.kernels", "megalite.data", "megalite.partition"),
    (
        *("megalite.tensor_parallel", "megalite.context_parallel", "megalite.data_parallel"),
        *("megalite.optimizers", "megalite.pipeline"),
    ),
    ("megalite.models", "megalite.preprocess"),
    ("megalite.checkpoint", "megalite.generation", "megalite.planner"),
    ("megalite.training", "megalite.conversion", "megalite.profiling"),
    ("megalite.parity", "megalite.sweep", "megalite.doctor", "megalite.rehearsal"),
    ("megalite.cli",),
    ("pretrain_gpt", "tools"),
)
"""Packages and modules by row; the longest matching name decides the row of a module. Row 1 does not import torch."""

SIBLINGS = {
    ("megalite.data_parallel", "megalite.tensor_parallel.parameter"),
    ("megalite.data_parallel", "megalite.optimizers.base"),
    ("megalite.doctor", "megalite.parity.pool"),
}
"""Allowed imports between packages of a row: buckets hold parameters of `tensor_parallel`, and a strategy calls
the optimizer's interface."""

ONLY = {
    "megalite.config": {"megalite.config"},
    "megalite.kernels": {"megalite.kernels", "megalite.config"},
    "megalite.optimizers": {*("megalite.optimizers", "megalite.config", "megalite.topology", "megalite.kernels")},
    "megalite.models": {
        *("megalite.models", "megalite.config", "megalite.kernels"),
        *("megalite.tensor_parallel", "megalite.context_parallel", "megalite.topology"),
    },
}
"""Packages that may import less than their row allows: models depend on no pipeline, optimizer or data."""


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    """Dotted name; of a package, without `.__init__`."""
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree; cached, since every rule iterates over them."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """Every imported name with its line; `from a import b` gives `a.b`."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        return found

    def inside(self, *names: str) -> bool:
        """Whether the module is one of these modules, or in one of these packages."""
        return any(is_in(self.name, name) for name in names)


@cache
def read_modules(root: Path) -> list[Module]:
    """The modules of megalite/, tools/ and pretrain_gpt.py below `root`."""
    files = [*sorted(root.glob("megalite/**/*.py")), *sorted(root.glob("tools/*.py")), root / "pretrain_gpt.py"]
    modules = []
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(), is_package))
    return modules


def is_in(name: str, package: str) -> bool:
    """Whether `name` is the package or something in it."""
    return name == package or name.startswith(package + ".")


def row_of(name: str) -> int:
    """The row of a module."""
    fitting = [(len(entry), row) for row, entries in enumerate(ROWS) for entry in entries if is_in(name, entry)]
    return max(fitting)[1]


def package_of(name: str) -> str:
    """`megalite.x` for `megalite.x.y.z`."""
    return ".".join(name.split(".")[:2])


def own_imports(module: Module, known: set[str]) -> set[str]:
    """Imported modules of the project; `from megalite.x import y` gives megalite.x.y if that is a module, or else megalite.x."""
    found = set()
    for name, _ in module.imports:
        if name.split(".")[0] in ("megalite", "pretrain_gpt", "tools"):
            found.add(name if name in known else name.rpartition(".")[0] or name)
    return found


def layer_order(module: Module, known: set[str]) -> list[str]:
    """Imports of a higher row, or of another package in the same row."""
    row, package, wrong = row_of(module.name), package_of(module.name), []
    for name in sorted(own_imports(module, known)):
        lower = row_of(name) < row
        same_package = row_of(name) == row and package_of(name) == package
        sibling = any(is_in(module.name, ours) and name == theirs for ours, theirs in SIBLINGS)
        if not (lower or same_package or sibling):
            wrong.append(f"row {row} imports {name} of row {row_of(name)}")
        allowed = ONLY.get(package)
        if allowed is not None and row == row_of(package) and package_of(name) not in allowed | {"megalite"}:
            wrong.append(f"{package} does not import {package_of(name)}")
    return wrong


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of modules that import each other, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            found = visit(target, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])
