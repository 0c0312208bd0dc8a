"""`megalite generate` and `megalite evaluate`: generate text with a checkpoint of any layout or a Hugging Face folder, and
measure its loss and perplexity on token files or text, on any tp x pp (x dp)."""

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from megalite.checkpoint.manifest import CheckpointMissing
from megalite.cli.display import table
from megalite.cli.output import json_text, notify, show
from megalite.config.data import DataConfig, is_address, names_text
from megalite.config.describe import replace
from megalite.config.errors import ConfigError, plural
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.conversion.native import DTYPES
from megalite.conversion.open import InferenceModel, load_model
from megalite.generation.continuation import Continuation, GrowingText, Sampling, read_prompts
from megalite.generation.generate import Chain, generate_batch
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
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.chat import require_chat_template
from megalite.tokenizers.subword import HuggingFaceTokenizer
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, joined


def layout_of(flags: Namespace, world_size: int, *, data_parallel: bool) -> ParallelLayout:
    """Return the layout for the flags and the number of ranks.

    Without --tp, the ranks that --pp leaves form one tp group; with `data_parallel` they are replicas of the model."""
    for axis, reason in (("cp", "a sequence is not split"), ("ep", "experts are split by --tp")):
        if getattr(flags, axis) != 1:
            raise ConfigError(
                f"--{axis} {getattr(flags, axis)} is not supported ({reason}); leave it out and use --tp and --pp"
            )
    pp = flags.pp or 1
    tp = flags.tp or (1 if data_parallel else max(1, world_size // pp))
    if world_size % (tp * pp) or (world_size != tp * pp and not data_parallel):
        works = (tp, world_size // tp) if world_size % tp == 0 else (world_size, 1)
        raise ConfigError(
            f"tp {tp} x pp {pp} = {tp * pp} does not fit {plural(world_size, 'started rank')}; "
            f"use --tp {works[0]} --pp {works[1]}, or start {tp * pp} (torchrun --nproc-per-node {tp * pp})"
        )
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def open_model(flags: Namespace, topology: Topology, *, needs_tokenizer: bool = True) -> InferenceModel:
    """Load the model of the flags on the ranks of the topology; download addresses once per node.

    Collectives: those of `fetch_remote_files`, if one is an address, and of `load_model`."""

    def log(line: str) -> None:
        if topology.rank == 0:
            print(line, file=sys.stderr)

    load, tokenizer_model = flags.load, flags.tokenizer_model
    if is_address(str(load)) or is_address(tokenizer_model or ""):
        remote = replace(RunConfig(), load=str(load), ckpt_step=flags.ckpt_step, tokenizer_model=tokenizer_model)
        found = imported("megalite.training.setup:fetch_remote_files")(remote, world=topology.world, log=log)
        if not Path(found.checkpoint.load).exists():
            raise CheckpointMissing(f"no complete checkpoint at {load}; give the address of the folder of steps")
        load, tokenizer_model = found.checkpoint.load, found.data.tokenizer_model
    return load_model(
        Path(load),
        topology,
        step=flags.ckpt_step,
        ema=flags.weights == "ema",
        dtype=DTYPES.get(flags.dtype),
        tokenizer=DataConfig(tokenizer_model=tokenizer_model, tiktoken_pattern=flags.tiktoken_pattern),
        needs_tokenizer=needs_tokenizer,
        log=log,
    )


def run_on_ranks(flags: Namespace, work: Callable[[Namespace, Topology], None], *, data_parallel: bool) -> int:
    """Join the other ranks, call `work` and return the exit status. `data_parallel`: see `layout_of`."""
    launch = Launch.from_environment()
    layout = layout_of(flags, launch.world_size, data_parallel=data_parallel)
    device = launch.device(flags.device)
    with joined(launch, device):
        work(flags, Topology.create(layout, rank=launch.rank, device=device))
    return 0


def run(flags: Namespace) -> int:
    _sampling(flags)  # checks the values
    unused = next((name for name in ("top_k", "top_p", "seed") if getattr(flags, name) is not None), None)
    if flags.temperature == 0.0 and unused is not None:
        flag = f"--{unused.replace('_', '-')} {getattr(flags, unused)}"
        raise ConfigError(f"{flag} has no effect with --temperature 0 (the most likely token); leave it out")
    if flags.stop and "" in flags.stop:
        raise ConfigError("--stop is empty; give the text to end before, or leave it out")
    return run_on_ranks(flags, _generate, data_parallel=False)


def _sampling(flags: Namespace) -> Sampling:
    return Sampling(
        max_new_tokens=flags.max_new_tokens,
        repetition_penalty=flags.repetition_penalty,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed or 0,
    )


def _generate(flags: Namespace, topology: Topology) -> None:
    texts: list[Any] = []
    with topology.world.errors_on_all_ranks():
        if topology.rank == 0:
            texts = flags.prompt or read_prompts(flags.prompts, flags.prompt_key, chat=flags.chat)
            _refuse_existing(flags.output)
    texts = topology.world.broadcast_json(texts)
    model = open_model(flags, topology)
    assert model.tokenizer is not None
    tokenizer, start = model.tokenizer, _start_tokens(model, flags.add_bos)
    if flags.chat:  # chat templates contain the start tokens
        texts, start = _apply_template(tokenizer, texts), []
    prompts = [start + tokenizer.encode(text) for text in texts]

    def text_of(prompt: Sequence[int]) -> GrowingText:
        return GrowingText(tokenizer.decode, prompt, flags.stop or ())

    output = _open_output(flags.output, topology)
    continuations = generate_batch(
        Chain(model.stage, topology),
        prompts,
        _sampling(flags),
        stop_token_ids=model.stop_token_ids,
        batch_size=flags.batch_size,
        make_text=text_of if topology.rank == 0 or flags.stop else None,
    )
    if topology.rank == 0:
        _print(continuations, texts, output)
    else:
        deque(continuations, maxlen=0)  # run this rank's part without output


def _print(continuations: Iterator[Continuation], prompts: Sequence[str], output: TextIO | None) -> None:
    printer, tokens, start = _Printer(prompts, output), 0, time.perf_counter()
    for continuation in continuations:
        tokens += continuation.finish != "eod"
        printer.take(continuation)
    seconds = time.perf_counter() - start
    if output is not None:
        output.close()
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _start_tokens(model: InferenceModel, add_bos: bool | None) -> list[int]:
    """Return the tokens to put before every prompt."""
    wanted = model.is_huggingface if add_bos is None else add_bos
    tokenizer = model.tokenizer
    found = tokenizer.beginning() if wanted and isinstance(tokenizer, HuggingFaceTokenizer) else []
    if add_bos and not found:
        raise ConfigError(f"--add-bos has no effect on {model.path}: its tokenizer has no start tokens; leave it out")
    return found


def _apply_template(tokenizer: Tokenizer, prompts: Sequence[Any]) -> list[str]:
    """Apply the chat template to prompts, which are messages of a user or lists of messages."""
    template = require_chat_template(tokenizer, "--chat")
    try:
        return [
            template.prompt([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            for prompt in prompts
        ]
    except ValueError as error:
        raise ConfigError(f"--chat: {error}; give messages that it takes") from None


def _refuse_existing(output: Path | None) -> None:
    if output is None:
        return
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output {output} exists; remove it, or give another file")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist; make it first")


def _open_output(path: Path | None, topology: Topology) -> TextIO | None:
    with topology.world.errors_on_all_ranks():
        if topology.rank != 0 or path is None:
            return None
        try:
            return path.open("x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}; give a file that can be written") from None


class _Printer:
    """Prints texts in the order of the prompts: a single text while it grows, several texts each when it is complete.

    `output`: file that receives a line of JSON for each text; None: stdout."""

    def __init__(self, prompts: Sequence[str], output: TextIO | None) -> None:
        self._prompts, self._output = prompts, output
        self._streams = output is None and len(prompts) == 1
        self._ready: dict[int, Continuation] = {}
        self._next = 0
        if self._streams:
            print(prompts[0], end="", flush=True)

    def take(self, continuation: Continuation) -> None:
        assert continuation.text is not None
        if self._streams:
            print(continuation.text.take(), end="" if continuation.finish is None else "\n", flush=True)
        if continuation.finish is not None:
            self._ready[continuation.index] = continuation
        while self._next in self._ready:
            done = self._ready.pop(self._next)
            if not self._streams:
                self._complete(done)
            self._next += 1

    def _complete(self, done: Continuation) -> None:
        assert done.text is not None
        prompt = self._prompts[done.index]
        if self._output is None:
            print(f"--- {done.index + 1} of {len(self._prompts)}\n{prompt}{done.text.text}", flush=True)
            return
        text, tokens = done.text.text, len(done.new)
        record = {"prompt": prompt, "text": text, "tokens": tokens, "finish": done.finish}
        self._output.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._output.flush()


_SEND_WINDOW = 2


def run_evaluate(flags: Namespace) -> int:
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
        show(_perplexity_json(model, windows, found) if flags.json else _perplexity_text(model, windows, found))


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


def _perplexity_json(model: InferenceModel, windows: Windows, found: Perplexity) -> str:
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


def _perplexity_text(model: InferenceModel, windows: Windows, found: Perplexity) -> str:
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
