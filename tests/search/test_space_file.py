"""The search spaces that come with amptune, which machine gets which, and what is said of a malformed one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from simulated.recorded import H200, RecordedEvaluator

from amptune.errors import FileFormatError
from amptune.hardware.generations import GENERATIONS, generation_of
from amptune.hardware.machine import Hardware
from amptune.policy.settings import STOCK
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import Point, Space, points
from amptune.search.space.space_file import load_space, space_for, space_names, space_schema, spaces_folder

NAMES = space_names()
SOURCE = re.compile(r"https://|[a-z]+#\d+|measured|documentation|Guide|datasheet|torch/include")


def machine(compute_capability: tuple[int, int], name: str = "some GPU", **differing: Any) -> Hardware:
    """A machine with the GPU that the table of generations knows by this number and name."""
    known = generation_of(compute_capability, name)
    named = {"name": name, "generation": known.name, "compute_capability": compute_capability}
    can = {ability: getattr(known, ability) for ability in ("tensor_cores", "bf16", "tf32", "fp8", "fp16_rate")}
    assert H200.gpu is not None
    return replace(H200, gpu=replace(H200.gpu, **{**named, **can, **differing}))


@cache
def bundled(name: str) -> Space:
    return load_space(name)


@cache
def allowed(name: str) -> list[Point]:
    return list(points(bundled(name)))


def problems_of(text: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(FileFormatError) as raised:
        load_space(file)
    return str(raised.value).replace(str(file), "space.yaml").splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_every_starting_point_is_complete_allowed_and_stands_once(name: str) -> None:
    """What to keep in FP32 for speed is a question to the leader as it runs, and no point to start from."""
    space = bundled(name)
    assert set(space.try_first) <= set(allowed(name))
    assert len(set(space.try_first)) == len(space.try_first)
    assert 2 <= len(space.try_first) <= 13
    assert {point.get("fp32_exclusions", 0) for point in space.try_first} == {0}
    stock = {"autocast": "off", "fp32_math": "stock", "memory_format": "contiguous", "fp32_exclusions": 0}
    assert any(all(point.get(knob, value) == value for knob, value in stock.items()) for point in allowed(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_forbids_something_that_no_other_does_and_names_its_source(name: str) -> None:
    space = bundled(name)
    alone = set()
    for values in product(*(knob.choices for knob in space.knobs)):
        point = dict(zip((knob.name for knob in space.knobs), values, strict=True))
        holding = [rule for rule in space.forbid if rule.forbids(point)]
        if len(holding) == 1:
            alone.add(holding[0])
    assert alone == set(space.forbid)
    assert [rule.because for rule in space.forbid if not SOURCE.search(rule.because)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_generation_cannot_do_is_not_tried_on_it(name: str) -> None:
    """Models are compiled where Triton runs; a CPU has no CUDA graphs. Pascal and CPUs have two spaces each."""
    space = bundled(name)
    numbers = [tuple(map(int, number.split("."))) for number in space.compute_capability]
    abilities = [GENERATIONS[major, minor] for major, minor in numbers]
    for point in allowed(name) if "tf32" in space.choices("fp32_math") else ():
        assert point["autocast"] == "off" or point["fp32_exclusions"] != 0 or point["fp32_math"] == "stock"
    if name == "turing-gtx16":
        assert {point["autocast"] for point in allowed(name)} == {"off"}, "its convolutions give NaN"
    assert space.architecture == re.sub("-(6.0|6.1|bf16)$", "", name)
    assert (len(space.choices("compile")) > 1) == all(number >= (7, 0) for number in numbers)
    assert space.choices("cuda_graphs") == ((False, True, "step") if numbers else ())
    if numbers:
        assert ("bf16" in space.choices("autocast")) == all(ability.bf16 for ability in abilities)
        assert ("tf32" in space.choices("fp32_math")) == all(ability.tf32 for ability in abilities)
    else:
        assert not {"reduce-overhead", "max-autotune"} & set(space.choices("compile"))


def test_only_a_search_that_saves_memory_mixes_half_and_fp32_where_half_is_slow() -> None:
    def mixed(*, saves_memory: bool) -> Candidates:
        wanted = Wanted(baseline=STOCK, space="pascal-6.1", pins={}, saves_memory=saves_memory)
        return candidates_for(RecordedEvaluator("resnet50").prepare(1.0), wanted)

    fast, small = mixed(saves_memory=False), mixed(saves_memory=True)
    assert {point["fp32_exclusions"] for point in points(fast.space) if point["autocast"] == "fp16"} == {0}
    assert {point["fp32_exclusions"] for point in points(small.space) if point["autocast"] == "fp16"} == {0, 1, 2, 3, 4}
    assert fast.study_name == small.study_name


@pytest.mark.parametrize("compute_capability", GENERATIONS)
def test_each_known_gpu_gets_a_space_of_its_generation(compute_capability: tuple[int, int]) -> None:
    assert space_for(machine(compute_capability)).architecture == GENERATIONS[compute_capability].name


@pytest.mark.parametrize(
    ("hardware", "space"),
    [
        (machine((6, 0), "Tesla P100-PCIE-16GB"), "pascal-6.0"),
        (machine((6, 1), "NVIDIA GeForce GTX 1080 Ti"), "pascal-6.1"),
        (machine((7, 5), "NVIDIA GeForce GTX 1660 Ti"), "turing-gtx16"),
        (machine((8, 8), "an Ampere of a later day"), "ampere"),
        # An unknown newer GPU gets the space of what it can do, an unknown older one the oldest.
        (machine((14, 0)), "blackwell"),
        (machine((14, 0), fp8=False), "ampere"),
        (machine((14, 0), fp8=False, bf16=False, tf32=False), "turing"),
        (machine((14, 0), fp8=False, bf16=False, tf32=False, tensor_cores=False), "turing-gtx16"),
        (machine((3, 7), "Tesla K80"), "maxwell"),
        (replace(H200, device="cpu", gpu=None), "cpu"),
        (replace(H200, device="cpu", gpu=None, cpu=replace(H200.cpu, avx512_bf16=True)), "cpu-bf16"),
        (replace(H200, device="cpu", gpu=None, cpu=replace(H200.cpu, amx_bf16=True)), "cpu-bf16"),
    ],
)
def test_a_machine_gets_the_space_of_its_kind(hardware: Hardware, space: str) -> None:
    assert space_for(hardware) == bundled(space)


# --- files of one's own -----------------------------------------------------------------------------------------------

MINE = "schema: amptune.space/1\narchitecture: mine\ncompute_capability: []\n"


def extending(base: str, more: str, tmp_path: Path) -> Space:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{MINE}extends: {base}\n{more}")
    return load_space(file)


def test_a_space_that_extends_another_says_only_what_is_its_own(tmp_path: Path) -> None:
    """A starting point that it forbids or whose value it has not is left out; it may allow values of its own."""
    hopper = bundled("hopper")
    same = extending("hopper", "", tmp_path)
    assert same == replace(hopper, architecture="mine", compute_capability=())
    less = extending("hopper", 'knobs: {autocast: ["off", bf16], cudnn_benchmark: [false]}', tmp_path)
    assert less.choices("autocast") == ("off", "bf16")
    assert less.choices("fp32_math") == hopper.choices("fp32_math")
    assert [knob.name for knob in less.knobs] == [knob.name for knob in hopper.knobs]
    assert less.try_first == tuple(point for point in hopper.try_first if point["autocast"] != "fp16")
    more = extending("hopper", "knobs: {weights: [fp32, half]}\ntry_first: [{weights: half}]", tmp_path)
    assert [point["weights"] for point in more.try_first] == ["half"]
    forbidding = extending("hopper", "forbid: [{when: {cuda_graphs: [true, step]}, because: measured here}]", tmp_path)
    assert forbidding.try_first == tuple(point for point in hopper.try_first if point["cuda_graphs"] is False)
    assert 0 < len(forbidding.try_first) < len(hopper.try_first)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "ours.yaml").write_text(f"{MINE}extends: cpu\nknobs: {{compile: [default]}}")
    assert extending("base/ours.yaml", "", tmp_path).choices("compile") == ("default",)


def test_a_rule_replaces_that_of_the_extended_space_with_the_same_condition_or_is_added(tmp_path: Path) -> None:
    hopper = bundled("hopper")
    modes = ", ".join(map(str, hopper.forbid[0].when[1][1]))
    rules = f"""forbid:
  - {{when: {{cudnn_benchmark: true}}, because: measured here}}
  - {{when: {{cuda_graphs: [true, step], compile: [{modes}]}}, because: ours}}"""
    mine = extending("hopper", rules, tmp_path)
    assert [rule.because for rule in mine.forbid[:1] + mine.forbid[-1:]] == ["ours", "measured here"]
    assert mine.forbid[1:-1] == hopper.forbid[1:]


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        ("hoper", "", "4:10: extends: 'hoper' is no file and no space of amptune's; did you mean hopper? "),
        ("mine.yaml", "", "4:10: extends: mine.yaml → mine.yaml goes in a circle"),
        ("other.yaml", "", "4:10: extends: mine.yaml → other.yaml → mine.yaml goes in a circle"),
        ("cpu", "knobs: {autocast: [fp32]}", "5:20: autocast: 'fp32' is not one of off, bf16, fp16"),
        ("cpu", "try_first: [{weights: half}]", "5:14: unknown knob 'weights'; the knobs are autocast"),
        ("hopper", "forbid: [{when: {autocast: bf61}, because: x}]", "autocast: 'bf61' is not one of off, bf16, fp16"),
    ],
)
def test_what_is_wrong_with_an_extension_is_said_at_its_line(
    base: str, more: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(f"{MINE}extends: ./mine.yaml\n")
    with pytest.raises(FileFormatError, match=re.escape(message)):
        extending(base, more, tmp_path)


VALUES = """\
knobs:
  autocast: ["off", bf61]
  memory_fromat: [contiguous]
  cudnn_benchmark: [1, false]
  fp32_exclusions: [0, -1, 0]
  fp32_math: []
