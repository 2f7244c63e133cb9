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
# # 1. A first look at a run
#
# Rows of the quickstart that is committed with this repository: shared-memory kernels between processes of one host.
# It says how the protocols compare on that machine, and nothing about NVLink. For your own:
# `make quickstart`, then put the path that it prints in place of `RUN`.

# %%
from pathlib import Path

from epcross.harness.analysis import fit, frame, plots, summary

RUN = sorted(Path("../results/measured").glob("*-quickstart-*"))[-1]
RUN.name

# %% [markdown]
# ## What was measured
#
# One row is one (run, point, phase, repeat). Every planned row is there, whatever happened to it.

# %%
rows = frame.load(RUN)
rows.groupby(["backend", "ep_size", "regime", "phase", "status"], observed=True).size().unstack("status", fill_value=0)

# %% [markdown]
# Rows that no headline should rest on carry a flag. They stay in the frame, and every function below leaves them out
# and says so.

# %%
headline = frame.headline(rows)
headline.note

# %% [markdown]
# ## The headline
#
# `round_trip` is one dispatch with one combine: `steady` in a chain, back to back, and `entry` from a common start.

# %%
(scene,) = plots.load(RUN)
plots.figure(scene, "latency")

# %% [markdown]
# The same as numbers: the median over repeats with its 95 % interval, which resamples launches, seeds and chains,
# and is wide where there are few launches.

# %%
trips = rows[rows["phase"] == "round_trip"]
table = summary.points(trips)
table[["regime", "backend", "tokens_per_rank", "median_us", "low_us", "high_us", "launches", "trials"]].round(1)

# %% [markdown]
# ## Is it fixed cost, or bandwidth?
#
# `fixed + bytes / bandwidth`, fitted to the medians of each series. `holds` says whether the line describes them.
# Where it does not, as where rows outgrow a cache, neither number may be quoted.

# %%
fits = fit.fit(trips)
fits[["regime", "backend", "fixed_us", "bandwidth_gbps", "residual_rms", "holds"]].round(2)

# %% [markdown]
# The points say why: with a good model, residuals would scatter around 0.

# %%
points = fit.points(trips[trips["regime"] == "steady"], fits)
points.pivot_table(index="tokens_per_rank", columns="backend", values="residual", observed=True).round(2)

# %% [markdown]
# ## Where the time goes
#
# Phases are a diagnostic of the regime `entry`: waiting moves between dispatch and combine.

# %%
plots.figure(scene, "phases")

# %% [markdown]
# Bytes are counts of the group times the padded row, by a view that is named. The floor is what the machine does at
# best when all ranks copy at once.

# %%
plots.figure(scene, "bandwidth")

# %% [markdown]
# ## How far to trust it
#
# Which level of repetition the variance comes from, and what kept rows out of the headline.

# %%
plots.figure(scene, "variance")

# %%
plots.figure(scene, "latency_flagged")

# %% [markdown]
# ## What a row knows
#
# Every row says which code, on which machine, with which routing it was measured.

# %%
known = ["backend_version", "transport", "boundary", "estimator", "machine", "measure_hash", "git_sha"]
headline.rows[headline.rows["phase"] == "round_trip"].groupby("backend", observed=True)[known].first().T

# %% [markdown]
# A figure is saved as PDF, SVG or PNG by the ending of its name; its caption and its numbers come with it.

# %%
latency = plots.figure(scene, "latency")
latency.caption
