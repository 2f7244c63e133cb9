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
# `sweeps/crossover.yaml`, or of the quickstart, which has fewer batches and launches, are of shared-memory kernels on
# one host; after them come two GPUs over NVLink, and all ranks on one GPU. Each domain has figures of its own, since
# what holds in one says nothing of another. Put a run of your own in place of `RUN`, of whatever domain.

# %%
from pathlib import Path

import pandas as pd

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
# ## Two GPUs over NVLink
#
# A rank on each, EP 2: the smallest exchange there is. Sentinel is ahead by less and less, until the two are level.

# %%
NVLINK = sorted(MEASURED.glob("*-onesided_nvlink-*"))[-1]
(between,) = plots.load(NVLINK)
plots.figure(between, "ratio")

# %%
plots.figure(between, "crossings")

# %% [markdown]
# Whether that is a crossover depends on what counts as equal. Within 3 % there is none in the range: one leads up to
# `leads_to`, and nobody beyond. Without a margin the medians do cross, and `low` to `high` is where; the state says
# whether these launches are enough to call it.

# %%
pair = frame.load(NVLINK)
pair = pair[(pair["phase"] == "round_trip") & (pair["regime"] == "steady")]
found = [crossover.find(pair, "onesided_sentinel", "onesided_fence", margin=margin) for margin in (0.03, 0.0)]
pd.concat(found)[["margin", "state", "estimate", "low", "high", "faster_below", "faster_above", "leads_to", "launches",
                  "reason"]].round(2)  # fmt: skip

# %% [markdown]
# ## Ours against every peer
#
# The newest run in which all exchanges took turns on two GPUs: where each of ours and each other exchange change the
# lead, with BF16 rows (`scenes[1]` has FP8). White is what the launches at hand do not tell.

# %%
scenes = plots.load(sorted(MEASURED.glob("*-baselines_nvlink-*"))[-1])
plots.crossings_of(scenes[0], "onesided_sentinel", "onesided_fence")

# %% [markdown]
# ## Whole layers
#
# From hidden states to hidden states, experts included. Only like stands beside like: formats of rows and weights, and
# whether inputs are staged inside the window. Most of a layer's time at these sizes is reading weights, the same for
# all, so its curves lie closer together than those of the exchange.

# %%
layers = plots.load(sorted(MEASURED.glob("*-layer_h200x2-*"))[-1])
settings = [one for one in layers if "fp8 weights, staging inside" in one.setting]
fp8 = next(one for one in settings if "64 experts in" in one.setting)
plots.figure(fp8, "ratio")

# %%
plots.crossings_of(fp8, "layer_onesided")

# %% [markdown]
# The expert stage alone, on one rank's slice of DeepSeek-V3, on rows as our exchange leaves them. Rows that somebody
# has brought to their experts already (`expert_major`) are another setting: part of the work is done.

# %%
stages = plots.load(sorted(MEASURED.glob("*-experts_h200-*"))[-1])
plots.figure(next(one for one in stages if "fp8 weights, layout rank_major" in one.setting), "ratio")

# %% [markdown]
# ## One GPU that holds all ranks
#
# No NVLink is crossed, and one memory serves everybody, so that EP 2 to 64 fit on a single GPU: who pays for moving
# bytes twice. The larger EP sizes were taken in one launch, so nothing is called there.

# %%
inside = [sorted(MEASURED.glob(f"*-{name}-*"))[-1] for name in ("onesided_h200", "onesided_h200_wide")]
(shared,) = plots.load(*inside)
plots.figure(shared, "crossover_map")

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
