"""The planner and `--dry-run` use schedules where torch is not installed."""

import pkgutil
import subprocess
import sys

import megalite.pipeline.ir

PROGRAM = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
print("imported", len(sys.argv) - 1)
"""


def test_the_package_imports_without_torch() -> None:
    package = megalite.pipeline.ir
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    assert len(names) >= 10
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"imported {len(names)}"
