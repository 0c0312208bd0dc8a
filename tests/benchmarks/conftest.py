"""The benchmarks are scripts: their modules find each other by the folder that the script is in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
