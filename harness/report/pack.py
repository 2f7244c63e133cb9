"""One archive fit for deposit: the runs as tables and documents, the report, and a checksum for each file.

    <name>/MANIFEST.sha256            as `sha256sum -c` reads it
    <name>/README.md
    <name>/runs/<run_id>/             run, plan, environment and floor as JSON; rows.parquet and samples.parquet, and
                                      their checksums.json; withdrawn.json where rows are withdrawn
    <name>/report/                    the page, Markdown, tables and figures

The same runs and report give the same bytes: names are sorted, and times, owners and modes are fixed.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import epcross
from epcross.harness.analysis.material import Material, Run
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.report.page import report_files
from epcross.harness.storing.checksums import CHECKSUMS_FILE, as_file, sums_of
from epcross.harness.storing.parquet import ROWS_FILE, SAMPLES_FILE, rows_table
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.table_files import as_parquet
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE
from epcross.harness.storing.withdrawn import as_file as withdrawn_as_file

SUFFIX = ".tar.gz"
MANIFEST = "MANIFEST.sha256"

_DOCUMENTS = ("run.json", "plan.json", "environment.json", "floor.json")
_MANY_BYTES = 8 << 30  # a file that says it is larger than this is not read


def check_name(target: Path) -> None:
    """Raise ConfigError if `target` cannot be the name of an archive, or lies where none can be made."""
    if not target.name.endswith(SUFFIX) or target.name == SUFFIX:
        raise ConfigError(f"--pack {target}: the archive is a {SUFFIX} file; name it so, such as evidence{SUFFIX}")
    above = next((folder for folder in target.parents if folder.exists()), Path("/"))
    if not above.is_dir():
        raise ConfigError(f"--pack {target}: {above} is a file, so nothing can lie in it; name another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--pack {target}: {above} cannot be written; make it writable, or name another place")


def pack(material: Material, report: Path, target: Path) -> Path:
    """Put the runs of `material` and the report in the folder `report` into the archive `target`.

    Raises:
        ConfigError: `target` is not named *.tar.gz.
        StoreError: something cannot be read or written; `target` is then what it was before.
    """
    check_name(target)
    try:
        files = {f"report/{path.relative_to(report).as_posix()}": path.read_bytes() for path in report_files(report)}
        for run in material.runs:
            files |= {f"runs/{run.run_id}/{name}": content for name, content in _run_files(run).items()}
        files["README.md"] = _readme(material).encode()
        files[MANIFEST] = _manifest(files)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, _archive(target.name.removesuffix(SUFFIX), files))
    except OSError as error:
        raise StoreError(
            f"the archive {target} could not be written: {error.strerror or error}. Choose another place"
        ) from error
    return target


def verify_pack(path: Path) -> list[str]:
    """What is wrong with the archive at `path`, as sentences; empty if every file is what its manifest says.

    Nothing is unpacked. Names that lead outside the archive's folder, links and duplicates are faults.

    Raises:
        StoreError: there is no such file, or it cannot be opened.
    """
    if not path.is_file():
        raise StoreError(f"{path} does not exist. Give the archive that `epcross report --pack` wrote")
    problems: list[str] = []
    hashes: dict[str, str] = {}
    manifest: bytes | None = None
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                inner = "/".join(name.parts[1:])
                if name.is_absolute() or ".." in name.parts or not inner:
                    problems.append(f"{member.name}: no place inside the archive's own folder")
                elif not member.isreg() or member.size > _MANY_BYTES:
                    problems.append(f"{member.name}: not a plain file of a sane size")
                elif inner in hashes or (inner == MANIFEST and manifest is not None):
                    problems.append(f"{member.name}: there twice")
                else:
                    stream = archive.extractfile(member)
                    content = stream.read() if stream else b""
                    if inner == MANIFEST:
                        manifest = content
                    else:
                        hashes[inner] = hashlib.sha256(content).hexdigest()
    except (tarfile.TarError, EOFError, OSError, gzip.BadGzipFile, ValueError) as error:
        return [f"{path} is cut, changed or no archive: {error}"]
    except Exception as error:  # zlib.error is no OSError and has no public base class
        if type(error).__module__ != "zlib":
            raise
        return [f"{path} is cut, changed or no archive: {error}"]
    if manifest is None:
        return [*problems, f"{MANIFEST} is missing"]
    listed = _read_manifest(manifest, problems)
    problems += [f"{name}: listed in {MANIFEST} and missing" for name in sorted(listed.keys() - hashes.keys())]
    problems += [f"{name}: not listed in {MANIFEST}" for name in sorted(hashes.keys() - listed.keys())]
    both = sorted(listed.keys() & hashes.keys())
    problems += [f"{name}: its checksum does not hold" for name in both if listed[name] != hashes[name]]
    return problems


def _run_files(run: Run) -> dict[str, bytes]:
    files = {name: (run.directory.path / name).read_bytes() for name in _DOCUMENTS
             if (run.directory.path / name).is_file()}  # fmt: skip
    tables = {ROWS_FILE: as_parquet(rows_table(run.records)), SAMPLES_FILE: as_parquet(run.samples)}
    files |= {**tables, CHECKSUMS_FILE: as_file(sums_of(tables))}
    if run.withdrawn:  # the rows carry the flag, this the reasons
        files[WITHDRAWN_FILE] = withdrawn_as_file(run.withdrawn)
    return files


def _readme(material: Material) -> str:
    runs = "\n".join(
        f"- `runs/{run.run_id}`: sweep {run.directory.sweep}, {run.directory.created}" for run in material.runs
    )
    return f"""# Measurements by epcross {epcross.__version__}

{runs}

`report/report.html` shows them. Check that every file is whole:

    sha256sum -c {MANIFEST}

`rows.parquet` has one line for each row, `samples.parquet` one for each sample; any Parquet reader opens them, and
`epcross report runs/<run_id>` makes the report again. Each JSON file has the form {{"sha256": ..., "content": ...}}.
"""


def _manifest(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()


def _read_manifest(manifest: bytes, problems: list[str]) -> dict[str, str]:
    listed: dict[str, str] = {}
    for line in manifest.decode(errors="replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64 or name in listed:
            problems.append(f"{MANIFEST}: {line!r} is no line of a manifest, or a second one for its file")
        else:
            listed[name] = digest
    return listed


def _archive(root: str, files: Mapping[str, bytes]) -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{root}/{name}")  # mtime 0, no owner
            member.mode = 0o644
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return gzip.compress(tar.getvalue(), compresslevel=6, mtime=0)
