#!/usr/bin/env python3
"""Train a GPT: `torchrun --nproc-per-node 8 pretrain_gpt.py --config run.yaml --tp 2 --pp 2`; --help tells more."""

import sys

from megalite.cli.train import main

if __name__ == "__main__":
    sys.exit(main(program="pretrain_gpt.py"))
