from __future__ import annotations

from itertools import pairwise

import pytest

from amptune.hardware.generations import GENERATIONS, Generation, generation_of

# compute capability, name of a device, generation, tensor cores, bf16, tf32, fp8, FP16 over FP32 without tensor cores
CARDS = [
    ((5, 2), "NVIDIA GeForce GTX 980", "maxwell", False, False, False, False, None),
    ((6, 0), "Tesla P100-PCIE-16GB", "pascal", False, False, False, False, 2.0),
    ((6, 1), "NVIDIA GeForce GTX 1080 Ti", "pascal", False, False, False, False, 1 / 64),
    ((7, 0), "Tesla V100-SXM2-32GB", "volta", True, False, False, False, 2.0),
    ((7, 2), "Xavier", "volta", True, False, False, False, 2.0),
    ((7, 5), "Tesla T4", "turing", True, False, False, False, 2.0),
    ((7, 5), "NVIDIA GeForce RTX 2080 Ti", "turing", True, False, False, False, 2.0),
    ((7, 5), "NVIDIA GeForce GTX 1660 Ti", "turing", False, False, False, False, 2.0),
    ((8, 0), "NVIDIA A100-SXM4-40GB", "ampere", True, True, True, False, 4.0),
    ((8, 6), "NVIDIA GeForce RTX 3090", "ampere", True, True, True, False, 1.0),
    ((8, 7), "Orin", "ampere", True, True, True, False, None),
    ((8, 9), "NVIDIA L4", "ada", True, True, True, True, 1.0),
    ((9, 0), "NVIDIA H200", "hopper", True, True, True, True, 2.0),
    ((9, 0), "NVIDIA GH200 480GB", "hopper", True, True, True, True, 2.0),
    ((10, 0), "NVIDIA B200", "blackwell", True, True, True, True, None),
    ((10, 3), "NVIDIA B300", "blackwell", True, True, True, True, None),
    ((11, 0), "NVIDIA Thor", "blackwell", True, True, True, True, None),
    ((12, 0), "NVIDIA GeForce RTX 5090", "blackwell", True, True, True, True, None),
    ((12, 1), "NVIDIA GB10", "blackwell", True, True, True, True, None),
]


@pytest.mark.parametrize(
    ("compute_capability", "device", "name", "tensor_cores", "bf16", "tf32", "fp8", "fp16_rate"),
    CARDS,
    ids=[card[1] for card in CARDS],
)
def test_a_card_is_known_for_what_its_hardware_does(
    compute_capability: tuple[int, int],
    device: str,
    name: str,
    tensor_cores: bool,
    bf16: bool,
    tf32: bool,
    fp8: bool,
    fp16_rate: float | None,
) -> None:
    assert generation_of(compute_capability, device) == Generation(
        name=name, tensor_cores=tensor_cores, bf16=bf16, tf32=tf32, fp8=fp8, fp16_rate=fp16_rate
    )


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA GeForce GTX 1650",
        "NVIDIA GeForce GTX 1660 SUPER",
        "GeForce GTX 1650 Ti with Max-Q Design",
        "NVIDIA GeForce MX450",
        "NVIDIA GeForce MX550",
        "NVIDIA T400 4GB",
        "NVIDIA T500",
        "NVIDIA T600 Laptop GPU",
        "NVIDIA T1000 8GB",
        "Quadro T2000",
    ],
)
def test_a_turing_without_tensor_cores_is_told_by_its_name(device: str) -> None:
    assert not generation_of((7, 5), device).tensor_cores


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA T4G", "NVIDIA TITAN RTX", "Quadro RTX 4000", ""])
def test_other_turings_have_tensor_cores(device: str) -> None:
    assert generation_of((7, 5), device).tensor_cores


def test_only_a_turing_is_judged_by_its_name() -> None:
    assert generation_of((8, 6), "NVIDIA T1000 of a later day").tensor_cores


def test_an_unknown_newer_gpu_does_what_the_newest_known_one_does_under_a_name_of_its_own() -> None:
    assert generation_of((13, 0)) == Generation(name="sm_130", tensor_cores=True, bf16=True, tf32=True, fp8=True)


def test_an_unknown_older_gpu_can_do_nothing() -> None:
    assert generation_of((3, 7), "Tesla K80") == Generation(name="sm_37")


@pytest.mark.parametrize(
    ("compute_capability", "like"), [((8, 8), (8, 7)), ((10, 7), (10, 3)), ((12, 9), (12, 1)), ((7, 9), (7, 5))]
)
def test_an_unknown_minor_version_is_taken_for_the_one_before_it(
    compute_capability: tuple[int, int], like: tuple[int, int]
) -> None:
    found, known = generation_of(compute_capability), GENERATIONS[like]
    assert (found.name, found.tensor_cores, found.bf16, found.fp8) == (
        known.name,
        known.tensor_cores,
        known.bf16,
        known.fp8,
    )
    assert found.fp16_rate is None


def test_no_generation_loses_what_the_one_before_it_could() -> None:
    abilities = [(g.tensor_cores, g.bf16, g.tf32, g.fp8) for _, g in sorted(GENERATIONS.items())]
    for before, after in pairwise(abilities):
        assert all(later >= earlier for earlier, later in zip(before, after, strict=True))
