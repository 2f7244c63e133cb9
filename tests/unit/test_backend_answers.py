"""What a backend declares and answers is held to the contract at once, in words that say what is allowed."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from planning import FIXTURES, plan_of, problems_of
from tests import broken_declarations as broken
from tests._points import small_point
from tests.broken_backends import ReferenceBackend

from epcross.harness.backends import answers, loader, trial
from epcross.harness.backends.answers import CONTRACT, WrongBackend
from epcross.harness.commands.backends import survey
from epcross.harness.errors import ConfigError
from epcross.harness.planning.estimate import needs
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.terms import Status

HERE = "tests.broken_declarations"


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these classes ends its process, and a process for each takes a third of a second."""
    monkeypatch.setattr(trial, "fatal", lambda *_: None)


def config(target: str, **options) -> BackendConfig:
    return BackendConfig(
        name="mine", target=target, label="Mine", color="#000000", folder=str(FIXTURES), options=options
    )


def backends(folder: Path, targets: Mapping[str, str], more: str = "") -> Path:
    """A configuration folder with these."""
    (folder / "backend").mkdir()
    for name, target in targets.items():
        text = f"target: {target}\nlabel: {name}\ncolor: '#111111'\n{more}"
        (folder / "backend" / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("what", broken.DECLARED)
def test_a_wrong_declaration_is_named_and_a_right_one_taken(what: str):
    assert isinstance(loader.load(config(f"{HERE}:Right_{what}")), ReferenceBackend)
    with pytest.raises(WrongBackend) as caught:
        loader.load(config(f"{HERE}:Wrong_{what}"))
    assert broken.DECLARED[what].words in str(caught.value)
    assert CONTRACT in str(caught.value)


def test_all_wrong_declarations_are_told_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReferenceBackend, "host_sync", None)
    with pytest.raises(WrongBackend, match=r"host_sync is None, .*; stable_order is 1, "):
        loader.load(config(f"{HERE}:Wrong_stable_order"))


@pytest.mark.parametrize("what", ["unavailable", "unsupported", "refused_here", "workspace_bytes", "describe"])
def test_a_wrong_answer_is_named_and_a_right_one_taken(what: str):
    asked = {"unavailable": answers.unavailable, "describe": answers.described}
    ask = asked.get(what) or (lambda backend: getattr(answers, what)(backend, small_point()))
    said = broken.ANSWERED[what]
    assert ask(loader.load(config(f"{HERE}:Right_{what}"))) == said.right
    with pytest.raises(WrongBackend) as caught:
        ask(loader.load(config(f"{HERE}:Wrong_{what}")))
    assert f"{what}() of {HERE}:Wrong_{what} {said.words}" in str(caught.value)


@pytest.mark.parametrize("what", broken.DESCRIBED)
def test_a_wrong_field_of_a_description_is_named_and_a_right_one_is_plain(what: str):
    told = answers.described(loader.load(config(f"{HERE}:Right_told_{what}")))
    assert getattr(told, what) == (("one",) if what == "kernels" else broken.DESCRIBED[what].right)
    assert type(told.workspace_bytes) is type(told.num_sms) is int  # as JSON wants them
    with pytest.raises(WrongBackend) as caught:
        answers.described(loader.load(config(f"{HERE}:Wrong_told_{what}")))
    assert broken.DESCRIBED[what].words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrong_domains", "domains is None, but must be a set of Domain"),
        ("Wrong_unavailable", "unavailable() of tests.broken_declarations:Wrong_unavailable is 5"),
        ("Wrong_unsupported", "unsupported() of tests.broken_declarations:Wrong_unsupported is ' '"),
        ("Wrong_workspace_bytes", "is -7, but must be a whole number from 0 to 2**63 - 1"),
        ("Leaves_unsupported", "its check of the point failed: unsupported() raised SystemExit: 0"),
        ("Leaves_workspace_bytes", "its check of the point failed: workspace_bytes() raised SystemExit: 0"),
        ("Leaves___init__", "__init__ of tests.broken_declarations:Leaves___init__ raised SystemExit: 0"),
        ("Leaves_option_defaults", "option_defaults of tests.broken_declarations:Leaves_option_defaults raised"),
        ("Leaves_option_problems", "option_problems of tests.broken_declarations:Leaves_option_problems raised"),
    ],
)
def test_a_plan_counts_the_points_of_a_wrong_backend_as_errors_and_keeps_the_others(tmp_path, name, reason):
    folder = backends(tmp_path, {"bad": f"{HERE}:{name}"})
    plan = plan_of("sweep=smoke", "backend=plain,bad,small", more=(folder,))
    assert len(plan.impossible) * 3 == len(plan.points)
    assert {(i.point.backend, i.status) for i in plan.impossible} == {("bad", Status.ERROR)}
    assert reason in plan.impossible[0].reason
    assert {point.backend for job in plan.jobs for point in job.points} == {"plain", "small"}
    assert all(need.shm_bytes >= 0 for need in needs(plan))


