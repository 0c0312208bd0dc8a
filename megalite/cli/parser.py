"""Flags of a command, refused like everything else that is not right."""

import argparse
from typing import NoReturn

from megalite.config.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Bad flags are ConfigErrors; no flag can be shortened, and descriptions keep their lines."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            prog=program,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; {self.prog} --help lists the flags")
