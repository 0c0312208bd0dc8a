"""Define the flags of the commands for data and models. Imports no torch, so that help and errors appear at once."""

from pathlib import Path

from megalite.cli.command import IMPORT, Command, Flag, byte_size, path_or_address
from megalite.config.data import local_path
from megalite.config.describe import settings
from megalite.config.numbers import whole_number
from megalite.config.reading import PRECISIONS
from megalite.conversion.weights import FORMATS, TRANSFORMER_IMPLEMENTATIONS

VERIFIED_BELOW = 200_000_000  # smaller models, in parameters, are verified by default
DOCUMENT_MB = 8
SHOWN_TOKENS = 64  # default number of tokens shown per document

FORMS = ("file", "line", "paragraph")
BYTE_LEVEL = "byte-level-bpe"
SENTENCEPIECE = {"sentencepiece-bpe": "bpe", "sentencepiece-unigram": "unigram"}
KINDS = settings()["tokenizer_type"].choices

_FILES = ".jsonl, .ndjson, .txt (.gz, .zst) and .parquet: files, folders and globs of them; - is jsonl from stdin"
_INPUT = Flag("--input PATH ...", _FILES, required=True)
_KEYS = Flag("--json-keys KEY ...", "keys of the text (text)", default=("text",))
_JSON = Flag("--json", "print JSON", bool)
_WEIGHTS = Flag(
    "--weights", "ema: the moving average of a run with --ema-decay", default="trained", choices=("trained", "ema")
)
_STOPPED = "130 after Ctrl-C, 143 after SIGTERM."
_WRITTEN = f"Exit status: 0 written, 2 bad input or a full disk: nothing is written. {_STOPPED}"
_ONE_RUN = "leave it out: --input takes many files, and the output is in their order with any --workers"
_NOT_SUPPORTED = {
    "leave it out: a document is one sequence, as GPT training needs it": "--split-sentences --lang",
    "leave it out: newlines are always kept": "--keep-newlines",
    "leave it out: a document without text is a bad line": "--keep-empty",
    _ONE_RUN: "--partitions --keep-sequential-samples",
    "leave it out: progress is shown": "--log-interval",
    "leave it out: work is distributed by bytes": "--chunk-size",
    "leave it out: the format is always .bin and .idx": "--dataset-impl",
    "leave it out: --workers is all usable cores by default": "--find-optimal-num-workers --workers-to-check "
    "--max-documents --performance-dir",
    "leave it out: training pads the vocabulary": "--vocab-extra-ids --make-vocab-size-divisible-by --padded-vocab-size",
    "leave it out: special tokens come from the tokenizer's files": "--special-tokens --tokenizer-special-tokens "
    "--tiktoken-special-tokens --tiktoken-num-special-tokens",
    "leave it out: the tokenizer's files or --tokenizer-type determine its type": "--tokenizer-metadata",
    "leave it out: only one set of tokenizers exists": "--legacy-tokenizer",
}
"""Advice -> unsupported flags of Megatron-LM's script."""
_HARMLESS = {"--partitions": "1", "--log-interval": "[0-9]+", "--dataset-impl": "mmap"}
_FOREIGN = {
    flag: (advice, _HARMLESS.get(flag, "")) for advice, flags in _NOT_SUPPORTED.items() for flag in flags.split()
}


def _tokenizer(vocab_size: str) -> list[Flag]:
    """Return the flags that choose a tokenizer. `vocab_size`: help of --vocab-size."""
    kinds = f"one of {', '.join(KINDS)}; default: by the content of the files"
    return [
        Flag("--tokenizer-type KIND", kinds),
        Flag("--tokenizer-model FILE", "SentencePiece .model, tokenizer.json or tiktoken file, or their folder"),
        Flag("--vocab-file FILE", "GPT-2 BPE vocab.json"),
        Flag("--merge-file FILE", "GPT-2 BPE merges.txt"),
        Flag(
            "--tiktoken-pattern PATTERN",
            "how a tiktoken file splits text: r50k_base, p50k_base, cl100k_base, o200k_base, llama3, gpt2, v1, v2, or a regex",
        ),
        Flag("--vocab-size N", vocab_size, int),
    ]


def _output(text: str) -> Flag:
    return Flag("--output-prefix PREFIX", text, local_path, required=True)


