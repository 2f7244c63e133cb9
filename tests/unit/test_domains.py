"""Published and measured latencies side by side."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_values import simulate
from matplotlib.colors import to_rgba

from epcross.harness.analysis import plots
from epcross.harness.analysis.figures.canvas import Figure, Omitted, drawn
from epcross.harness.claims import published
from epcross.harness.errors import InputError


def of_post(**chosen: object) -> pd.DataFrame:
    """Latencies of the TensorRT-LLM post that agree in these columns."""
    rows = published.load(sources=["trtllm_blog18"])
    rows = rows[rows["latency_us"].notna() & (rows["hardware"] == "GB200 NVL72")]
    for name, value in chosen.items():
        rows = rows[rows[name] == value]
    return rows


def figure(frame: pd.DataFrame) -> Figure:
    found = plots.domains(frame)
    assert isinstance(found, Figure), found
    return found


def lines(found: Figure, panel: str) -> dict[str, tuple[list[float], list[float]]]:
    (ax,) = [ax for ax in found.drawing.axes if ax.get_title() == panel]
    return {
        str(line.get_gid()).split("|")[1]: (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in ax.lines
        if line.get_gid()
    }


def test_published_values_are_drawn_as_they_stand() -> None:
    rows = of_post(ep_size=8)
    found = figure(rows)
    assert [ax.get_title() for ax in found.drawing.axes] == [
        "dispatch, domain published",
        "combine, domain published",
    ]
    ((label, (tokens, values)),) = lines(found, "dispatch, domain published").items()
    assert label == "nvlink_one_sided_trtllm"
    assert (tokens[0], values[0], tokens[-1], values[-1]) == (1, 18.9, 2048, 311.8)  # as printed in the post
    assert drawn(found.drawing) == {f"{line['panel']}|{line['key']}" for line in found.data}
    assert found.caption == (
        "domain published: single values as trtllm_blog18 state them, without intervals; all of GB200 NVL72, EP 8, "
        "bf16 out, bf16 back, hidden 7168, top 8, 256 experts",
    )


def test_what_differs_names_the_series() -> None:
    found = figure(of_post(phase="dispatch"))
    names = list(lines(found, "dispatch, domain published"))
    assert names == [f"nvlink_one_sided_trtllm, EP {size}" for size in (8, 16, 64)]


def test_domains_never_share_a_panel(tmp_path: Path) -> None:
    curves = {"shm_fence": lambda tokens: 5.0 * tokens, "other": lambda tokens: 7.0 * tokens}
    measured = simulate(tmp_path, curves, tokens=[1, 8], repeats=(3, 1, 3), spread=(0.1, 0.0, 0.1))
    found = figure(published.beside(measured, of_post(ep_size=8, phase="dispatch")))
    assert {line["domain"] for line in found.data if line["panel"].endswith("domain cpu")} == {"cpu"}
    assert set(lines(found, "dispatch, domain published")) == {"nvlink_one_sided_trtllm"}
    drawn_lines = lines(found, "round trip, domain cpu")
    assert set(drawn_lines) == {"shm_fence", "other"}
    own = measured[(measured["backend"] == "shm_fence") & (measured["tokens_per_rank"] == 8)]["latency_us"]
    assert drawn_lines["shm_fence"][1][1] == own.median()
    (ax,) = [ax for ax in found.drawing.axes if ax.get_title() == "round trip, domain cpu"]
    colors = {str(line.get_gid()).split("|")[1]: line.get_color() for line in ax.lines if line.get_gid()}
    assert to_rgba(colors["shm_fence"]) == to_rgba("#0072B2")  # of conf/backend
    assert found.caption[0].startswith("domain cpu: medians of n = 9 repeats; run run-a")
    assert found.caption[-1].startswith("rows of two domains are not compared")


def test_n_is_that_of_each_mark_and_flagged_rows_are_said(tmp_path: Path) -> None:
    measured = simulate(
        tmp_path, {"a": lambda tokens: 5.0 * tokens}, tokens=[1, 8], repeats=(3, 1, 3), spread=(0, 0, 0)
    )
    assert "flagged" not in figure(measured).caption[0]
    few = measured[(measured["tokens_per_rank"] > 1) | (measured["launch"] == 0)]
    few = few.assign(is_not_alone=few["tokens_per_rank"] == 1)
    assert figure(few).caption[0].startswith("domain cpu: medians of n = 3 to 9 repeats; run run-a")
    assert "; flagged rows among them: 3 not_alone" in figure(few).caption[0]


def test_two_published_values_at_one_place_are_refused() -> None:
    rows = of_post(ep_size=8, phase="dispatch")
    with pytest.raises(InputError, match="nvlink_one_sided_trtllm has several published values at 1, 2, "):
        plots.domains(pd.concat([rows, rows], ignore_index=True))


def test_nothing_to_draw_is_said() -> None:
    omitted = plots.domains(of_post(ep_size=3))
    assert isinstance(omitted, Omitted)
    assert omitted.reason == "no row has a latency and a number of tokens per rank"
