import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_values import PLAN, failing, files_of

from epcross.harness.errors import StoreError
from epcross.harness.record import SCHEMA_VERSION
from epcross.harness.storing import run_directory, sealed
from epcross.harness.storing.store import (
    RunDirectory,
    claim,
    create_run,
    open_run,
    owner_of,
    read_floor,
    release,
    write_floor,
)


def test_a_new_run_opens_with_what_it_was_given(run: RunDirectory):
    opened = open_run(run.path)
    assert opened == run
    assert json.dumps(opened.plan) == json.dumps(PLAN)
    assert opened.environment == {"hostname": "here"}
    assert opened.sweep == "quickstart"
    assert opened.run_id == run.path.name == opened.allocation_id
    stamp, clock, sweep, suffix = opened.run_id.split("-")
    assert (len(stamp), len(clock), sweep, len(suffix)) == (8, 6, "quickstart", 4)
    assert files_of(run.path) == ["attempts", "environment.json", "logs", "owner", "plan.json", "run.json", "units"]


def test_no_terminal_escape_is_stored_of_the_topology(tmp_path: Path):
    run = create_run(tmp_path, "s", PLAN, {"gpu_topology": "\x1b[4mGPU0\x1b[0m"})
    assert run.environment == {"gpu_topology": "GPU0"}
    run_directory.replace_environment(run, {"gpu_topology": "\x1b[4mGPU1\x1b[0m"})
    assert open_run(run.path).environment == {"gpu_topology": "GPU1"}


def test_a_sweep_name_cannot_spoil_the_path(tmp_path: Path):
    run = create_run(tmp_path, "../my dir/tokens=1,2.yaml", PLAN, {})
    assert run.path.parent == tmp_path
    assert run.run_id.split("-", 2)[2].startswith("tokens-1-2-")
    assert run.sweep == "../my dir/tokens=1,2.yaml"


def test_runs_started_in_the_same_second_never_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    suffixes = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda n: next(suffixes) if n == 2 else os.urandom(n).hex())

    class Frozen(run_directory.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(run_directory, "datetime", Frozen)
    names = [create_run(tmp_path, "s", PLAN, {}).run_id for _ in range(2)]
    assert names == ["20260102-030405-s-aaaa", "20260102-030405-s-bbbb"]


def test_an_unwritable_output_dir_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot create a run in .*file.*output_dir"):
        create_run(tmp_path / "file", "s", PLAN, {})


def test_a_full_disk_at_creation_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealed.os, "write", failing(errno.ENOSPC))
    with pytest.raises(StoreError, match="No space left on device; nothing was measured"):
        create_run(tmp_path, "s", PLAN, {})
    assert files_of(tmp_path) == []


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match=r"is not a run directory: it has no run\.json"):
        open_run(tmp_path / "absent")


def test_a_newer_schema_names_the_version_that_reads_it(run: RunDirectory):
    header = {**sealed.read_sealed(run.path / "run.json"), "schema_version": SCHEMA_VERSION + 1}
    sealed.write_whole(run.path / "run.json", sealed.seal({**header, "epcross_version": "9.1", "new": 1}))
    with pytest.raises(StoreError, match=r"written by epcross 9\.1; this is epcross .* Install epcross 9\.1 or later"):
        open_run(run.path)