PREPROCESS = Command(
    "megalite preprocess",
    "turn jsonl, parquet or text into token files",
    "Turn jsonl, text or parquet files into token files. The same command resumes a stopped run.",
    [
        _INPUT,
        _output("writes PREFIX_KEY_document.bin, .idx and .json; PREFIX.unfinished until it is complete"),
        Flag("--json-keys KEY ...", "keys of the text (text)"),
        Flag("--text-documents", "what a document is in a text file (file)", default="file", choices=FORMS),
        Flag("--sft", "lines hold prompt and response, or chat messages, to fine-tune on", bool),
        Flag("--append-eod", "end each document with the end-of-document token", bool),
        Flag(
            "--max-document-mb MB",
            f"leave out larger documents: tokenizing takes up to 70 times their size per worker ({DOCUMENT_MB})",
            float,
            default=float(DOCUMENT_MB),
        ),
        *_tokenizer("for NullTokenizer"),
        Flag("--workers N", "tokenizer processes; default: the usable cores", int),
        Flag("--shard I/N", "part I of N of the input, on one of N machines; data merge joins the parts"),
        Flag("--strict", "stop at the first bad line", bool),
        Flag("--restart", "discard the work of a stopped run and replace finished files", bool),
        Flag("--dry-run", "show the inputs and the first document's tokens, write nothing", bool),
    ],
    ("megalite preprocess --input *.jsonl.zst --output-prefix corpus --tokenizer-model my.model --append-eod",),
    disables={"--sft": "--json-keys --append-eod"},
    foreign=_FOREIGN,
)

TRAIN_TOKENIZER = Command(
    "megalite train-tokenizer",
    "train a tokenizer on text",
    "Train a tokenizer on the training corpus of a model. Default: 2048 pieces from at most 20 MB of the text. An existing "
    "file is not replaced.",
    [
        _INPUT,
        _output(f"writes PREFIX.model, or PREFIX.json for {BYTE_LEVEL}"),
        Flag(
            "--type KIND",
            f"{BYTE_LEVEL} (GPT-2's) needs the package tokenizers (sentencepiece-bpe)",
            default="sentencepiece-bpe",
            choices=(*SENTENCEPIECE, BYTE_LEVEL),
        ),
        Flag(
            "--pattern", f"how {BYTE_LEVEL} cuts words (gpt2); gpt4 cuts numbers into threes", choices=("gpt2", "gpt4")
        ),
        Flag(
            "--vocab-size N", "pieces (2048); models use 32000 or more, from at least 10 MB of text", int, default=2048
        ),
        _KEYS,
        Flag("--max-megabytes MB", "read at most this much text, evenly from all inputs (20)", float, default=20.0),
    ],
    ("megalite train-tokenizer --input corpus/*.jsonl --output-prefix tokenizer --vocab-size 32000",),
    "Exit status: 0 written, 2 bad input or a full disk: nothing is written.",
    run="megalite.cli.preprocess:run_train_tokenizer",
)

_DATASETS = Flag(
    "datasets PREFIX ...", "a path without .bin and .idx, one of a dataset's files, or a folder of datasets"
)

DATA_VERIFY = Command(
    "megalite data verify",
    "read every byte and report the first fault",
    "Check index, tokens and hashes of datasets.",
    [
        _DATASETS,
        *_tokenizer("token ids must be below N, and below the side file's"),
        Flag("--no-hash", "do not compare sha256 with the side file: faster", bool),
        _JSON,
    ],
    ("megalite data verify corpus_text_document --tokenizer-model tokenizer.model",),
    "Exit status: 0 all are sound, 1 one is damaged, 2 a dataset or its side file could not be read. " + _STOPPED,
    run="megalite.cli.data:verify_datasets",
)

DATA_INSPECT = Command(
    "megalite data inspect",
    "show counts, lengths and documents",
    "Show the contents of datasets.",
    [
        _DATASETS,
        Flag("--documents A:B", "show the tokens of these documents, such as 0:3"),
        Flag("--max-tokens N", f"maximum tokens shown of each ({SHOWN_TOKENS})", whole_number, default=SHOWN_TOKENS),
        *_tokenizer("for NullTokenizer"),
        _JSON,
    ],
    ("megalite data inspect corpus_text_document --documents 0:3",),
    "Exit status: 0 all were shown, 2 one could not be read. " + _STOPPED,
    run="megalite.cli.data:inspect_datasets",
)

DATA_MERGE = Command(
    "megalite data merge",
    "concatenate datasets",
    "Concatenate several datasets into one.",
    [
        Flag("--input PREFIX ...", "datasets, or folders of datasets, which are sorted by name", required=True),
        _output("the new dataset"),
        Flag(
            "--dtype NAME",
            "type of the new tokens; needed if the datasets' types differ",
            choices=("uint8", "int8", "int16", "int32", "int64", "uint16"),
        ),
    ],
    ("megalite data merge --input first second --output-prefix both",),
    _WRITTEN,
    run="megalite.cli.data:merge_datasets",
)

