"""The search spaces that come with amptune, which machine gets which, and what is said of a malformed one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from simulated.recorded import RecordedEvaluator

from amptune.errors import FileFormatError, SpaceError
from amptune.hardware.generations import GENERATIONS, generation_of
from amptune.hardware.machine import Cpu, Gpu, Hardware, Software
from amptune.policy.settings import STOCK
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import CHECKPOINTS, SEARCHED, Space, points, without_knob
from amptune.search.space.space_file import load_space, space_for, space_names, space_schema, spaces_folder

NAMES = (
    "ada",
    "ampere",
    "blackwell",
    "cpu",
    "hopper",
    "maxwell",
    "pascal-6.0",
    "pascal-6.1",
    "turing",
    "turing-gtx16",
    "volta",
)
SOURCE = re.compile(r"https://|[a-z]+#\d+|measured|documentation|Guide|datasheet|torch/include")


def machine(compute_capability: tuple[int, int], name: str = "some GPU", **differing: Any) -> Hardware:
    """A machine with the GPU that the table of generations knows by this number and name."""
    known = generation_of(compute_capability, name)
    gpu = Gpu(
        index=0,
        name=name,
        uuid=None,
        generation=known.name,
        compute_capability=compute_capability,
        memory_mib=None,
        multiprocessors=1,
        tensor_cores=known.tensor_cores,
        bf16=known.bf16,
        tf32=known.tf32,
        fp8=known.fp8,
        fp16_rate=known.fp16_rate,
    )
    return Hardware(device="cuda", cpu=CPU, gpu=replace(gpu, **differing), software=SOFTWARE)


CPU = Cpu(model="some CPU", architecture="x86_64", cores=2, memory_mib=8192)
SOFTWARE = Software(torch="2.13.0", python="3.11.9")


def problems_of(text: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(FileFormatError) as raised:
        load_space(file)
    return str(raised.value).replace(str(file), "space.yaml").splitlines()


def test_there_is_a_space_for_each_generation() -> None:
    assert space_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_space_says_which_architecture_it_is_for(name: str) -> None:
    """Pascal has two spaces, one for each of its compute capabilities."""
    assert load_space(name).architecture == name.removesuffix("-6.0").removesuffix("-6.1")


@pytest.mark.parametrize("name", NAMES)
def test_every_starting_point_is_complete_allowed_and_stands_once(name: str) -> None:
    space = load_space(name)
    assert set(space.try_first) <= set(points(space))
    assert len(set(space.try_first)) == len(space.try_first)
    assert 2 <= len(space.try_first) <= 10


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_forbids_something_and_names_its_source(name: str) -> None:
    space = load_space(name)
    for rule in space.forbid:
        without = replace(space, forbid=tuple(other for other in space.forbid if other != rule))
        assert len(list(points(without))) > len(list(points(space)))
        assert SOURCE.search(rule.because), rule.because


@pytest.mark.parametrize("name", NAMES)
def test_stock_pytorch_is_a_point_of_every_space(name: str) -> None:
    stock = {"autocast": "off", "fp32_math": "stock", "memory_format": "contiguous", "fp32_exclusions": 0}
    space = load_space(name)
    assert any(all(point.get(knob, value) == value for knob, value in stock.items()) for point in points(space))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_generation_cannot_do_is_not_tried_on_it(name: str) -> None:
    space = load_space(name)
    abilities = [GENERATIONS[major, minor] for major, minor in numbers_of(space)]
    if not abilities:  # a CPU
        return
    assert ("bf16" in space.choices("autocast")) == all(ability.bf16 for ability in abilities)
    assert ("tf32" in space.choices("fp32_math")) == all(ability.tf32 for ability in abilities)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_compiled_only_where_triton_runs(name: str) -> None:
    space = load_space(name)
    compiles = len(space.choices("compile")) > 1
    assert compiles == all(number >= (7, 0) for number in numbers_of(space))
    assert space.choices("cuda_graphs") == ((False, True) if space.compute_capability else ())
    if not space.compute_capability:  # a CPU has no CUDA graphs
        assert not {"reduce-overhead", "max-autotune"} & set(space.choices("compile"))


def numbers_of(space: Space) -> list[tuple[int, int]]:
    parts = (number.split(".") for number in space.compute_capability)
    return [(int(major), int(minor)) for major, minor in parts]


@pytest.mark.parametrize(
    ("name", "at_most"), [("cpu", 20), ("turing-gtx16", 20), ("pascal-6.1", 30), ("volta", 50), ("hopper", 200)]
)
def test_a_space_is_small_enough_to_be_searched(name: str, at_most: int) -> None:
    space = load_space(name)
    for name in (CHECKPOINTS, "float8_modules"):  # of searches that save memory alone, and of wide models
        space = without_knob(space, name)
    eager = [point for point in points(space) if point["compile"] == "off" and not point["fused_optimizer"]]
    plain = [point for point in eager if not point.get("cuda_graphs")]
    assert 5 < len(plain) <= at_most
    ways = (len(space.choices("compile")) + (len(eager) > len(plain))) * len(space.choices("fused_optimizer"))
    assert len(list(points(space))) <= ways * at_most


@pytest.mark.parametrize("name", ["ampere", "ada", "hopper", "blackwell"])
def test_the_fp32_math_is_tried_only_where_something_computes_in_fp32(name: str) -> None:
    for point in points(load_space(name)):
        if point["autocast"] != "off" and point["fp32_exclusions"] == 0:
            assert point["fp32_math"] == "stock"


def test_only_a_search_that_saves_memory_mixes_half_and_fp32_where_half_is_slow() -> None:
    def mixed(*, saves_memory: bool) -> Candidates:
        wanted = Wanted(baseline=STOCK, space="pascal-6.1", pins={}, saves_memory=saves_memory)
        return candidates_for(RecordedEvaluator("resnet50").prepare(1.0), wanted)

    fast, small = mixed(saves_memory=False), mixed(saves_memory=True)
    assert {point["fp32_exclusions"] for point in points(fast.space) if point["autocast"] == "fp16"} == {0}
    assert {point["fp32_exclusions"] for point in points(small.space) if point["autocast"] == "fp16"} == {0, 1, 2, 3, 4}
    assert fast.study_name == small.study_name


def test_fp16_is_not_tried_where_its_convolutions_give_nan() -> None:
    assert {point["autocast"] for point in points(load_space("turing-gtx16"))} == {"off"}


@pytest.mark.parametrize("compute_capability", GENERATIONS)
def test_each_known_gpu_gets_a_space_of_its_generation(compute_capability: tuple[int, int]) -> None:
    assert space_for(machine(compute_capability)).architecture == GENERATIONS[compute_capability].name


@pytest.mark.parametrize(
    ("compute_capability", "name", "space"),
    [
        ((5, 2), "NVIDIA GeForce GTX 980", "maxwell"),
        ((6, 0), "Tesla P100-PCIE-16GB", "pascal-6.0"),
        ((6, 1), "NVIDIA GeForce GTX 1080 Ti", "pascal-6.1"),
        ((6, 2), "NVIDIA Tegra X2", "pascal-6.0"),
        ((7, 0), "Tesla V100-SXM2-32GB", "volta"),
        ((7, 5), "Tesla T4", "turing"),
        ((7, 5), "NVIDIA GeForce GTX 1660 Ti", "turing-gtx16"),
        ((8, 0), "NVIDIA A100-SXM4-80GB", "ampere"),
        ((8, 9), "NVIDIA L4", "ada"),
        ((9, 0), "NVIDIA H200", "hopper"),
        ((12, 0), "NVIDIA GeForce RTX 5090", "blackwell"),
        ((10, 9), "a Blackwell of a later day", "blackwell"),
        ((8, 8), "an Ampere of a later day", "ampere"),
    ],
)
def test_a_card_gets_the_space_of_its_kind(compute_capability: tuple[int, int], name: str, space: str) -> None:
    assert space_for(machine(compute_capability, name)) == load_space(space)


@pytest.mark.parametrize(
    ("differing", "space"),
    [
        ({}, "blackwell"),
        ({"fp8": False}, "ampere"),
        ({"fp8": False, "bf16": False, "tf32": False}, "turing"),
        ({"fp8": False, "bf16": False, "tf32": False, "tensor_cores": False}, "turing-gtx16"),
    ],
)
def test_an_unknown_newer_gpu_gets_the_space_of_what_it_can_do(differing: dict[str, Any], space: str) -> None:
    assert space_for(machine((14, 0), **differing)).architecture == space


def test_an_unknown_older_gpu_gets_the_oldest_space() -> None:
    assert space_for(machine((3, 7), "Tesla K80")).architecture == "maxwell"


def test_a_machine_without_a_gpu_gets_the_cpus_space() -> None:
    assert space_for(Hardware(device="cpu", cpu=CPU, gpu=None, software=SOFTWARE)).architecture == "cpu"


def test_a_space_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema: amptune.space/1\n"
        "architecture: mine\n"
        'compute_capability: ["9.0"]\n'
        "knobs: {autocast: [off, bf16], memory_format: [channels_last, contiguous]}\n"
        "try_first: [{autocast: bf16}]\n"
        "forbid:\n"
        "  - {when: {autocast: off, memory_format: [channels_last]}, because: measured here}\n"
    )
    for given in (file, str(file)):
        space = load_space(given)
        assert [dict(point) for point in space.try_first] == [{"autocast": "bf16", "memory_format": "contiguous"}]
        assert len(list(points(space))) == 3


EXTENDING = """\
schema: amptune.space/1
architecture: mine
compute_capability: []
extends: {}
{}
"""


def extending(base: str, more: str, tmp_path: Path) -> Space:
    file = tmp_path / "mine.yaml"
    file.write_text(EXTENDING.format(base, more))
    return load_space(file)


def test_a_space_that_extends_another_says_only_what_is_its_own(tmp_path: Path) -> None:
    hopper = load_space("hopper")
    same = extending("hopper", "", tmp_path)
    assert same == replace(hopper, architecture="mine", compute_capability=())
    less = extending("hopper", 'knobs: {autocast: ["off", bf16], cudnn_benchmark: [false]}', tmp_path)
    assert less.choices("autocast") == ("off", "bf16")
    assert less.choices("fp32_math") == hopper.choices("fp32_math")
    assert [knob.name for knob in less.knobs] == [knob.name for knob in hopper.knobs]
    assert less.try_first == tuple(point for point in hopper.try_first if point["autocast"] != "fp16")
    assert set(points(less)) < set(points(hopper))
    more = extending("hopper", "knobs: {weights: [fp32, half]}\ntry_first: [{weights: half}]", tmp_path)
    assert [point["weights"] for point in more.try_first] == ["half"]
    whole = extending("hopper", "knobs: {cuda_graphs: [false, true, step]}", tmp_path)
    assert whole.choices("cuda_graphs") == (False, True, "step")


def test_a_rule_replaces_that_of_the_extended_space_with_the_same_condition_or_is_added(tmp_path: Path) -> None:
    first = load_space("hopper").forbid[0]
    rules = f"""forbid:
  - {{when: {{fp32_math: ieee}}, because: measured here}}
  - {{when: {{cuda_graphs: true, compile: [{", ".join(map(str, first.when[1][1]))}]}}, because: our own reason}}"""
    mine = extending("hopper", rules, tmp_path)
    assert [rule.because for rule in mine.forbid[:1] + mine.forbid[-1:]] == ["our own reason", "measured here"]
    assert len(mine.forbid) == len(load_space("hopper").forbid) + 1
    assert all(point["fp32_math"] != "ieee" for point in points(mine))
    assert set(mine.try_first) <= set(points(mine))


def test_a_starting_point_that_the_extending_space_forbids_is_left_out(tmp_path: Path) -> None:
    mine = extending("hopper", "forbid: [{when: {cuda_graphs: true}, because: measured here}]", tmp_path)
    assert 0 < len(mine.try_first) < len(load_space("hopper").try_first)
    assert set(mine.try_first) <= set(points(mine))


def test_a_file_extends_another_by_its_path_from_there(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "ours.yaml").write_text(EXTENDING.format("cpu", "knobs: {compile: [default]}"))
    assert extending("base/ours.yaml", "", tmp_path).choices("compile") == ("default",)


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        (
            "hoper",
            "",
            "4:10: extends: 'hoper' is no file and no space of amptune's; did you mean hopper? ",
        ),
        ("mine.yaml", "", "4:10: extends: mine.yaml → mine.yaml goes in a circle"),
        ("other.yaml", "", "4:10: extends: mine.yaml → other.yaml → mine.yaml goes in a circle"),
        ("cpu", "knobs: {autocast: [fp32]}", "5:20: autocast: 'fp32' is not one of off, bf16, fp16"),
        ("cpu", "try_first: [{weights: half}]", "5:14: 'weights' is no knob of this space"),
        ("hopper", "forbid: [{when: {autocast: bf61}, because: x}]", "autocast: bf61 is not among this knob's values"),
    ],
)
def test_what_is_wrong_with_an_extension_is_said_at_its_line(
    base: str, more: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(EXTENDING.format("./mine.yaml", ""))
    with pytest.raises(FileFormatError, match=re.escape(message)):
        extending(base, more, tmp_path)


def test_a_space_without_knobs_extends_another(tmp_path: Path) -> None:
    [found] = problems_of("schema: amptune.space/1\narchitecture: mine\ncompute_capability: []\n", tmp_path)
    assert found == "space.yaml:1:1: knobs: this key is missing"


def test_a_name_nobody_knows_is_an_error_that_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(
        SpaceError, match=re.escape("'hoper' is no file and no space of amptune's; did you mean hopper? ")
    ):
        load_space("hoper")
    with pytest.raises(SpaceError, match="no file and no space"):
        load_space(tmp_path / "absent.yaml")


def test_every_value_that_no_policy_can_have_is_reported_with_its_line(tmp_path: Path) -> None:
    text = """\