def test_a_wrong_backend_is_listed_with_what_is_wrong_beside_the_others(tmp_path: Path):
    folder = backends(tmp_path, {name: f"{HERE}:Wrong_{name}" for name in ("domains", "unavailable")})
    found = {entry["name"]: entry["unavailable"] for entry in survey((FIXTURES, folder))}
    assert "domains is None" in found["domains"]
    assert "is 5" in found["unavailable"]
    assert found["plain"] is None


def test_the_answer_of_another_interpreter_is_held_to_the_contract():
    asked = BackendConfig(name="m", target=f"{HERE}:Wrong_unavailable", label="M", color="#000000", env={"A": "1"})
    with pytest.raises(WrongBackend, match="is 5, but must be None"):
        loader.unavailable(asked)


def test_a_module_that_leaves_is_a_reason(tmp_path: Path):
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)\n")
    folder = backends(tmp_path, {"bad": "leaves_at_once:Kernel"})
    plan = plan_of("sweep=smoke", "backend=plain,bad", more=(folder,))
    assert {(i.status, i.reason) for i in plan.impossible} == {
        (Status.UNAVAILABLE, "importing leaves_at_once fails with SystemExit: 3")
    }


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too large"), "ValueError: too large"),
        (SystemExit(3), "SystemExit: 3"),
        (OSError("lib\udc80.so"), "OSError: lib?.so"),
        (RuntimeError(), "RuntimeError"),
        (Mute(), "Mute"),
    ],
)
def test_what_others_code_ends_with_can_be_shown(error: BaseException, said: str):
    assert answers.failure(error) == said


def test_an_options_value_that_serves_nobody_is_wrong_usage(tmp_path: Path):
    folder = backends(tmp_path, {"picky": f"{HERE}:Picky"})
    words = ("sweep=smoke", "backend=picky", "backend.options.chunk=0", "backend.options.algorithm=3")
    assert problems_of(*words, more=(folder,)) == (
        "backend 'picky': option algorithm is 3, but must be text; put it in quotes",
        "backend 'picky': option chunk=0 must be above 0",
    )
    assert plan_of("sweep=smoke", "backend=picky", "backend.options.chunk=1", more=(folder,)).impossible == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Talks", f"option_problems() of {HERE}:Talks is 'no', but must be a list of sentences"),
        (
            "Forgets",
            f"options after __init__ of {HERE}:Forgets is {{}}, but must be {{'chunk': 4, 'algorithm': 'ring'}}",
        ),
        ("Unplain", f"the default of option 'chunk' of {HERE}:Unplain is [4], but must be text, a number"),
    ],
)
def test_wrong_words_about_options_are_named(name: str, says: str):
    with pytest.raises(WrongBackend, match=re.escape(says)):
        loader.load(config(f"{HERE}:{name}"))


def test_an_expert_stages_value_that_serves_nobody_is_wrong_usage():
    words = ("sweep=layer_one_gpu", "backend=layer_onesided", "compute=gather_gemm", "compute.options.block_t=3")
    assert any("compute 'gather_gemm': option block_t=3 must be one of" in text for text in problems_of(*words))
    words = ("sweep=layer_one_gpu", "backend=layer_onesided", "compute=deepgemm", "compute.options.form=round")
    assert any("compute 'deepgemm': option form=round must be" in text for text in problems_of(*words))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "engines: {vlm: x}",
            "engines: unknown engine 'vlm'; did you mean 'vllm'? Allowed: vllm, sglang, tensorrt_llm",
        ),
        (
            "compute: gather_gemm",
            "compute is 'gather_gemm', but its class has kind=exchange and only layer, experts read",
        ),
        (
            "weight_format: fp4",
            "weight_format is 'fp4', but its class has kind=exchange and only layer, experts, fused",
        ),
        (
            "folder: /tmp",
            "unknown key 'folder'; allowed: target, label, color, marker, options, python, env, known_issues",
        ),
        (
            "colours: 3",
            "unknown key 'colours'; did you mean 'color'? Allowed: target, label, color, marker, options, python, env",
        ),
    ],
)
def test_what_a_file_cannot_mean_is_refused(tmp_path: Path, line: str, says: str):
    folder = backends(tmp_path, {"mine": f"{HERE}:Picky"}, line)
    (problem,) = problems_of("sweep=smoke", "backend=mine", more=(folder,))
    assert says in problem
    assert "computes" not in problem


def test_a_label_tells_one_backend(tmp_path: Path):
    folder = backends(tmp_path, {"mine": f"{HERE}:Picky"})
    path = folder / "backend" / "mine.yaml"
    path.write_text(path.read_text().replace("label: mine", "label: Plain"))
    with pytest.raises(ConfigError, match="label 'Plain' is that of plain and mine; give each backend one of its own"):
        plan_of("sweep=smoke", "backend=plain,mine", more=(folder,))
    assert plan_of("sweep=smoke", "backend=mine", more=(folder,)).points