DATA_SPLIT = Command(
    "megalite data split",
    "cut a dataset between documents",
    "Write parts of a dataset as separate datasets: whole documents, in order.",
    [
        Flag("--input PREFIX", "the dataset", required=True),
        _output(
            "writes PREFIX_0, PREFIX_1, ... (PREFIX for a single part), or PREFIX_train, PREFIX_valid, PREFIX_test"
        ),
        Flag("--parts N", "number of parts, of about equally many tokens", int),
        Flag("--documents A:B", "these documents; may be repeated", repeat=True),
        Flag("--split A,B,C", "train, valid and test, with the boundaries of a run's --split"),
    ],
    ("megalite data split --input both --output-prefix part --parts 4",),
    _WRITTEN,
    exclusive=(("--parts", "--documents", "--split"),),
    one_required=True,
    run="megalite.cli.data:split_one",
)

DATA_INDEX = Command(
    "megalite data index",
    "build the large indices of a run before it starts",
    "Build the sample indices of a run with these settings, so that no rank waits for them. An index is the order of "
    "documents and samples in an epoch. Small indices are not stored: the run builds them in memory. The folder is "
    "--data-cache-path, or cache beside each token file.",
    [],
    ("megalite data index --config run.yaml --world-size 64",),
    "Takes any flags of megalite train, --world-size N and --json.",
    settings=("--dry-run",),
    status_without_words=0,
    run="megalite.cli.data:make_indices",
)

DATA = Command(
    "megalite data",
    "merge, split, inspect and verify token files; index them before a run",
    "Inspect, verify, merge and split token files.",
    examples=("megalite data inspect corpus_text_document --documents 0:3",),
    commands={
        command.name.rpartition(" ")[2]: command
        for command in (DATA_VERIFY, DATA_INSPECT, DATA_MERGE, DATA_SPLIT, DATA_INDEX)
    },
)


def _model(tp_default: str) -> list[Flag]:
    """Return --load and related flags. `tp_default`: default of --tp in its help."""
    return [
        Flag(
            "--load FOLDER",
            "folder or address of checkpoints (the newest sound one is used), one checkpoint, or a Hugging Face model",
            path_or_address,
            required=True,
        ),
        Flag("--ckpt-step N", "use the checkpoint of this step", int),
        _WEIGHTS,
        IMPORT,
        Flag("--tp N", f"tensor parallel ranks ({tp_default})", whole_number),
        Flag("--pp N", "pipeline parallel ranks (1)", whole_number),
        Flag("--cp N", type=int, default=1),
        Flag("--ep N", type=int, default=1),
        Flag("--dtype", "precision of the computation; default: as stored", choices=PRECISIONS),
        Flag("--device", "(auto)", default="auto", choices=("auto", "cpu", "cuda")),
        Flag("--tokenizer-model PATH", "default: the model's tokenizer"),
        Flag("--tiktoken-pattern NAME", "with --tokenizer-model: how a tiktoken file splits text"),
    ]


GENERATE = Command(
    "megalite generate",
    "generate text with a checkpoint or a Hugging Face model",
    "Continue prompts with a trained model. Under torchrun the ranks are tp x pp, by default one tp group.",
    [
        *_model("the ranks divided by --pp"),
        Flag("--prompt TEXT", "text to continue; may be repeated", repeat=True),
        Flag("--prompts FILE", "prompts, one per line, or JSON lines in a .jsonl; - is standard input"),
        Flag("--prompt-key KEY", "key of the prompt in a .jsonl (prompt; with --chat messages)"),
        Flag("--chat", "apply the tokenizer's chat template to prompts or lists of messages", bool),
        Flag("--max-new-tokens N", "maximum length of a continuation (100)", int, default=100),
        Flag("--temperature T", "0 selects the most likely token (0.8)", float, default=0.8),
        Flag("--top-k K", "sample from the K most likely tokens", int),
        Flag("--top-p P", "sample from the smallest set of tokens with this total probability", float),
        Flag("--repetition-penalty R", "lower the probability of tokens that already occur (1)", float, default=1.0),
        Flag("--seed N", "seed of the sampling (0)", int),
        Flag("--stop TEXT", "end before this text; may be repeated", repeat=True),
        Flag("--batch-size N", "prompts per batch (16)", whole_number, default=16),
        Flag(
            "--add-bos", "add the start tokens of tokenizer.json; default: for Hugging Face models", bool, negated=True
        ),
        Flag("--output FILE", "write the texts to a file as JSON lines", Path),
    ],
    ("megalite generate --load runs/first/checkpoints --prompt 'Once upon a time'",),
    exclusive=(("--prompt", "--prompts"),),
    one_required=True,
    disables={"--prompt": "--prompt-key", "--chat": "--add-bos"},
)