schema: amptune.space/1
architecture: mine
compute_capability: []
knobs:
  autocast: ["off", bf61]
  memory_fromat: [contiguous]
  cudnn_benchmark: [1, false]
  fp32_exclusions: [0, -1, 0]
  fp32_math: []
"""
    found = problems_of(text, tmp_path)
    assert [line.split(": ")[0] for line in found] == [
        "space.yaml:5:21",
        "space.yaml:6:3",
        "space.yaml:7:21",
        "space.yaml:8:24",
        "space.yaml:8:28",
        "space.yaml:9:14",
    ]
    assert found[0].endswith("autocast: 'bf61' is not one of off, bf16, fp16")
    assert "memory_fromat" in found[1]
    assert "autocast, fp32_math, memory_format" in found[1]
    assert found[4].endswith("stands here twice")


def test_every_contradiction_is_reported_with_its_line(tmp_path: Path) -> None:
    text = """\
schema: amptune.space/1
architecture: mine
compute_capability: []
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
    assert set(problems_of(text, tmp_path)) == {
        "space.yaml:8:16: autocast: fp16 is not among this knob's values off, bf16",
        "space.yaml:9:23: cudnn_benchmark: true is not among this knob's values false",
        "space.yaml:10:6: 'compile' is no knob of this space",
        "space.yaml:11:5: this starting point is forbidden: it is slow here",
        "space.yaml:16:14: because: say why, with a source",
        "space.yaml:15:22: autocast: fp16 is not among this knob's values off, bf16",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "schema: amptune.space/2\n",
            "space.yaml:1:9: schema: 'amptune.space/2' is not known; amptune reads amptune.space/1",
        ),
        ("architecture: mine\n", "space.yaml:1:1: schema: this key is missing; amptune reads amptune.space/1"),
    ],
)
def test_a_file_of_another_kind_says_what_is_read(text: str, message: str, tmp_path: Path) -> None:
    assert problems_of(text, tmp_path) == [message]


def test_a_rule_without_a_reason_is_an_error_at_its_line(tmp_path: Path) -> None:
    text = (spaces_folder() / "cpu.yaml").read_text() + "  - when: {autocast: bf16}\n"
    [found] = problems_of(text, tmp_path)
    assert found.startswith(f"space.yaml:{text.count(chr(10))}:5: ")
    assert "because" in found
    assert "missing" in found


@pytest.mark.parametrize("name", NAMES)
def test_every_space_follows_the_schema_that_is_printed(name: str) -> None:
    schema = space_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    content = yaml.safe_load((spaces_folder() / f"{name}.yaml").read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "forbids": []}, schema)


def test_every_knob_has_values_or_takes_any_number() -> None:
    assert {name for name, knob in SEARCHED.items() if not knob.values} >= {"batch_size", "fp32_exclusions"}


def test_the_spaces_are_found_inside_a_wheel_and_beside_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "amptune"
    beside = tmp_path / "search_spaces"
    package.mkdir()
    beside.mkdir()
    assert spaces_folder(package) == beside
    (package / "search_spaces").mkdir()
    assert spaces_folder(package) == package / "search_spaces"
