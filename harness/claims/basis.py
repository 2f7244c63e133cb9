"""What a reading rests on: which points, and how often each was measured. It tells what a newer one covers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.harness.claims.claim import OVER_BASELINE, Claim
from epcross.harness.claims.selection import axes, plain

if TYPE_CHECKING:
    import pandas as pd

_WHO = ("backend", "compute", "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a point was measured."""

    launches: int
    trials: int

    def no_fewer_than(self, other: "Repeats") -> bool:
        """In launches and in trials."""
        return self.launches >= other.launches and self.trials >= other.trials


def basis(claim: Claim, own: "pd.DataFrame", other: "pd.DataFrame") -> Mapping[str, Repeats]:
    """Each point of a reading, in words, and its repeats. A point is a backend and expert stage, a phase, a batch and a
    value of each factor of which the claim names several; of options and versions it may have any. A ratio rests on
    the batches that both sides, `own` and `other`, have."""
    import pandas as pd

    from epcross.harness.analysis.frame import LAUNCH

    varied = [claim.change.factor] if claim.change else []
    place = list(dict.fromkeys([*axes(claim), *varied, "tokens_per_rank"]))
    rows = own
    if claim.quantity in OVER_BASELINE:
        at = [pd.MultiIndex.from_frame(side[place].astype(str)) for side in (own, other)]
        rows = pd.concat([own[at[0].isin(at[1])], other[at[1].isin(at[0])]])
    names = [*_WHO, *place]
    launches = rows[[*dict.fromkeys([*names, *LAUNCH])]].drop_duplicates().groupby(names, observed=True).size()
    trials = rows[names].groupby(names, observed=True).size()
    return {
        ", ".join(f"{name}={plain(value)}" for name, value in zip(names, key, strict=True)): Repeats(
            launches=int(launches[key]), trials=int(count)
        )
        for key, count in trials.items()
    }
