"""Sweeps that set backends beside each other: no point is measured that nothing stands beside. Soaks and floors
compare nothing."""

from collections import Counter
from pathlib import Path

import pytest

from epcross.harness.planning.assemble import Assembler
from epcross.harness.planning.config import resolve

SWEEPS = sorted(path.stem for path in (Path(__file__).parents[2] / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("sweep", [name for name in SWEEPS if not name.startswith(("soak", "floor"))])
def test_every_point_has_one_to_be_compared_with(sweep: str) -> None:
    config = resolve([f"sweep={sweep}"])  # a plan would ask every interpreter what it has
    places = Counter(
        (point.model.name, point.ep_size, point.dispatch_format, point.tokens_per_rank, point.regime, point.routing)
        for point in Assembler(config).points(config)
    )
    assert [place for place, count in places.items() if count == 1] == []
