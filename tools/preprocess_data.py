"""Tokenize text files: see `python tools/preprocess_data.py --help`."""

import sys

from megalite.cli.model_commands import PREPROCESS as main

if __name__ == "__main__":
    sys.exit(main())