"""
CONTRADICTIONS = """\
knobs:
  autocast: ["off", bf16]
  cudnn_benchmark: [false]
try_first:
  - {autocast: fp16}
  - {cudnn_benchmark: true}
  - {compile: default}
  - {autocast: bf16}
forbid:
  - when: {autocast: bf16}
    because: it is slow here
  - when: {autocast: fp16}
    because: "  "
"""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            MINE + VALUES,
            [
                "space.yaml:5:21: autocast: 'bf61' is not one of off, bf16, fp16",
                "space.yaml:6:3: .*memory_fromat.*autocast, fp32_math, memory_format",
                "space.yaml:7:21: ",
                "space.yaml:8:24: ",
                "space.yaml:9:14: ",
            ],
        ),
        (
            MINE + CONTRADICTIONS,
            [
                "space.yaml:8:16: autocast: 'fp16' is not one of off, bf16",
                "space.yaml:9:23: cudnn_benchmark: true is not one of false",
                "space.yaml:10:6: unknown knob 'compile'; the knobs are autocast, cudnn_benchmark",
                "space.yaml:11:5: this starting point is forbidden: it is slow here",
                "space.yaml:15:22: autocast: 'fp16' is not one of off, bf16",
                "space.yaml:16:14: because: say why, with a source",
            ],
        ),
        (MINE, ["space.yaml:1:1: knobs: this key is missing"]),
        ("schema: amptune.space/2\n", ["space.yaml:1:9: schema: 'amptune.space/2' is not known; amptune reads"]),
        ("architecture: mine\n", ["space.yaml:1:1: schema: this key is missing; amptune reads amptune.space/1"]),
        (
            MINE + "knobs: {autocast: [bf16]}\nforbid:\n  - when: {autocast: bf16}\n",
            ["space.yaml:6:5: .*because.*missing"],
        ),
    ],
    ids=["values", "contradictions", "no knobs", "another schema", "no schema", "no reason"],
)
def test_every_problem_of_a_space_is_reported_with_its_line(text: str, problems: list[str], tmp_path: Path) -> None:
    found = sorted(problems_of(text, tmp_path), key=lambda line: [int(part) for part in line.split(":")[1:3]])
    assert len(found) == len(problems)
    for line, problem in zip(found, problems, strict=True):
        assert re.match(problem, line), line


@pytest.mark.parametrize("name", NAMES)
def test_every_space_follows_the_schema_that_is_printed(name: str) -> None:
    schema = space_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    content = yaml.safe_load((spaces_folder() / f"{name}.yaml").read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "forbids": []}, schema)
