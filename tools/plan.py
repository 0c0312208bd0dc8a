"""Find the fastest layouts of a model on a cluster: see `python tools/plan.py --help`."""

import sys

from megalite.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
