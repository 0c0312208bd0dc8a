"""Convert weights between formats: see `python tools/convert_checkpoint.py --help`."""

import sys

from megalite.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
