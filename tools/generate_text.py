#!/usr/bin/env python3
"""Generate text from a checkpoint; the same as `megalite generate`."""

import sys

from megalite.cli.model_commands import GENERATE as main

if __name__ == "__main__":
    sys.exit(main())
