"""On what hardware rows were measured, and what is nominal for it."""

import re
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from epcross.harness.claims.book import Book
from epcross.harness.claims.claim import Evidence, System

if TYPE_CHECKING:
    import pandas as pd

NO_GPU = "no GPU"
NOT_NAMED = "GPU not reported"


def with_products(measured: "pd.DataFrame", paths: Sequence[Path]) -> "pd.DataFrame":
    """`measured`, loaded from `paths`, with the column `product`: the GPUs that each run's environment names.

    Raises:
        StoreError: the documents of a run are damaged.
    """
    import pandas as pd

    from epcross.harness.storing.store import open_run

    products: dict[str, str] = {}
    for path in paths:
        folders = [path] if (path / "run.json").exists() else sorted(path.glob("runs/*"))
        for folder in folders:
            if (folder / "run.json").exists():
                run = open_run(folder)
                names = [str(gpu.get("name", "")) for gpu in run.environment.get("gpus") or ()]
                products[run.run_id] = ", ".join(sorted(set(filter(None, names)))) or NO_GPU
    named = [products.get(str(run_id), NOT_NAMED) for run_id in measured["run_id"]]
    return measured.assign(product=pd.array(named, dtype="string"))


def is_one(system: System, product: str) -> bool:
    """Whether a product, such as `NVIDIA H200`, is of this system; any is, of a system that names none.

    Of several products all must be. A word must stand by itself: `NVIDIA GB200` is no B200.
    """
    words = "|".join(map(re.escape, system.products))
    return not words or all(re.search(rf"\b({words})\b", one) for one in product.split(", "))


def system_of(book: Book, product: str) -> System | None:
    """The system with a nominal bandwidth that a product belongs to; None if there is none."""
    fitting = (system for system in book.systems.values() if system.nominal and system.products)
    return next((system for system in fitting if is_one(system, product)), None)


def nominal_gbps(book: Book, published: "pd.DataFrame", product: str) -> float:
    """Nominal NVLink bandwidth of a GPU, one direction, as published; NaN if no source says."""
    system = system_of(book, product)
    value = None if system is None or system.nominal is None else link_gbps(published, system.nominal)
    return nan if value is None else value


def link_gbps(published: "pd.DataFrame", evidence: Evidence) -> float | None:
    """The one published bandwidth of a link that `evidence` names; None if there is none, or several that differ."""
    rows = published[
        (published["source"] == evidence.source)
        & (published["backend"] == evidence.system)
        & (published["hardware"] == evidence.hardware)
        & (published["phase"] == "link")
    ]
    values = set(rows["stated_gbps"].dropna())
    return values.pop() / evidence.divide_by if len(values) == 1 else None
