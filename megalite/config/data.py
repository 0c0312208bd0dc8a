"""Where tokens come from."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files (`<prefix>.bin`/`<prefix>.idx`), their split, and the tokenizer that made them."""

    data_path: list[str] = option([], basic=True)
    """Prefixes of token files, or weight/prefix pairs: `--data-path 0.3 a 0.7 b`."""
    train_data_path: list[str] = option([])
    """As data_path, for training alone; then valid_data_path may be given too, and split may not."""
    valid_data_path: list[str] = option([])
    """As data_path, for validation alone."""
    test_data_path: list[str] = option([])
    """As data_path, for testing alone."""
    split: str | None = option(None, basic=True)
    """Train, valid and test shares of data_path's documents; default 969,30,1."""
    mock_data: bool = option(False)
    """Train on made-up tokens (for timing); needs vocab_size."""
    tokenizer_type: str | None = option(
        None,
        choices=(
            *("SentencePieceTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer"),
            *("ByteLevelTokenizer", "NullTokenizer"),
        ),
    )
    """Kind of tokenizer; default: told from the files given."""
    tokenizer_model: str | None = option(None, basic=True)
    """SentencePiece .model, Hugging Face tokenizer.json or tiktoken file, or a folder that holds one."""
    vocab_file: str | None = option(None)
    """GPT-2 BPE vocab.json."""
    merge_file: str | None = option(None)
    """GPT-2 BPE merges.txt."""
    tiktoken_pattern: str | None = option(None)
    """How a tiktoken file cuts text into words: gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, llama3, v1, v2, or a regular expression; default: told from the file where it is known."""
    data_order: str = option("megalite", choices=("megalite", "megatron"))
    """Order of samples: megalite's is a function of (seed, sample) alone; megatron is Megatron-LM's, bit for bit."""
    data_cache_path: str | None = option(None)
    """Folder for the indices of large datasets; default: a folder `cache` beside each token file."""
    packing: str = option("stream", choices=("stream", "best-fit"))
    """How samples are cut: from one stream of documents, or of whole documents that fit, which see only themselves."""
    eod_mask_loss: bool = option(False)
    """Leave the prediction after an end-of-document token out of the loss."""
    reset_attention_mask: bool = option(False)
    """Tokens see no other document than their own."""
    reset_position_ids: bool = option(False)
    """Positions start from 0 in each document."""
