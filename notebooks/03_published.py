# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     notebook_metadata_filter: kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. What others publish, and what was measured here
#
# Published numbers lie in `results/reference`, one folder for each source, and join the same frame as measured rows, in
# a domain of their own. They are never drawn on one line with measured rows, and no verdict mixes domains.

# %%
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from epcross.harness.analysis import frame, plots
from epcross.harness.claims import book, claims_table, evaluate, published, sources

pd.set_option("display.max_colwidth", None)
MEASURED = Path("../results/measured")
values = published.load()
values.groupby(["source", "metric"], observed=True).size().unstack("metric", fill_value=0)

# %% [markdown]
# ## What a source says, and what it does not
#
# A number without its conditions is no number. What a reader would need and does not find stands in `not_stated`.

# %%
about = pd.DataFrame([asdict(source) for source in values.attrs["sources"].values()]).set_index("name")
about["open"] = about["not_stated"].str.len()
about[["hardware", "byte_convention", "rank_reduction", "open"]]

# %%
about["not_stated"].explode().value_counts().head(10)

# %% [markdown]
# ## Published curves
#
# At equal shape (EP 8, hidden 7168, 8 of 256 experts): flat, then proportional. Which of them is ahead where one ends
# and the other begins depends on hardware, formats and windows that differ from source to source.

# %%
shape = {"ep_size": 8, "hidden": 7168, "top_k": 8, "num_experts": 256}
alike = values[(values[list(shape)] == pd.Series(shape)).all(axis=1) & values["latency_us"].notna()]
curves = alike[
    alike["source"].isin(["trtllm_blog18", "aiconfigurator_deepep_ll"])
    & alike["hardware"].isin(["GB200 NVL72", "H200", "B200"])
    & alike["phase"].isin(["dispatch", "combine"])
]
plots.domains(curves)

# %% [markdown]
# ## Stated bandwidths, computed again
#
# Bytes are counted differently everywhere, so a stated bandwidth is believed as far as its own latency and its own
# convention give it back.

# %%
keys = ["source", "phase", "ep_size", "tokens_per_rank", "dispatch_format"]
stated = values.groupby(keys, observed=True)[["stated_gbps", "recomputed_gbps"]].max().dropna()
stated["off_percent"] = 100 * (stated["recomputed_gbps"] / stated["stated_gbps"] - 1)
stated.groupby("source", observed=True)["off_percent"].describe().round(2)

# %% [markdown]
# ## Published against measured
#
# Side by side: shapes may be compared, numbers may not. Measured are the newest run of each domain that timed dispatch
# and combine apart: shared memory between processes of a CPU, and NVLink between two GPUs, where EP is 2 and not 8.

# %%
runs = evaluate.runs_in([MEASURED])
rows = frame.headline(frame.load(*runs)).rows
phases = rows[rows["phase"].isin(["dispatch", "combine"])]
newest = phases.groupby("domain", observed=True)["run_id"].max()
plots.domains(published.beside(phases[phases["run_id"].isin(newest)], curves))

# %% [markdown]
# ## Verdicts
#
# Each claim has bounds that were written before anything was measured. An interval within them is `inside`, one that
# straddles a bound `inconclusive`. A kernel as its library ships it *reproduces*, the kernel of this repository
# *replicates*, and a fact is merely checked.

# %%
claims = book.read_book()
judgements, note = evaluate.evaluate(claims, sources.reference_folders(), [MEASURED])
plots.verdicts(judgements, note)

# %%
table = pd.DataFrame(claims_table.as_json(judgements))
table.groupby(["way", "verdict"]).size().unstack("verdict", fill_value=0)

# %% [markdown]
# ## What could not be held against a claim, and why
#
# `not measured`: no row of the kernel that the claim is about, or not at its batches. `not comparable`: there are rows,
# under other conditions than the claim's, such as another GPU or EP size. Each claim names the sweep that would measure
# it.

# %%
without = table[table["verdict"].isin(["not measured", "not comparable"])]
without.groupby(["verdict", "reason"]).agg(claims=("id", "unique"), sweeps=("sweep", "unique"))

# %% [markdown]
# One claim in full: what the source says, where the bounds come from, and what to run.

# %%
table[table["id"] == "P01"][["statement", "stated", "bounds_from", "hardware", "sweep", "way", "verdict", "reason"]].T
