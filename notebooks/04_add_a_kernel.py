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
# # 4. Add a kernel
#
# A kernel joins as two files in a folder of its own: a class that moves rows, and YAML that names it. This notebook
# puts them into a temporary folder outside the repository, breaks the kernel to see what happens, checks it,
# measures it, and draws it beside the others. It needs no GPU; the shared-memory kernels that it is drawn beside
# need a C++20 compiler.

# %%
import shutil
import sys
import tempfile
from pathlib import Path

from IPython.display import Code

from epcross.harness.analysis import crossover, frame, plots, summary

EPCROSS = f"TERM=dumb {sys.executable} -m epcross.harness.cli"
FOLDER = Path(tempfile.mkdtemp(prefix="my_kernel-"))
KERNEL = FOLDER / "my_kernel.py"
shutil.copytree("my_kernel", FOLDER, dirs_exist_ok=True)

# %% [markdown]
# ## The class
#
# [my_kernel.py](my_kernel/my_kernel.py) is the whole of it, and the one that `CONTRIBUTING.md` explains: every rank
# sends all it has to all ranks and keeps what is meant for it. Right, slow, and short enough to start from.

# %%
Code(filename=KERNEL)

# %% [markdown]
# ## The YAML
#
# The name of the file is the name of the kernel; label and colour are those of every figure.

# %%
Code(filename=FOLDER / "backend" / "my_kernel.yaml")

# %% [markdown]
# With `--config-dir` every command knows it, beside those that ship:

# %%
# !{EPCROSS} backends --config-dir {FOLDER}

# %% [markdown]
# ## Break it
#
# A mistake that a timing would never show: partial sums of several ranks overwrite each other instead of adding up.

# %%
right = KERNEL.read_text()
wrong = right.replace("sums[token[mine]] +=", "sums[token[mine]] =")
KERNEL.write_text(wrong)
# !{EPCROSS} check backend=my_kernel case=format_fp8 --config-dir {FOLDER}

# %% [markdown]
# The case, the first wrong rank, token and column, what came and what should have, and the line that runs it again.
# Had it been measured like this, its rows would be `incorrect` and have no latency.
#
# ## Mend it

# %%
KERNEL.write_text(right)
# !{EPCROSS} check backend=my_kernel --config-dir {FOLDER}

# %% [markdown]
# ## Measure it
#
# Beside two others, on the same routing, in turns; every unit is verified before and after it is timed.

# %%
RUNS = FOLDER / "runs"
WORDS = "ep_size=2 tokens_per_rank=1,8,32 regime=steady"
KERNELS = "my_kernel,shm_fence,shm_two_sided"
# !{EPCROSS} run sweep=quickstart backend={KERNELS} {WORDS} output_dir={RUNS} --config-dir {FOLDER}

# %% [markdown]
# ## Draw it

# %%
(run,) = RUNS.iterdir()
(scene,) = plots.load(run)
plots.figure(scene, "latency")

# %%
rows = frame.load(run)
rows.groupby(["backend", "status"], observed=True).size().unstack("status", fill_value=0)

# %%
table = summary.points(rows)
table[["backend", "tokens_per_rank", "median_us", "low_us", "high_us", "launches", "trials"]].round(1)

# %%
found = crossover.find(rows, "my_kernel", "shm_two_sided")
found[["state", "faster_below", "faster_above", "agreement", "points", "launches", "reason"]]

# %% [markdown]
# The rows say what ran, as the kernel reports it of itself. Raise its version when you change it, so that rows of
# the two are never taken for the same.

# %%
known = ["backend_version", "transport", "boundary", "weights_by"]
rows.groupby("backend", observed=True)[known].first()

# %% [markdown]
# Replace `exchange` by your library. What the class may declare, and in which order its methods are called, stands
# in `harness/backends/base.py`; a GPU kernel differs in its domain and in returning when the work is ordered on the
# stream.

# %%
shutil.rmtree(FOLDER)