EVALUATE = Command(
    "megalite evaluate",
    "measure a model's loss and perplexity on token files or text",
    "Measure loss, perplexity and bits per byte of a trained model. Under torchrun ranks beyond tp x pp are replicas that "
    "share the work.",
    [
        *_model("1"),
        Flag("--data-path PREFIX ...", "token files (.bin and .idx), or their addresses"),
        Flag("--input PATH ...", "text, jsonl or parquet: files, folders, globs, addresses; - is standard input"),
        Flag("--json-key KEY", "with --input: key of the text (text)"),
        Flag("--text-documents", "with --input: what a document is in a .txt (file)", choices=FORMS),
        Flag("--seq-length N", "tokens per window; default: the model's", whole_number),
        Flag("--stride N", "distance between windows in tokens; default: --seq-length", whole_number),
        Flag("--batch-size N", "windows per batch (1)", whole_number, default=1),
        _JSON,
    ],
    ("megalite evaluate --load runs/first/checkpoints --input held-out.txt",),
    exclusive=(("--data-path", "--input"),),
    one_required=True,
    disables={"--data-path": "--json-key --text-documents --tokenizer-model --tiktoken-pattern"},
    run="megalite.cli.generate:run_evaluate",
)

CONVERT = Command(
    "megalite convert",
    "turn weights into Hugging Face's or Megatron-LM's format, or into ours",
    "Convert weights between megalite's checkpoints, Hugging Face folders and Megatron-LM's checkpoints. Runs on the CPU, "
    "one tensor at a time. After an interruption the same command continues.",
    [
        Flag("source SOURCE", "folder to read, or the address of checkpoints", path_or_address),
        Flag("target TARGET", "folder to write; must not exist yet", Path),
        Flag("--to", "format of TARGET", choices=FORMATS, required=True),
        Flag(
            "--from FORMAT", "format of SOURCE (auto)", default="auto", choices=("auto", *FORMATS), dest="source_format"
        ),
        Flag("--step N", "checkpoint of this step; default: the newest", int),
        _WEIGHTS,
        Flag("--dtype", "type of all tensors; default: as stored", choices=PRECISIONS),
        Flag(
            "--with-optimizer", "megatron to native: also optimizer states, step and samples, to continue the run", bool
        ),
        Flag("--max-shard-size SIZE", "maximum file size, such as 2GB (5GB); not for megatron", byte_size),
        Flag("--family NAME", "huggingface: model type; default: the one that fits"),
        Flag("--tp N", "megatron: tensor-parallel size (1)", whole_number),
        Flag("--pp N", "megatron: pipeline-parallel size (1)", whole_number),
        Flag("--transformer-impl", "megatron: that of the run that loads it", choices=TRANSFORMER_IMPLEMENTATIONS),
        Flag(
            "--make-vocab-size-divisible-by N",
            "native, megatron: vocabulary padding; default: as in SOURCE",
            whole_number,
        ),
        Flag("--tokenizer-model PATH", "tokenizer to add: a file or folder", Path),
        Flag("--without-tokenizer", "leave the tokenizer's files out", bool),
        Flag(
            "--verify",
            f"compare weights and logits after writing; default below {VERIFIED_BELOW // 10**6} million parameters",
            bool,
            negated=True,
        ),
    ],
    (
        "megalite convert models/llama checkpoints --to native",
        "megalite convert runs/first/checkpoints out --to huggingface --dtype bf16",
    ),
    exclusive=(("--tokenizer-model", "--without-tokenizer"),),
)

INSPECT = Command(
    "megalite inspect",
    "show and verify a checkpoint, or compare two",
    "Show the contents of a checkpoint and verify every file, or compare two checkpoints.",
    [
        Flag("checkpoint [CKPT]", "folder or address of checkpoints, or of one checkpoint", path_or_address),
        Flag("--diff A B", "compare two checkpoints of any layouts bit by bit", path_or_address),
        Flag("--step N", "checkpoint of this step; default: the newest sound one", int),
        Flag(
            "--tensors PATTERN", "statistics of matching tensors, such as 'layers.0.*'; with --diff: compare only these"
        ),
        Flag(
            "--config", "print only the config, as YAML for --config of another run: without this run's folders", bool
        ),
        _JSON,
        Flag("--no-verify", "check only file lengths, without reading the files", bool),
    ],
    (
        "megalite inspect runs/first/checkpoints --tensors 'layers.0.*'",
        "megalite inspect --diff runs/first/checkpoints runs/second/checkpoints --step 100",
    ),
    "Exit status: 0 sound (or equal), 1 damaged (or different), 2 bad input.",
    disables={"--config": "--diff --tensors --no-verify"},
)
