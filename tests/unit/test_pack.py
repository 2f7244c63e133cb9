import errno
import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from report_runs import make_run, points

from epcross.harness import cli
from epcross.harness.analysis import material
from epcross.harness.analysis.cells import cells
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.report import pack
from epcross.harness.report.pack import MANIFEST, verify_pack
from epcross.harness.storing.checksums import CHECKSUMS_FILE
from epcross.harness.storing.store import load_rows, load_samples
from epcross.harness.storing.table_files import TABLES
from epcross.harness.terms import Regime

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), points(["shm_fence"], [Regime.STEADY], tokens=(1, 4)))


@pytest.fixture(scope="module")
def archive(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    target = folder / "evidence.tar.gz"
    assert cli.run(["report", str(run), "--output", str(folder / "report"), "--pack", str(target)]) == 0
    return target


def read(archive: Path) -> Files:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write(path: Path, files: Files, change: Callable[[tarfile.TarInfo], None] = lambda member: None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            change(member)
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def test_it_holds_the_run_the_report_and_a_checksum_of_each(run: Path, archive: Path):
    files = read(archive)
    names = {name.removeprefix("evidence/") for name in files}
    documents = ("run.json", "plan.json", "environment.json", "floor.json")
    inside = {f"runs/{run.name}/{name}" for name in (*documents, *TABLES, CHECKSUMS_FILE)}
    assert names >= inside | {
        "README.md",
        MANIFEST,
        "report/report.html",
        "report/report.md",
        "report/figures/latency.pdf",
    }
    lines = [line.split("  ") for line in files[f"evidence/{MANIFEST}"].decode().splitlines()]
    listed = {name: digest for digest, name in lines}
    assert listed.keys() == names - {MANIFEST}
    assert all(hashlib.sha256(files[f"evidence/{name}"]).hexdigest() == digest for name, digest in listed.items())
    assert files[f"evidence/runs/{run.name}/plan.json"] == (run / "plan.json").read_bytes()
    assert verify_pack(archive) == []


def test_an_unpacked_run_reads_and_is_not_to_be_edited(run: Path, archive: Path, tmp_path: Path):
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    folder = tmp_path / "unpacked" / "evidence" / "runs" / run.name
    assert len(load_rows(folder)) == len(load_rows(run))
    rows = folder / "rows.parquet"
    pq.write_table(pq.read_table(rows), rows, compression="gzip")
    with pytest.raises(StoreError, match=rf"was changed since .* where {folder / CHECKSUMS_FILE} allows"):
        load_rows(folder)
    with pytest.raises(StoreError, match="was changed since"):
        material.load([folder])


def test_the_same_content_gives_the_same_bytes(run: Path, archive: Path, tmp_path: Path):
    again = tmp_path / "evidence.tar.gz"
    for path in (archive.parent / "report").rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    pack.pack(material.load([run]), archive.parent / "report", again)
    assert again.read_bytes() == archive.read_bytes()
    with tarfile.open(again) as tar:
        kept = {(member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode) for member in tar}
    assert kept == {(0, 0, 0, "", "", 0o644)}
    assert again.read_bytes()[4:8] == bytes(4)  # gzip's own time


def test_what_was_deposited_gives_the_same_numbers(run: Path, archive: Path, tmp_path: Path):
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    deposited = tmp_path / "evidence" / "runs" / run.name
    assert load_rows(deposited).equals(load_rows(run))
    assert len(load_samples(deposited)) == len(load_samples(run)) > 0
    before, after = material.load([run]), material.load([deposited])
    assert cells(after.records) == cells(before.records)
    assert (after.runs[0].missing, after.runs[0].floor) == (0, before.runs[0].floor)
    assert after.samples.equals(before.samples)
    assert cli.run(["report", str(deposited), "--output", str(tmp_path / "again")]) == 0
    first = (archive.parent / "report" / "report.html").read_bytes()
    assert (tmp_path / "again" / "report.html").read_bytes() == first


def changed(files: Files) -> Files:
    return {name: content + b" " if name.endswith("report.md") else content for name, content in files.items()}


def without(ending: str) -> Callable[[Files], Files]:
    return lambda files: {name: content for name, content in files.items() if not name.endswith(ending)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed, "report/report.md: its checksum does not hold"),
        (without("report.md"), "report/report.md: listed in MANIFEST.sha256 and missing"),
        (without(MANIFEST), "MANIFEST.sha256 is missing"),
        (lambda files: {**files, "evidence/extra": b""}, "extra: not listed in MANIFEST.sha256"),
        (lambda files: {**files, "evidence/../../etc": b""}, "evidence/../../etc: no place inside"),
        (lambda files: {**files, "/etc/passwd": b""}, "/etc/passwd: no place inside"),
    ],
)
def test_every_change_is_found(archive: Path, tmp_path: Path, change: Callable[[Files], Files], problem: str):
    files = read(archive)
    assert verify_pack(write(tmp_path / "same.tar.gz", files)) == []
    problems = verify_pack(write(tmp_path / "changed.tar.gz", change(files)))
    assert any(found.startswith(problem) for found in problems), problems