@pytest.mark.parametrize("name", ["plan.json", "environment.json", "run.json"])
def test_a_torn_document_is_named(run: RunDirectory, name: str):
    file = run.path / name
    whole = file.read_bytes()
    for torn in (whole[:-1], whole[: len(whole) // 2], b"", whole.replace(b"{", b"[", 2), b"[]"):
        file.write_bytes(torn)
        with pytest.raises(StoreError, match=rf"{name} is damaged.*start a new run"):
            open_run(run.path)


def test_a_foreign_header_is_refused(run: RunDirectory):
    (run.path / "run.json").write_bytes(sealed.seal({"schema_version": 1}))
    with pytest.raises(StoreError, match=r"run\.json is not the header of a run"):
        open_run(run.path)


def test_a_missing_plan_is_named(run: RunDirectory):
    (run.path / "plan.json").unlink()
    with pytest.raises(StoreError, match=r"plan\.json cannot be read: No such file"):
        open_run(run.path)


def test_the_floor_is_kept(run: RunDirectory):
    assert read_floor(run) is None
    write_floor(run, {"cpu_ep2": {"empty_pair_us": 0.5}})
    assert read_floor(run) == {"cpu_ep2": {"empty_pair_us": 0.5}}


CLAIMER = """
import sys, time
from pathlib import Path
from epcross.harness.errors import StoreError
from epcross.harness.storing.store import claim
try:
    claim(Path(sys.argv[1]))
except StoreError as error:
    print(error)
    sys.exit(3)
print("claimed", flush=True)
time.sleep(float(sys.argv[2]))
"""


def claimer(run: RunDirectory, hold_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLAIMER, str(run.path), str(hold_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_until_the_owner_is_gone(run: RunDirectory):
    second = claimer(run, 0)
    words, _ = second.communicate()
    assert second.returncode == 3
    assert f"in use by process {os.getpid()} on" in words
    assert "delete" in words
    release(run.path)
    assert owner_of(run.path) is None
    third = claimer(run, 60)
    assert third.stdout
    assert third.stdout.readline() == "claimed\n"
    with pytest.raises(StoreError, match=f"in use by process {third.pid}"):
        claim(run.path)
    release(run.path)  # not ours: stays
    assert (owner_of(run.path) or "").startswith(f"process {third.pid} ")
    third.kill()  # dies without a word; a zombie until waited for
    deadline = time.monotonic() + 10
    while owner_of(run.path) and time.monotonic() < deadline:
        time.sleep(0.01)
    claim(run.path)
    assert (owner_of(run.path) or "").startswith(f"process {os.getpid()} ")
    third.communicate()


def test_of_many_that_find_a_dead_owner_one_takes_over(run: RunDirectory):
    owner = json.loads((run.path / "owner").read_bytes())
    (run.path / "owner").write_text(json.dumps({**owner, "start": "1"}))
    claimers = [claimer(run, 60) for _ in range(3)]
    first_words = [process.stdout.readline() for process in claimers if process.stdout]
    assert sum(words == "claimed\n" for words in first_words) == 1
    assert sum("is in use by process" in words for words in first_words) == 2
    for process in claimers:
        process.kill()
        process.communicate()


def test_an_owner_elsewhere_is_taken_as_alive_and_one_before_a_reboot_as_dead(run: RunDirectory):
    owner = json.loads((run.path / "owner").read_bytes())
    (run.path / "owner").write_text(json.dumps({**owner, "host": "elsewhere"}))
    with pytest.raises(StoreError, match=r"on elsewhere \(another host"):
        claim(run.path)
    (run.path / "owner").write_text(json.dumps({**owner, "pid_namespace": "pid:[1]"}))
    with pytest.raises(StoreError, match=r"\(another container"):
        claim(run.path)
    for dead in ({**owner, "boot": "earlier"}, {**owner, "start": "1"}, {**owner, "pid": 2**22 + 1}):
        (run.path / "owner").write_text(json.dumps(dead))
        claim(run.path)
        assert json.loads((run.path / "owner").read_bytes()) == owner


def test_a_folder_that_cannot_be_written_cannot_be_claimed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealed.os, "write", failing(errno.EROFS))
    with pytest.raises(StoreError, match="cannot be written: Read-only file system"):
        claim(run.path)


def test_claiming_twice_does_no_harm(run: RunDirectory):
    claim(run.path)
    claim(run.path)


@pytest.mark.parametrize("content", ["[]", "{", '{"other": 1}'])
def test_damaged_documents_are_restored_from_where_there_are_others(run: RunDirectory, content: str):
    """A run has its units; documents of a committed folder have none, and are under version control."""
    (run.path / "plan.json").write_text(content)
    with pytest.raises(StoreError, match="or start a new run; units/ is untouched"):
        open_run(run.path)
    for each in sorted((run.path / "units").iterdir()):
        each.unlink()
    (run.path / "units").rmdir()
    with pytest.raises(StoreError, match="Restore it from version control or from a copy"):
        open_run(run.path)
