"""Token files by Ray Data: a block a part, on any machines that see the files; then the parts are joined.

python examples/preprocess/with_ray.py --input corpus/ --output-prefix data/corpus --tokenizer-model tokenizer.json --parts 64
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray

from megalite.config.data import DataConfig
from megalite.preprocess.job import PreprocessJob, shard_name
from megalite.preprocess.merge_split import merge
from megalite.preprocess.run import preprocess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--parts", type=int, default=8)
    flags = parser.parse_args()
    inputs = tuple(os.path.abspath(path) for path in flags.input)  # noqa: PTH100 keeps links
    prefix, tokenizer = Path(flags.output_prefix).absolute(), Path(flags.tokenizer_model).absolute()

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        shard = int(row["id"]), flags.parts
        job = PreprocessJob(
            inputs=inputs,
            output_prefix=shard_name(str(prefix), shard),
            tokenizer=DataConfig(tokenizer_model=str(tokenizer)),
            append_eod=True,
            shard=shard,
            restart=True,  # Ray repeats a task if its machine was lost
        )
        done = preprocess(job)
        return {"outputs": " ".join(done.outputs), "documents": done.documents}

    rows = ray.data.range(flags.parts, override_num_blocks=flags.parts).map(tokenize).take_all()
    parts = sorted(output for row in rows for output in row["outputs"].split())
    written = merge(parts, f"{prefix}_text_document")
    print(f"{written.prefix}: {written.documents:,} documents, of {len(parts)} parts")


if __name__ == "__main__":
    main()
