"""Each mistake is reported at its line and column, with what is allowed; none hides behind another."""

from __future__ import annotations

import re
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_strategies import plain, policies, policy_files

from amptune.errors import FileFormatError
from amptune.policy.file_io import dumps, parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Entry, Profile
from amptune.policy.serialization import PolicyDocument, adapter_for, policy_file_to_dict
from amptune.policy.settings import Policy
from amptune.policy.validation import validate
from amptune.policy.yaml_text import Document, parse

HEAD = "schema: amptune.policy/1\n"


def problems(text: str) -> list[str]:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "p.yaml"))
    return str(caught.value).splitlines()


_KEY = re.compile(r"( *(?:- )?)([a-z0-9_]+):(.*)")


@settings(max_examples=100, deadline=None)
@given(policies(), st.booleans(), st.sampled_from(["misspelt", "twice", "wrong"]), st.data())
def test_every_corruption_of_one_key_is_an_error_in_its_line(
    policy: Policy, of_profile: bool, corruption: str, data: st.DataObject
) -> None:
    file = PolicyFile(policy=policy, name="x", evidence={"speedup": 2.0, "step_ms_ci95": [1.0, 2.0]})
    profile = Profile(entries=(Entry(match={"gpu.memory": ">=1"}, policy=file),), default=PolicyFile(policy=policy))
    lines = dumps(profile if of_profile else file).splitlines()
    keys = [(place, key) for place, line in enumerate(lines) if (key := _KEY.fullmatch(line)) is not None]
    with_value = [(place, key) for place, key in keys if key[3]]
    place, key = data.draw(st.sampled_from(keys if corruption == "misspelt" else with_value))
    match corruption:
        case "misspelt":
            lines[place] = f"{key[1]}{key[2]}_x:{key[3]}"
        case "twice":
            place += 1
            lines.insert(place, f"{key[1].replace('-', ' ')}{key[2]}:{key[3]}")
        case _:
            lines[place] = f"{key[1]}{key[2]}: [nonsense, [1]]"
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse("\n".join(lines), "p.yaml"))
    assert place + 1 in {problem.line for problem in caught.value.problems}  # what rests on a lost key may be told too


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: true", ["2:13: batch_size: True is not a whole number"]),
        ("fp32_modules: [fc]", ["2:16: fp32_modules.0: 'fc' is not a mapping of keys to values"]),
        ("autocast: fp61\nloss_scale: {init: 1024}", ["2:11: autocast: 'fp61' is not one of off, bf16, fp16"]),
        ('cudnn_benchmark: "yes"', ["2:18: cudnn_benchmark: 'yes' is not true or false"]),
        ("valid_for: {torch: [2]}", ["2:20: valid_for.torch: [2] is not text"]),
        ("compile_scope: blocks\ncompile: reduce-overhead", ["2:16: compile_scope: blocks needs compile: default"]),
        ("fp32_modules:\n  - {cast_output: 2, path: a}\n  - {path: a, type: b}", ["3:19: ", "4:5: "]),
        (
            "master_weights: true\nkeep_batchnorm_fp32: true",
            [
                "2:17: master_weights: only half weights have FP32 masters, and weights is fp32",
                "3:22: keep_batchnorm_fp32: BatchNorm is in FP32 already where weights is fp32",
            ],
        ),
        (
            "autocast: fp16\nloss_scale:\n  init: 1024\n  growth_interval: 0\n  max: 8",
            [
                "5:20: loss_scale.growth_interval: 0 is not at least 1",
                "6:8: loss_scale.max: 8 is below init, 1024",
            ],
        ),
        (
            "autocast: fp16\nloss_scale: {init: 128, max: 1024, static: true}",
            ["3:30: loss_scale.max: a static loss scale does not grow"],
        ),
        ("checkpoint: layers", ["2:13: checkpoint: 'layers' is not a list"]),
        ('checkpoint: [""]', ["2:13: checkpoint: a pattern must not be empty"]),
        ("checkpoint: [a, a]", ["2:13: checkpoint: a pattern stands there twice"]),
        ("checkpoint: [a]\ncuda_graphs: step", ["3:14: cuda_graphs: a recording has no random numbers to go back"]),
        (
            "loader: {num_workers: 0, persistent_workers: true, prefetch_factor: 0}",
            [
                "2:46: loader.persistent_workers: there are none with num_workers 0",
                "2:69: loader.prefetch_factor: 0 is not from 1 to 1024",
                "2:69: loader.prefetch_factor: only worker processes prefetch, and num_workers is 0",
            ],
        ),
        ("loss_scale:\n\tinit: 1", ["3:1: is no YAML: found character that cannot start any token; indent"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_is_expected(text: str, said: list[str]) -> None:
    found = problems(f"{HEAD}{text}\n")
    assert len(found) == len(said)
    assert all(line.startswith(f"p.yaml:{start}") for line, start in zip(found, said, strict=True))


def same(one: Any, other: Any) -> bool:
    """1 and 1.0 and True are equal in Python, and another thing in a file each."""
    return one == other and repr(one) == repr(other)


@st.composite
def mangled(draw: st.DrawFn) -> dict[str, Any]:
    """A policy file in which one value became another, a key went or one came."""
    data: dict[str, Any] = policy_file_to_dict(draw(policy_files))
    key = draw(st.sampled_from([*data, *Policy.__dataclass_fields__, "schema", "nonsense"]))
    match draw(st.sampled_from(["other", "gone", "inside"])):
        case "gone":
            data.pop(key, None)
        case "inside" if isinstance(data.get(key), dict) and data[key]:
            data[key] = {**data[key], draw(st.sampled_from([*data[key], "nonsense"])): draw(plain)}
        case _:
            data[key] = draw(plain | st.lists(st.dictionaries(st.sampled_from(["path", "type"]), plain), max_size=2))
    return data


@settings(max_examples=200, deadline=None)
@given(mangled())
def test_whatever_pydantic_refuses_or_reads_is_refused_or_read_likewise(data: dict[str, Any]) -> None:
    """Spellings aside: a document without a text behind it has none that could mean another value."""
    adapter = adapter_for(PolicyDocument)
    try:
        wanted = adapter.validate_json(pydantic.TypeAdapter(Any).dump_json(data), strict=True)
    except pydantic.ValidationError as error:
        spelled = {"int_type", "string_type"}  # 10.0, and numbers where text is expected, are read
        if not {one["type"] for one in error.errors()} <= spelled:
            with pytest.raises(FileFormatError):
                validate(Document(source="policy.yaml", data=data), PolicyDocument)
    else:
        assert same(validate(Document(source="policy.yaml", data=data), PolicyDocument), wanted)
