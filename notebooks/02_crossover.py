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
# # 2. Which kernel at which batch
#
# Curves, intervals, and where one kernel overtakes another, from committed rows: the newest run of
# `sweeps/crossover.yaml`, or of the quickstart, which has fewer batches and launches. They are of shared-memory
# kernels on one host. Put a run of your own in place of `RUN`, of whatever domain.

# %%
from pathlib import Path

from epcross.harness.analysis import crossover, frame, plots, summary

MEASURED = Path("../results/measured")
RUN = [*sorted(MEASURED.glob("*-quickstart-*")), *sorted(MEASURED.glob("*-crossover-*"))][-1]
rows = frame.load(RUN)
trips = rows[rows["phase"] == "round_trip"]
RUN.name

# %% [markdown]
# ## Curves
#
# Medians over the repeats, with the band from the fastest to the slowest of them. Two curves that lie within each
# other's band may still differ clearly: launches are shared, so their ratio varies less than either.

# %%
(scene,) = plots.load(RUN)
plots.figure(scene, "latency")

# %% [markdown]
# ## Ratios and their intervals
#
# Each kernel over the best of the others. A bar that holds 1 means that these launches cannot tell the two apart.

# %%
plots.figure(scene, "ratio")

# %% [markdown]
# ## Crossovers
#
# A state is called if 97.5 % of the resampled curves share it. `ambiguous` is a result as well: its `reason` says
# what was missing, and more launches, not more iterations, are what helps.

# %%
found = crossover.find(trips, "shm_sentinel", "shm_fence")
found[["ep_size", "regime", "state", "estimate", "low", "high", "faster_below", "faster_above", "reason"]].round(2)

# %% [markdown]
# What counts as equal is a choice, 3 % unless another is given. How much the answer depends on it is worth a look
# before it is quoted.

# %%
strict = crossover.find(trips, "shm_sentinel", "shm_fence", margin=0.0)
loose = crossover.find(trips, "shm_sentinel", "shm_fence", margin=0.1)
strict.merge(loose, on=["ep_size", "regime"], suffixes=("_0_percent", "_10_percent"))[
    ["ep_size", "regime", "state_0_percent", "state_10_percent", "estimate_0_percent", "estimate_10_percent"]
].round(1)

# %% [markdown]
# All pairs at once, one strip for each EP size that was measured:

# %%
plots.figure(scene, "crossings")

# %% [markdown]
# ## The map
#
# The fastest kernel at each EP size and batch. Pale cells are no clear win.

# %%
plots.figure(scene, "crossover_map")

# %% [markdown]
# ## More ranks than cores
#
# The quickstart also ran EP 4 on a machine with two cores. Those rows are flagged `oversubscribed`, and no crossover
# uses them unless it is asked to; what it then finds is about the scheduler.

# %%
quickstart = frame.load(sorted(MEASURED.glob("*-quickstart-*"))[-1])
everything = crossover.find(quickstart[quickstart["phase"] == "round_trip"], "shm_sentinel", "shm_fence",
                            keep=["oversubscribed"])  # fmt: skip
everything[["ep_size", "regime", "state", "estimate", "tokens_low", "tokens_high", "launches", "reason"]].round(2)

# %% [markdown]
# ## To defend a number
#
# Everything behind one point of a curve: how often it was taken, how far the repeats lie apart, and the samples of
# each rank.

# %%
one = summary.points(trips)
one = one[(one["tokens_per_rank"] == 32) & (one["regime"] == "entry")]
one[["backend", "median_us", "low_us", "high_us", "lowest_us", "highest_us", "launches", "seeds", "chains"]].round(1)

# %%
samples = frame.load_samples(RUN).merge(trips[["run_id", "point_id", "phase", "repeat", "backend", "tokens_per_rank",
                                               "regime"]])  # fmt: skip
samples = samples[(samples["tokens_per_rank"] == 32) & (samples["regime"] == "entry")]
samples.groupby(["backend", "rank"], observed=True)["value_us"].describe(percentiles=[0.5, 0.99]).round(1)
