"""The one exception that means "the user can mend this"."""

from megalite.config.exit_codes import BAD_INPUT


class ConfigError(ValueError):
    """Bad input: a flag, a config key, a file, a layout that does not divide.

    The message names the setting, the values that clash and a value that works. Command lines print it on one
    line without a traceback and exit with status 2.
    """

    exit_code = BAD_INPUT
    """Exit status of a run that ends by it."""


class RankError(ConfigError):
    """A ConfigError that only some ranks have found: whoever has it says so, since rank 0 may not know of it.

    Args:
        exit_code: of the error that it stands for.
    """

    def __init__(self, message: str, *, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code
