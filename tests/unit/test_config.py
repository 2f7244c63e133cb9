"""Configuration: every file composes, words mean what Hydra's grammar says, and all problems come at once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from planning import FIXTURES, plan_of, problems_of, sweep_file, the_problem

import epcross
from epcross.harness.backends import loader
from epcross.harness.errors import ConfigError
from epcross.harness.planning.config import resolve
from epcross.harness.planning.library import PACKAGE_CONF, SCHEMAS, Library, read_plain

OWN = [(group, name) for group in SCHEMAS for name in Library().names(group)]


@pytest.mark.parametrize(("group", "name"), OWN)
def test_every_group_file_composes_to_its_dataclass(group: str, name: str):
    library = Library()
    problems: list[str] = []
    library.load([(group, name)], problems)
    assert problems == []
    assert isinstance(library.get(group, name), SCHEMAS[group])


def test_a_file_that_has_nothing_for_hydra_is_read_as_hydra_composes_it():
    library = Library()
    read = {(group, name): read_plain(library._files[group][name]) for group, name in OWN}
    plain = [key for key, value in read.items() if value is not None]
    assert len(plain) > len(OWN) / 2
    composed = library._composed(plain)
    assert {key: read[key] for key in plain} == composed
    assert repr([read[key] for key in plain]) == repr([composed[key] for key in plain])  # the order and types of all


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [tiny]\nhidden: 64\n",
        "# @package _global_\nhidden: 64\n",
        "hidden: 64\nintermediate: ${hidden}\n",
        "hidden: ???\n",
        "hidden: [1\n",
        "hidden: 1\nhidden: 2\n",
        "- hidden\n",
        "",
    ],
)
def test_any_other_file_is_left_to_hydra(tmp_path: Path, text: str):
    (tmp_path / "mine.yaml").write_text(text)
    assert read_plain(tmp_path / "mine.yaml") is None


def test_the_groups_of_the_design_exist():
    for group in ("cluster", "device", "launcher", "model", "placement", "routing", "timing", "sweep"):
        assert Library().names(group), group


def test_words_choose_and_change():
    config = resolve(["sweep=floor", "timing=headline", "timing.launches=7", "output_dir='a,b=c'"])
    assert config.timing.launches == 7
    assert config.timing.chains == 10
    assert config.output_dir == "a,b=c"


def test_a_sweep_chooses_its_timing_and_the_command_line_has_the_last_word():
    assert resolve(["sweep=floor"]).timing.launches == 3
    assert resolve(["sweep=floor", "timing=default"]).timing.launches == 5


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tokens_per_rank=4", [4]),
        ("tokens_per_rank=1,8,32", [1, 8, 32]),
        ("tokens_per_rank=range(1,4)", [1, 2, 3]),
        ("tokens_per_rank=choice(5,3)", [5, 3]),
        ("+tokens_per_rank=4", [4]),
        ("++tokens_per_rank=4", [4]),
    ],
)
def test_grammar_of_an_axis(word: str, expected: list[int]):
    plan = plan_of("sweep=crossover", "backend=plain", "regime=steady", word)
    assert [point.tokens_per_rank for point in plan.points] == expected


def test_a_list_is_one_value_and_glob_selects_options():
    plan = plan_of("sweep=crossover", "regime=steady", "backend=glob([p*,sm*])", "tokens_per_rank=[3,1],[0,2]")
    assert [(point.backend, point.tokens) for point in plan.points] == [
        ("plain", (3, 1)),
        ("plain", (0, 2)),
        ("small", (3, 1)),
        ("small", (0, 2)),
    ]


def test_all_problems_at_once_with_suggestions():
    problems = problems_of(
        "sweep=quikstart", "model=tinny", "regime=stead", "token_per_rank=1", "timing.lanches=3", "timing=quik"
    )
    assert len(problems) == 6
    text = "\n".join(problems)
    for suggestion in ("quickstart", "tiny", "steady", "tokens_per_rank", "launches", "quick"):
        assert f"did you mean '{suggestion}'?" in text
    assert f"Allowed: {', '.join(Library().names('sweep'))}" in text


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ('tokens_per_rank="1,2"', "several values are a list, [1, 2], or unquoted on the command line"),
        ("tokens_per_rank='8'", "leave out the quotes"),
        ("tokens_per_rank=1.5", "is 1.5, but must be an integer or a list"),
        ("tokens_per_rank=true", "is True, but must be an integer or a list"),
        ("ep_size=null", "is None, but must be an integer"),
        ("backend=off", "unknown backend 'off'"),
        ("backend=none", "unknown backend 'none'"),
        ("backend=", "unknown backend ''"),
        ("model=[tiny,tiny_odd]", "but must be text"),
        ("routing.path=/a=b", "quote a value"),
        ("~model", "~ and @ have no use here"),
        ("model@other=tiny", "~ and @ have no use here"),
        ("tokens_per_rank", "write key=value"),
        ("tokens_per_rank=shuffle(1,2)", "stable order"),
        ("tokens_per_rank=range(1,1000000000000)", "stands for more than 10000 values"),
        ("tokens_per_rank=interval(1,2)", "range(start,stop,step)"),
        ("backend=glob(zz*)", "selects nothing"),
        ("ep_size=glob(2*)", "selects options of"),
        ("sweep=floor,smoke", "takes one name for the whole sweep"),
        ("timing.launches=1,2", "give one value"),
        ("timing.launches=x", "launches is 'x', but must be an integer"),
        ("timing.launches=0", "timing.launches=0 must be at least 1"),
        ("timing.max_pairs=1", "timing.max_pairs=1 is below min_pairs"),
        ("timing.wall_limit_s=0", "must be above 0"),
        ("timing.warmup_ms=-1", "timing.warmup_ms=-1.0 must be at least 0"),
        ("timing.warmup_ms=1e307", "takes 3e+304 s, more than wall_limit_s="),
        ("timing.chain_ms=inf", "is inf, but must be a finite number"),
        ("capacity_factor=nan", "is nan, but must be a finite number"),
        ("output_dir=${missing}", "Interpolation key 'missing' not found"),
        ("output_dir=3", "takes one path"),
        ("model.hidden=big", "must be an integer"),
        ("routing.kind=zip", "did you mean 'zipf'?"),
    ],
)
def test_a_wrong_word_is_refused_with_a_hint(word: str, says: str):
    words = ["sweep=crossover", word] + (["backend=plain"] if not word.startswith("backend") else [])
    if word.startswith("sweep"):
        words.remove("sweep=crossover")
    assert says in "\n".join(problems_of(*words))


def test_one_wrong_value_is_one_problem():
    assert the_problem("sweep=crossover", "backend=plain", "regime=stead").startswith("command line: regime is 'stead'")


def test_a_key_given_twice_is_refused():
    assert "given twice" in the_problem("backend=plain", "ep_size=2", "ep_size=4")


def test_a_quoted_path_may_hold_anything(tmp_path: Path):
    folder = tmp_path / "a,b=c (1) 'd'"
    config_dir = sweep_file(folder, "description: x\ngrid: {backend: plain, model: tiny}\n")
    assert plan_of("sweep=mine", more=(config_dir,)).points[0].model.name == "tiny"
    trace = tmp_path / "t,1=2.npz"
    np.savez(trace, ids=np.array([[1, 0]]))
    point = plan_of("sweep=mine", "routing=trace", f"routing.path='{trace}'", more=(config_dir,)).points[0]
    assert point.routing.path == str(trace)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grid: {backend: plain}", "description is missing"),
        ("description: x\ngird: {backend: plain}", "did you mean 'grid'?"),
        ("description: x\ntiming: quik\ngrid: {backend: plain}", "did you mean 'quick'?"),
        ("description: x\ngrid: {backend: plain, tokens_per_ranks: 1}", "did you mean 'tokens_per_rank'?"),
        ("description: x\ngrid: {backend: off}", "put a name in quotes"),
        ('description: x\ngrid: {backend: plain, tokens_per_rank: "1,2"}', "several values are a list"),
        ("description: x\ngrid: {backend: plain, tokens_per_rank: []}", "tokens_per_rank has no values"),
        ("description: x\ngrid: {backend: [plain, plane]}", "did you mean 'plain'?"),
        ("description: x\nzip: [{backend: [plain, other], ep_size: [2]}]", "must have one length"),
        ("description: x\ngrid: {ep_size: 2}\nzip: [{ep_size: [2], backend: [plain]}]", "named twice"),
        ("description: x\ngrid: {backend: plain}\nexclude: [{bakend: plain}]", "unknown factor 'bakend'"),
        ("description: x\ngrid: {backend: plain}\nexclude: [{backend: plian}]", "did you mean 'plain'?"),
        ("description: x\ngrid: {backend: plain}\nexclude: [{ep_size: 2}]", "no points"),
        ("description: x\ngrid: {ep_size: 2}", "no backend is named"),
        ("description: x\ngrid: 3", "must be a mapping"),
        ("description: [x", "cannot be composed"),
        ("description: ???\ngrid: {backend: plain}", "cannot be composed"),
        ("- a\n- b", "must be a mapping with description"),
    ],
)
def test_a_wrong_sweep_file_is_refused_with_a_hint(tmp_path: Path, text: str, says: str):
    assert says in "\n".join(problems_of("sweep=mine", more=(sweep_file(tmp_path, text),)))


def test_a_faulty_option_does_not_hide_another(tmp_path: Path):
    folder = sweep_file(tmp_path, "description: x\ngrid: {backend: plain, model: [bad_type, bad_yaml, bad_name]}\n")
    (folder / "model").mkdir()
    shape = "num_experts: 8\ntop_k: 2\nhidden: 64\nintermediate: 32\n"
    (folder / "model" / "bad_type.yaml").write_text(shape.replace("64", "wide"))
    (folder / "model" / "bad_yaml.yaml").write_text("num_experts: [8\n")
    (folder / "model" / "bad_name.yaml").write_text(f"name: other\n{shape}")
    text = "\n".join(problems_of("sweep=mine", more=(folder,)))
    assert "hidden is 'wide', but must be an integer" in text
    assert "bad_yaml" in text
    assert "name is 'other', but the file is called 'bad_name'" in text


def test_names_exist_once_and_folders_have_groups(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("name: tiny\n")
    assert "model 'tiny' exists twice" in the_problem("backend=plain", more=(tmp_path,))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="has none of the group folders"):
        Library([empty])


def test_a_user_folder_adds_options_that_inherit_from_ours(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wider.yaml").write_text("defaults: [tiny, _self_]\nname: wider\nhidden: 256\n")
    plan = plan_of("sweep=smoke", "backend=plain", "model=wider", more=(tmp_path,))
    assert {(p.model.name, p.model.hidden, p.model.num_experts) for p in plan.points} == {("wider", 256, 8)}


def test_it_works_from_any_directory(tmp_path: Path):
    code = "from epcross.harness.planning.config import resolve; print(resolve(['sweep=floor']).sweep)"
    root = str(Path(epcross.__file__).parent.parent)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("floor\n", "")
    assert PACKAGE_CONF.is_absolute()


def test_hydra_is_left_as_it_was_found():
    from hydra.core.global_hydra import GlobalHydra

    resolve(["sweep=floor"], [FIXTURES])
    assert not GlobalHydra.instance().is_initialized()


def test_the_examples_of_the_readme_are_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FIXTURES))
    blocks = [block for block in (PACKAGE_CONF / "README.md").read_text().split("\n\n") if block.startswith("    ")]
    groups = ("sweep", "backend", "compute", "cluster")
    for group, text in zip(groups, map(textwrap.dedent, blocks), strict=True):
        (tmp_path / group).mkdir()
        (tmp_path / group / "example.yaml").write_text(text)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_kernel.py").write_text("from fixture_backends import Plain as MyKernel\n")
    library = Library([FIXTURES, tmp_path])
    problems: list[str] = []
    library.load([(group, "example") for group in groups], problems)
    assert problems == []
    assert library.get("cluster", "example").nodes_per_domain == 18
    example = library.get("backend", "example")
    assert example.folder == str(tmp_path)
    assert loader.load(example).options["chunk"] == 4
    sys.path.remove(str(tmp_path))
    plan = plan_of("sweep=example", "backend=plain,other", more=(tmp_path,))
    # 2 backends, 2 numbers of tokens, 2 rows of the zip; the exclusion names a backend that is not there
    assert len(plan.points) == 8


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"description: \xff\xfe", "codec can't decode byte 0xff"),
        (b"description: &a [*a]\n", "maximum recursion depth exceeded"),
    ],
)
def test_a_file_that_no_parser_takes_is_named(tmp_path: Path, content: bytes, says: str):
    folder = sweep_file(tmp_path, "")
    (folder / "sweep" / "mine.yaml").write_bytes(content)
    problem = the_problem("sweep=mine", more=(folder,))
    assert problem.startswith(f"sweep 'mine' ({folder / 'sweep' / 'mine.yaml'}): configuration cannot be composed: ")
    assert says in problem


def test_a_home_that_does_not_exist_is_told(tmp_path: Path):
    said = "'~nobody-here/x' starts with the home of a user that is not known here; write the path out"
    words = ("sweep=crossover", "backend=plain", "tokens_per_rank=1")
    assert the_problem(*words, "output_dir='~nobody-here/x'") == said
    assert the_problem(*words, "routing=trace", "routing.path='~nobody-here/x'") == said


def test_a_wrong_item_of_a_list_is_told_apart_from_a_wrong_value():
    words = ("sweep=crossover", "backend=plain")
    said = "command line: tokens_per_rank has an item that is [0, 0], but must be an integer"
    assert the_problem(*words, "tokens_per_rank=[[0,0]]") == said
    said = "command line: tokens_per_rank is 'many', but must be an integer or a list"
    assert the_problem(*words, "tokens_per_rank=many") == said
