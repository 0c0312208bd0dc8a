"""The sources follow the architecture: allowed imports, and forbidden constructs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megalite
from megalite.config.yaml_text import UniqueKeyLoader
from tests.support.architecture import (
    RULES,
    Rule,
    code_from_data,
    code_in_package_files,
    environment_reads,
    globals_changed,
    late_imports,
    prints,
    relative_imports,
    sizes,
    vague_names,
    world_lookups,
)
from tests.support.layers import ROWS, SIBLINGS, Module, cycle, is_in, layer_order, own_imports, read_modules, row_of
from tests.support.measures import CEILINGS, measures

ROOT = Path(__file__).parent.parent
MODULES = read_modules(ROOT)
KNOWN = {module.name for module in MODULES}


def test_all_modules_are_scanned() -> None:
    assert {"megalite.training.trainer", "megalite.pipeline.ir.lower", "pretrain_gpt", "tools.preprocess_data"} <= KNOWN
    assert len(MODULES) >= 100


def test_imports_follow_the_rows() -> None:
    wrong = {module.name: found for module in MODULES if (found := layer_order(module, KNOWN))}
    assert wrong == {}


def test_every_listed_name_exists() -> None:
    stated = {name for row in ROWS for name in row} | {name for pair in SIBLINGS for name in pair}
    assert {name for name in stated if not any(is_in(known, name) for known in KNOWN)} == set()


def test_every_listed_exception_is_used() -> None:
    for ours, theirs in SIBLINGS:
        users = [module.name for module in MODULES if is_in(module.name, ours) and theirs in own_imports(module, KNOWN)]
        assert users, f"no module of {ours} imports {theirs}: take it out of SIBLINGS"


TOOLS = (
    *("planner", "preprocess", "profiling", "sweep", "parity", "rehearsal", "conversion", "generation", "doctor"),
    "cli",
)


@pytest.mark.parametrize("tool", ["megalite.planner", "megalite.preprocess"])
def test_core_does_not_import_tools(tool: str) -> None:
    """Code that both the planner and training need is below both, in megalite.partition."""
    for module in MODULES:
        if module.name.startswith("megalite.") and module.name.split(".")[1] not in TOOLS:
            found = [name for name in own_imports(module, KNOWN) if is_in(name, tool)]
            assert found == [], module.name


def test_no_import_cycles() -> None:
    assert cycle({module.name: own_imports(module, KNOWN) for module in MODULES}) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_modules_follow_each_rule(rule: Rule) -> None:
    wrong = {module.name: found for module in MODULES if (found := rule(module))}
    assert wrong == {}


def breaks(name: str, text: str, *, is_package: bool = False) -> Module:
    return Module(name, text, is_package)


# Violations that each rule must detect.
BROKEN: list[tuple[Rule, Module]] = [
    (late_imports, breaks("megalite.models.x", "def f():\n    from megalite.models.gpt import GPTStage")),
    (late_imports, breaks("megalite.cli.train", "def f():\n    from megalite.training.setup import resolve")),
    (late_imports, breaks("megalite.data.x", "from importlib import import_module")),
    (relative_imports, breaks("megalite.models.x", "from .gpt import GPTStage")),
    (globals_changed, breaks("megalite.cli.x", "n = 0\ndef f():\n    global n\n    n = 1")),
    (environment_reads, breaks("megalite.training.x", "import os\nrank = os.environ['RANK']")),
    (environment_reads, breaks("megalite.topology.group", "import os\nos.getenv('RANK')")),
    (world_lookups, breaks("megalite.training.x", "import torch.distributed as dist\ndist.get_rank()")),
    (world_lookups, breaks("megalite.training.x", "from torch.distributed import get_world_size\nget_world_size()")),
    (prints, breaks("megalite.training.x", "print('hello')")),
    (prints, breaks("megalite.training.x", "log = print")),
    (
        code_in_package_files,
        breaks("megalite.x", '"""Doc."""\nfrom megalite.config.run import RunConfig', is_package=True),
    ),
    (code_in_package_files, breaks("megalite.x", "", is_package=True)),
    (code_from_data, breaks("megalite.x", "from pickle import loads")),
    (code_from_data, breaks("megalite.x", "import torch\ntorch.load('f')")),
    (code_from_data, breaks("megalite.x", "from torch import save")),
    (code_from_data, breaks("megalite.x", "import torch.distributed.checkpoint as dcp")),
    (code_from_data, breaks("megalite.x", "import torch.distributed as dist\ndist.broadcast_object_list([])")),
    (code_from_data, breaks("megalite.conversion.megatron.x", "load = torch.load")),
    (code_from_data, breaks("megalite.conversion.megatron.x", "torch.load('f', weights_only=flag)")),
    (code_from_data, breaks("megalite.x", "eval('1')")),
    (code_from_data, breaks("megalite.x", "from torch.distributed import all_gather_object as gather\ngather([], 1)")),
    (code_from_data, breaks("megalite.x", "import torch as t\nload = t.load('x', weights_only=True)")),
    (code_from_data, breaks("megalite.x", "import numpy as np\nnp.load('x')")),
    (code_from_data, breaks("megalite.x", "import yaml\nyaml.load('x', yaml.Loader)")),
    (code_from_data, breaks("megalite.x", "run = exec")),
    (code_from_data, breaks("megalite.x", "import subprocess\nsubprocess.run('ls', shell=True)")),
    (code_from_data, breaks("megalite.x", "np.load('f', allow_pickle=flag)")),
    (sizes, breaks("megalite.x", "a = 1\n" * 501)),
    (sizes, breaks("megalite.x", "def f():\n" + "    a = 1\n" * 80)),
    (vague_names, breaks("megalite.training.utils", "")),
    (vague_names, breaks("megalite.training.x", "class CheckpointManager:\n    pass")),
]


@pytest.mark.parametrize("rule, module", BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_detects_a_violation(rule: Rule, module: Module) -> None:
    assert rule(module)


def test_every_rule_has_a_violation() -> None:
    assert {rule for rule, _ in BROKEN} == set(RULES)


def test_rules_accept_good_code() -> None:
    text = '''"""A module."""
import os
import re
from pathlib import Path

PATTERN = re.compile("a")


def f(model, group, folder: Path):
    import tokenizers
    model.eval()
    group.get_rank(1)
    return os.fspath(folder), tokenizers
'''
    for rule in RULES:
        assert rule(Module("megalite.training.x", text)) == [], rule.__name__
    restricted = "import torch as t\nload = t.load('x', weights_only=True)"
    assert code_from_data(Module("megalite.conversion.megatron.x", restricted)) == []


def test_yaml_loader_is_safe() -> None:
    assert UniqueKeyLoader.__mro__[1] is yaml.SafeLoader
    own = {name for name in vars(UniqueKeyLoader) if not name.startswith("__")}
    assert own == {"construct_mapping", "yaml_implicit_resolvers"}
    assert UniqueKeyLoader.yaml_constructors is yaml.SafeLoader.yaml_constructors


@pytest.mark.parametrize(
    "name, text, is_wrong",
    [
        ("megalite.config.x", "from megalite.topology.layout import ParallelLayout", True),
        ("megalite.pipeline.ir.x", "from megalite.pipeline.executor import Executor", True),
        ("megalite.data_parallel.x", "from megalite.tensor_parallel.layers import linear", True),
        ("megalite.models.x", "from megalite.data.loader import Microbatch", True),
        ("megalite.training.x", "def f():\n    from megalite.cli.train import main", True),
        ("megalite.models.x", "if TYPE_CHECKING:\n    from megalite.training.step import Stepper", True),
        ("megalite.planner.x", "from megalite.models.shapes import stage_shapes", False),
        ("megalite.data_parallel.x", "from megalite.tensor_parallel.parameter import ShardedParameter", False),
        ("megalite.checkpoint.save", "from megalite import __version__", False),
    ],
)
def test_layer_order_detects_violations(name: str, text: str, is_wrong: bool) -> None:
    assert bool(layer_order(Module(name, text), KNOWN)) == is_wrong


def test_import_cycle_is_detected() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"a"}}) == ["a", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


NEEDS_TORCH = (
    "megalite.planner.elastic",
    "megalite.data.loader",
    "megalite.cli.generate",
    "megalite.cli.layout_checks",
    "megalite.cli.convert",
    "megalite.cli.doctor",
    "megalite.cli.inspect_tensors",
    "megalite.cli.lm_eval",
    "megalite.cli.profile",
)
TORCH_FREE_PACKAGES = ("megalite.partition", "megalite.planner", "megalite.data", "megalite.preprocess", "megalite.cli")
"""Modules beyond rows 0 and 1 of which dry run, preprocessing and help consist."""

IMPORT_WITHOUT_TORCH = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed += 1
        print(f"{name}: {error}")
sys.exit(failed > 0 or "torch" in sys.modules)
"""


