"""The one exception that means "the user can mend this"."""


class ConfigError(ValueError):
    """Bad input: a flag, a config key, a file, a layout that does not divide.

    The message names the setting, the values that clash and a value that works. Command lines print it on one
    line without a traceback and exit with status 2.
    """


class RankError(ConfigError):
    """A ConfigError that only some ranks have found: whoever has it says so, since rank 0 may not know of it."""
