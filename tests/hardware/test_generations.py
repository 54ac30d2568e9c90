from __future__ import annotations

import pytest

from amptune.hardware.generations import GENERATIONS, Generation, generation_of

# Tensor cores, bf16, TF32, FP8, and the speed of FP16 over FP32 without tensor cores.
CARDS = {
    ((5, 2), "NVIDIA GeForce GTX 980"): ("maxwell", False, False, False, False, None),
    ((6, 0), "Tesla P100-PCIE-16GB"): ("pascal", False, False, False, False, 2.0),
    ((6, 1), "NVIDIA GeForce GTX 1080 Ti"): ("pascal", False, False, False, False, 1 / 64),
    ((7, 0), "Tesla V100-SXM2-32GB"): ("volta", True, False, False, False, 2.0),
    ((7, 5), "Tesla T4"): ("turing", True, False, False, False, 2.0),
    ((7, 5), "NVIDIA GeForce GTX 1660 Ti"): ("turing", False, False, False, False, 2.0),
    ((8, 0), "NVIDIA A100-SXM4-40GB"): ("ampere", True, True, True, False, 4.0),
    ((8, 6), "NVIDIA GeForce RTX 3090"): ("ampere", True, True, True, False, 1.0),
    ((8, 9), "NVIDIA L4"): ("ada", True, True, True, True, 1.0),
    ((9, 0), "NVIDIA H200"): ("hopper", True, True, True, True, 2.0),
    ((10, 0), "NVIDIA B200"): ("blackwell", True, True, True, True, None),
    ((12, 0), "NVIDIA GeForce RTX 5090"): ("blackwell", True, True, True, True, None),
    ((13, 0), "of a later day"): ("sm_130", True, True, True, True, None),
    ((3, 7), "Tesla K80"): ("sm_37", False, False, False, False, None),
}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card[1])
def test_a_card_is_known_for_what_its_hardware_does(card: tuple[tuple[int, int], str]) -> None:
    found = generation_of(*card)
    assert (found.name, found.tensor_cores, found.bf16, found.tf32, found.fp8, found.fp16_rate) == CARDS[card]


# A Turing without tensor cores is told by its name.
WITHOUT = [
    "NVIDIA GeForce GTX 1650", "GeForce GTX 1650 Ti with Max-Q Design", "NVIDIA GeForce MX450", "NVIDIA T400 4GB",
    "NVIDIA T600 Laptop GPU", "NVIDIA T1000 8GB", "Quadro T2000",
]  # fmt: skip


@pytest.mark.parametrize("device", [*WITHOUT, "NVIDIA T4G", "NVIDIA TITAN RTX", "Quadro RTX 4000", ""])
def test_only_a_turing_is_judged_by_its_name(device: str) -> None:
    assert generation_of((7, 5), device).tensor_cores is (device not in WITHOUT)
    assert generation_of((8, 6), device).tensor_cores


@pytest.mark.parametrize(("unknown", "like"), [((8, 8), (8, 7)), ((10, 7), (10, 3)), ((12, 9), (12, 1))])
def test_an_unknown_minor_version_is_taken_for_the_one_before_it(
    unknown: tuple[int, int], like: tuple[int, int]
) -> None:
    known = GENERATIONS[like]
    assert generation_of(unknown) == Generation(
        name=known.name, tensor_cores=known.tensor_cores, bf16=known.bf16, tf32=known.tf32, fp8=known.fp8
    )
