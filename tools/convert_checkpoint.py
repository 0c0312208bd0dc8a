"""Convert weights between formats: see `python tools/convert_checkpoint.py --help`."""

import sys

from megalite.cli.model_commands import CONVERT as main

if __name__ == "__main__":
    sys.exit(main())