def import_without_torch(names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_torch_free_modules_need_no_torch() -> None:
    names = [
        module.name
        for module in MODULES
        if (row_of(module.name) <= 1 or module.inside(*TORCH_FREE_PACKAGES)) and module.name not in NEEDS_TORCH
    ]
    assert {"megalite.checkpoint.manifest", "megalite.cli.dry_run", "megalite.partition.memory"} <= set(names)
    others = ["pretrain_gpt", "megalite.optimizers.schedules", "megalite.conversion.model_folder"]
    done = import_without_torch([*names, *others, "megalite.kernels.layer_ops"])
    assert done.stdout == "megalite.kernels.layer_ops: torch must not be imported here\n", "the last one needs torch"


def test_public_names_are_imported_on_use() -> None:
    """(That `import megalite` alone imports no torch is tested above.)"""
    assert megalite.Trainer.__module__ == "megalite.training.trainer"
    assert all(getattr(megalite, name) is not None for name in megalite.__all__)


def test_the_project_does_not_grow() -> None:
    """`python -m tests.support.measures` prints the numbers; lower a ceiling when something has shrunk."""
    found = measures()
    assert {name: (found[name], most) for name, most in CEILINGS.items() if found[name] > most} == {}
    assert 130 <= found["megalite: median file"] <= 300


def test_imports_by_name_exist() -> None:
    """`"module:attribute"` in a registry, which neither mypy nor an import at the start checks."""
    named = {
        (module.name, target.replace("{_HERE}", here))
        for module in MODULES
        for here in ("".join(re.findall(r'^_HERE = "(.+)"', module.text, re.MULTILINE)),)
        for target in re.findall(r'"((?:megalite|\{_HERE\})[\w.]+:\w+)"', module.text)
    }
    defined = {
        module.name: {
            *(node.name for node in module.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)),
            *(target.id for node in module.tree.body for target in _assigned(node)),
        }
        for module in MODULES
    }
    assert len(named) > 40
    missing = [(owner, target) for owner, target in named if not _is_defined(target, defined)]
    assert missing == []


def _assigned(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target for target in targets if isinstance(target, ast.Name)]


def _is_defined(target: str, defined: dict[str, set[str]]) -> bool:
    module, _, name = target.partition(":")
    return name in defined.get(module, set())