def test_links_duplicates_and_bad_lines_are_found(archive: Path, tmp_path: Path):
    files = read(archive)

    def link(member: tarfile.TarInfo) -> None:
        if member.name.endswith("report.md"):
            member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0

    assert "evidence/report/report.md: not a plain file of a sane size" in verify_pack(
        write(tmp_path / "link.tar.gz", files, link)
    )
    twice = tmp_path / "twice.tar.gz"
    with tarfile.open(twice, "w:gz") as tar:
        for name, content in [*files.items(), *list(files.items())[-1:]]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert [problem for problem in verify_pack(twice) if problem.endswith("there twice")]
    files[f"evidence/{MANIFEST}"] += b"nonsense\n"
    assert "MANIFEST.sha256: 'nonsense' is no line" in verify_pack(write(tmp_path / "line.tar.gz", files))[0]


@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
def test_a_flipped_or_cut_archive_is_found(archive: Path, tmp_path: Path, where: float):
    content = bytearray(archive.read_bytes())
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(content[: int(len(content) * where)])
    assert verify_pack(cut) != []
    content[int(len(content) * where)] ^= 0xFF
    flipped = tmp_path / "flipped.tar.gz"
    flipped.write_bytes(content)
    assert verify_pack(flipped) != []


def test_names_and_places_that_cannot_be(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    assert cli.run(["report", str(run), "--output", str(tmp_path / "r"), "--pack", str(tmp_path / "x.zip")]) == 2
    assert "the archive is a .tar.gz file" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()  # found before anything is drawn
    with pytest.raises(ConfigError):
        pack.check_name(Path(".tar.gz"))
    with pytest.raises(StoreError, match="does not exist"):
        verify_pack(tmp_path / "none.tar.gz")
    (tmp_path / "text.tar.gz").write_text("no archive")
    assert "no archive" in verify_pack(tmp_path / "text.tar.gz")[0]
    (tmp_path / "file").write_text("")
    words = ["report", str(run), "--output", str(tmp_path / "r"), "--pack", str(tmp_path / "file" / "in" / "x.tar.gz")]
    assert cli.run(words) == 2
    assert f"{tmp_path / 'file'} is a file, so nothing can lie in it" in capsys.readouterr().err
    monkeypatch.setattr(pack.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written; make it writable"):
        pack.check_name(tmp_path / "in" / "x.tar.gz")


def test_a_disk_that_refuses_is_told_without_a_temporary_name(run: Path, tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path.with_name(".x.tar.gz.1234.tmp")))

    monkeypatch.setattr(pack, "write_whole", full)
    with pytest.raises(StoreError) as caught:
        pack.pack(material.load([run]), tmp_path, tmp_path / "x.tar.gz")
    text = f"the archive {tmp_path / 'x.tar.gz'} could not be written: No space left on device. Choose another place"
    assert str(caught.value) == text


def test_only_the_report_is_packed_of_what_lies_in_its_folder(run: Path, tmp_path: Path):
    folder = tmp_path / "report"
    target = folder / "evidence.tar.gz"  # the second archive must not hold the first
    command = ["report", str(run), "--output", str(folder), "--pack", str(target)]
    assert cli.run(command) == 0
    first = target.read_bytes()
    (folder / "private.txt").write_text("not for deposit")
    (folder / "tables" / "notes.txt").write_text("nor this")
    assert cli.run(command) == 0
    assert target.read_bytes() == first
