"""What epcross can be installed with besides, and how: it is on no package index, so always from a checkout."""

from enum import StrEnum


class Extra(StrEnum):
    """The optional dependencies of pyproject.toml that users need."""

    GLOO = "gloo"
    CUDA = "cuda"
    GPU = "gpu"
    FLASHINFER = "flashinfer"
    NOTEBOOKS = "notebooks"

    @property
    def install(self) -> str:
        """The command, and where it is given."""
        return f"pip install -e '.[{self}]' in a checkout of epcross"
