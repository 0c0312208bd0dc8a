"""Tokenize text files: see `python tools/preprocess_data.py --help`."""

import sys

from megalite.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
