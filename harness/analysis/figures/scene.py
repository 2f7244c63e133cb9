"""What a figure is drawn from: the cells of one setting, the material behind them, and the looks of each series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epcross.harness.analysis.captions import provenance
from epcross.harness.analysis.cells import PHASE_WORDS, Cell, Series
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.style import Styles
from epcross.harness.record import Record
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import Phase

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One setting of a report."""

    setting: str
    suffix: str  # of file names; empty if a report has one setting
    words: str = ""  # what of the setting is not the same in all of a report, such as "fp8 out"
    cells: Sequence[Cell]
    material: Material
    styles: Styles

    @property
    def phase(self) -> Phase:
        """The headline phase that the setting is about."""
        return Phase(self.cells[0].rows[0].phase) if self.cells else Phase.ROUND_TRIP

    @property
    def phase_words(self) -> str:
        """What it is called."""
        return PHASE_WORDS[self.phase]

    @property
    def headline(self) -> list[Cell]:
        """Cells whose numbers may stand in a headline."""
        return [cell for cell in self.cells if cell.headline]

    @property
    def flagged(self) -> list[Cell]:
        """Cells that have numbers, and a flag on each."""
        return [cell for cell in self.cells if cell.interval is not None and cell.flags]

    @property
    def several_runs(self) -> bool:
        """Whether the report has more than one run."""
        return len(self.material.runs) > 1

    def rows(self, cells: Sequence[Cell]) -> "pd.DataFrame":
        """The headline rows of `cells` of one run, as `frame.load` gives them."""
        points = {cell.rows[0].point_id for cell in cells}
        (run_id,) = {cell.series.run_id for cell in cells}
        frame = self.material.frame
        here = (frame["run_id"] == run_id) & (frame["phase"] == self.phase) & frame["point_id"].isin(sorted(points))
        return frame.loc[here]

    def panel(self, ep_size: int, regime: str, run_id: str | None = None) -> str:
        """The title of a panel."""
        run = f", run {self.styles.runs[run_id]}" if run_id is not None and self.several_runs else ""
        words = f", {self.words}" if self.words else ""
        return f"EP {ep_size}{words}, {regime}{run}"

    def key(self, series: Series) -> str:
        """The id of a series in a figure."""
        return f"{series.name}@{series.run_id}"

    def caption(self, *sentences: str, rows: Sequence[Record]) -> list[str]:
        """`sentences`, what was left out, and where the numbers come from."""
        out = [*sentences]
        left = [cell for cell in self.cells if not cell.headline and cell.interval is not None]
        if left:
            flags = join_words(flag for cell in left for flag in cell.flags)
            out.append(f"left out: {len(left)} of {len(self.cells)} points whose every row is flagged {flags}")
        part = [cell for cell in self.headline if cell.flagged_rows]
        if part:
            count = sum(cell.flagged_rows for cell in part)
            out.append(f"left out: {count} flagged rows of {len(part)} points that have others")
        failed = sum(cell.interval is None for cell in self.cells)
        if failed:
            out.append(f"{failed} points have no number; status and reason of their rows say why")
        return [*out, self.setting, *provenance(rows), *self._runs()]

    def _runs(self) -> list[str]:
        if not self.several_runs:
            return []
        return ["; ".join(f"run {letter} is {run_id}" for run_id, letter in self.styles.runs.items())]


def shown_rows(cells: Sequence[Cell]) -> list[Record]:
    """The rows behind the numbers of `cells`."""
    return [row for cell in cells for row in cell.shown]


def by_series(cells: Sequence[Cell]) -> dict[Series, list[Cell]]:
    """Cells with a number, by series, in order of tokens."""
    found: dict[Series, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.series, cell.tokens)):
        found.setdefault(cell.series, []).append(cell)
    return found


def entry(scene: Scene, panel: str, cell: Cell, **values: Any) -> dict[str, Any]:
    """One line of a figure's data: where it is drawn, what it is, and `values`."""
    return {
        "panel": panel,
        "key": scene.key(cell.series),
        "run_id": cell.series.run_id,
        "series": cell.series.name,
        "ep_size": cell.ep_size,
        "regime": cell.regime,
        "tokens_per_rank": cell.tokens,
        **values,
        "setting": cell.setting,
    }
