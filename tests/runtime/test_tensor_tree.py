from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from amptune.changes.tensor_tree import map_tensors, moved_to

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    name: str = "one"


@dataclass
class Counted:
    image: torch.Tensor
    built: list[int]
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.built.append(1)
        self.doubled = 2 * self.image


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        (ONE, 1),
        Pair(ONE, None),
        {"x": ONE, "n": 3},
        UserDict(x=ONE),
        Frozen(ONE),
        MappingProxyType({"x": ONE}),
        {"deep": [(ONE, {"deeper": Pair(ONE, ONE)})]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_container_keeps_its_type_and_is_not_changed_in_place(value: Any) -> None:
    before = repr(value)
    doubled = map_tensors(double, value)
    assert type(doubled) is type(value)
    assert repr(doubled) == before.replace("1., 1.", "2., 2.")
    assert repr(value) == before


def test_a_dataclass_field_outside_its_init_is_mapped_without_building_it_again() -> None:
    value: Any = Counted(ONE, [])
    value.note = "beside the fields"
    mapped = map_tensors(double, value)
    assert mapped.doubled.tolist() == [4, 4]
    assert (mapped.built, mapped.note) == ([1], "beside the fields")


def test_a_default_factory_survives_and_torchs_own_tuples_are_mapped() -> None:
    grouped: defaultdict[str, list[torch.Tensor]] = defaultdict(list, x=[ONE])
    assert map_tensors(double, grouped)["missing"] == []
    assert map_tensors(double, torch.ones(2, 2).max(dim=0)).values.tolist() == [2, 2]


def test_the_lengths_of_a_packed_sequence_stay_as_they_are_on_the_cpu() -> None:
    moved = map_tensors(lambda tensor: tensor.to("meta"), pack_sequence([torch.ones(3), torch.ones(2)]))
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.tolist()) == ("meta", [2, 2, 1])


class Graph:
    """As torch_geometric has it: `to` moves what it holds in place, and returns it."""

    def __init__(self) -> None:
        self.nodes = torch.ones(2)

    def to(self, device: torch.device) -> Graph:
        self.nodes = self.nodes.to(device)
        return self


def test_an_object_that_is_not_known_moves_itself_and_stays_where_it_was() -> None:
    graph, meta = Graph(), torch.device("meta")
    assert map_tensors(double, (graph, ONE))[0] is graph
    moved, ones = moved_to(meta, {"graphs": [(graph, ONE)]}, lambda tensor: tensor.to(meta))["graphs"][0]
    assert (moved.nodes.device, ones.device) == (meta, meta)
    assert graph.nodes.device.type == "cpu"
    batch = ("cat", Graph, torch.nn.Linear(1, 1), None)  # words, classes and modules
    assert moved_to(meta, batch, double) is batch
