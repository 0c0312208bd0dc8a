"""Is the tokenizer of a run the one that its token files were made with?"""

from collections.abc import Mapping
from typing import Any

from megalite.config.errors import ConfigError
from megalite.data.side_file import read_side_file, side_file_path
from megalite.data.tokenizers.base import Tokenizer


def require_tokenizer(prefix: str, side: Mapping[str, Any] | None, tokenizer: Tokenizer) -> None:
    """The tokenizer must be the one that the side file of a dataset names, if it names one.

    Args:
        side: what read_side_file gives.

    Raises:
        ConfigError: it is another; names both.
    """
    made_with = (side or {}).get("tokenizer")
    sha256 = made_with.get("sha256") if isinstance(made_with, dict) else None
    if not isinstance(made_with, dict) or not isinstance(sha256, str):
        return
    given = tokenizer.fingerprint()
    if sha256 != given:
        kind = str(made_with.get("kind", "a tokenizer"))[:40]
        raise ConfigError(
            f"{prefix}.bin was made with another tokenizer: {kind} (sha256 {sha256[:12]}...), and the one given is "
            f"{tokenizer.name} (sha256 {given[:12]}...); give that one, or move {side_file_path(prefix)} away if the two "
            "are known to give the same ids"
        )


def require_recorded_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """The same for those who read nothing else of the side file: a damaged one is as good as none.

    Raises:
        ConfigError: the side file names another tokenizer.
    """
    try:
        side = read_side_file(prefix)
    except ConfigError:
        return
    require_tokenizer(prefix, side, tokenizer)
