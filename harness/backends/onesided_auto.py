"""The faster of the two one-sided protocols, by a crossover that was measured on such a machine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from epcross.harness.backends.base import Description
from epcross.harness.backends.onesided import OneSided, OneSidedSentinel
from epcross.harness.point import Scalar
from epcross.kernels.onesided.agreement import AUTO
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover


class OneSidedAuto(OneSided):
    """Whichever of the two was measured to be faster at so many tokens on such a machine, by a stored crossover."""

    name = "onesided_auto"
    protocol = AUTO
    boundary = OneSidedSentinel.boundary  # the wider one: Fence has nothing to arm

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`crossover` is the file that `epcross crossover RUN --save FILE` wrote; there is no other default."""
        return {**super().option_defaults(), "crossover": ""}

    def unavailable(self) -> str | None:
        """As the others; or no crossover was given, or it cannot be read."""
        if why := super().unavailable():
            return why
        path = str(self.options["crossover"])
        if not path:
            return (
                "nobody said which protocol is faster here: measure both (sweep=onesided_nvlink), write the crossover "
                "with `epcross crossover RUN --save FILE`, and give it as backend.options.crossover=FILE"
            )
        try:
            Crossovers.load(path)
        except NoCrossover as error:
            return str(error)
        return None

    def describe(self) -> Description:
        """See `Backend`. Says which protocol the tokens of the point chose, and by which file."""
        told = super().describe()
        chosen = f"{self._opened().protocol} by {self.options['crossover']}"
        return replace(told, algorithm=f"{chosen}; {told.algorithm}")

    def _more(self) -> dict[str, Any]:
        return {"crossover": str(self.options["crossover"])}
