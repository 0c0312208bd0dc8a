"""`megalite evaluate`: measure loss and perplexity of a model on token files or text, on any tp x pp x dp."""

import sys
from argparse import Namespace

import numpy as np
import torch

from megalite.cli.display import table
from megalite.cli.generate import open_model, run_on_ranks
from megalite.cli.model_commands import EVALUATE
from megalite.cli.output import json_text, notify, show
from megalite.config.data import names_text
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.conversion.inference import InferenceModel
from megalite.generation.generate import Chain
from megalite.generation.likelihood import (
    Perplexity,
    TokenStream,
    Windows,
    check_windows,
    measure,
    stream_of_files,
    stream_of_texts,
)
from megalite.preprocess.pieces import Limits
from megalite.topology.topology import Topology

_SEND_WINDOW = 2


main = EVALUATE


def run(flags: Namespace) -> int:
    return run_on_ranks(flags, _evaluate, data_parallel=True)


def _evaluate(flags: Namespace, topology: Topology) -> None:
    if text := next(filter(names_text, flags.data_path or ()), None):
        raise ConfigError(f"--data-path {text} is text, but evaluate needs token files there; use --input {text}")
    fetch_remote_files = imported("megalite.training.setup:fetch_remote_files")
    remote = replace(RunConfig(), data_path=flags.data_path or flags.input)
    paths = fetch_remote_files(remote, world=topology.world, log=notify).data.data_path
    model = open_model(flags, topology, needs_tokenizer=flags.input is not None)
    stream = _stream(flags, paths, model, topology)
    length = flags.seq_length or model.seq_length
    windows = Windows(tokens=len(stream), length=length, stride=flags.stride or length)
    check_windows(model.model, windows)
    chain = Chain(model.stage, topology, send_window=_SEND_WINDOW)
    found = measure(chain, stream, windows, topology, batch_size=flags.batch_size)
    if topology.rank == 0:
        show(_as_json(model, windows, found) if flags.json else _as_text(model, windows, found))


def _stream(flags: Namespace, paths: list[str], model: InferenceModel, topology: Topology) -> TokenStream:
    """Return the tokens to predict. Every rank reads token files; rank 0 reads text and broadcasts its tokens."""
    stream = TokenStream([])
    with topology.world.errors_on_all_ranks():
        try:
            if flags.data_path is not None:
                assert model.model.vocab_size is not None
                stream = stream_of_files(paths, model.model.vocab_size, model.tokenizer_sha256)
            elif topology.rank == 0:
                assert model.tokenizer is not None
                limits, key = Limits(text_documents=flags.text_documents or "file"), flags.json_key or "text"
                stream = stream_of_texts(paths, key=key, limits=limits, tokenizer=model.tokenizer)
        except OSError as error:
            raise ConfigError(f"cannot read the data: {error}") from None
    return stream if flags.data_path is not None else _broadcast(stream, topology)


def _broadcast(stream: TokenStream, topology: Topology) -> TokenStream:
    if topology.world.size == 1:
        return stream
    tokens, text_bytes = topology.world.broadcast_json([len(stream), stream.text_bytes])
    ids = torch.empty(tokens, dtype=torch.int32, device=topology.device)
    if topology.rank == 0:
        ids.copy_(torch.from_numpy(np.asarray(stream.parts[0], dtype=np.int32)))
    topology.world.broadcast(ids)
    return TokenStream([ids.cpu().numpy()], text_bytes)


def _as_json(model: InferenceModel, windows: Windows, found: Perplexity) -> str:
    report = {
        "model": str(model.path),
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "bytes": found.text_bytes,
        "windows": found.windows,
        "seq_length": windows.length,
        "stride": windows.stride,
    }
    return json_text(report)


def _as_text(model: InferenceModel, windows: Windows, found: Perplexity) -> str:
    count = f"{found.windows:,} windows of {windows.length}, stride {windows.stride}"
    rows = [
        ("model", str(model.path)),
        ("tokens", f"{found.tokens:,} predicted, in {count}"),
        ("loss", f"{found.loss:.6f}"),
        ("perplexity", f"{found.perplexity:.4f}"),
    ]
    if found.bits_per_byte is not None:
        rows.append(("bits per byte", f"{found.bits_per_byte:.4f}, of {found.text_bytes:,} bytes"))
    return "\n".join(table(rows))


if __name__ == "__main__":
    sys.exit(main())
