"""A run with a backend whose version has a known issue, from its YAML to what `epcross run` says."""

import json
from pathlib import Path

import pytest

from _command import epcross, rows_of, write_backends

pytestmark = pytest.mark.beside


def test_a_run_flags_its_rows_and_says_why(tmp_path: Path) -> None:
    names = ("old", "fixed")  # both are of version 1
    write_backends(tmp_path, dict.fromkeys(names, "tests.broken_backends:ReferenceBackend"))
    for name, versions in zip(names, ("<1.1", "<1"), strict=True):
        with (tmp_path / "backend" / f"{name}.yaml").open("a") as file:
            file.write(f'known_issues: [{{versions: "{versions}", reason: "it [bold] loses rows"}}]\n')
    words = ["ep_size=2", "model=tiny", "tokens_per_rank=3", "regime=steady", "routing=uniform", "sweep=smoke"]
    ended = epcross(tmp_path, "run", *words, "backend=old,fixed", "output_dir=runs", "--config-dir=.", "--json")
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    line = "old: known issue of <1.1: it [bold] loses rows (1 row of 1 flagged known_issue)"
    assert summary["known_issues"] == [line]
    assert line in ended.stderr.splitlines()
    flags = {row.backend: set(row.flags.split()) & {"known_issue"} for row in rows_of(Path(summary["path"]))}
    assert flags == {"old": {"known_issue"}, "fixed": set()}
