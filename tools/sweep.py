"""Run many configurations and compare them: see `python tools/sweep.py --help`."""

import sys

from megalite.cli.sweep import main

if __name__ == "__main__":
    sys.exit(main())
