"""Paths as people write them."""

from pathlib import Path

from epcross.harness.errors import ConfigError


def absolute(path: str | Path) -> Path:
    """`path` from the root, with `~` and `~user` as in a shell.

    Raises:
        ConfigError: there is no such home.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"'{path}' starts with the home of a user that is not known here; write the path out"
        ) from None
