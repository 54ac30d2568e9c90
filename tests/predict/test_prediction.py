"""Rooflines, ranges and verdicts; what the table's facts alone must bring about."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.errors import DeviceError, FileFormatError
from amptune.predict.gpu_table import gpu_models, gpus_named
from amptune.predict.known_speed_up import known_from
from amptune.predict.missing_features import _kernels_missing, missing_on
from amptune.predict.operation import Operation, StepFigures, Work
from amptune.predict.prediction import predicted
from amptune.predict.roofline import step_seconds
from amptune.predict.speed_up import Known, Range, StepSetting, calibration, half_speed_up, verdict_of

V100, GTX, A100, H100 = gpus_named("V100,GTX-1080-Ti,A100,H100")
SETTING = StepSetting()


def work(*, half: bool = False, **figures: float) -> Work:
    given = {"kind": "matmul", "module": "", "flops": 1e12, "bytes": 1e9, **figures}
    return Work(operations=(Operation(in_half=half, **given),) * 10)  # type: ignore[arg-type]


def step(fp32: Work, half: Work) -> StepFigures:
    return StepFigures(name="s", batch_size=32, fp32=fp32, half=half, fixed_bytes=(1e9, 1e9), sample_bytes=(1e8, 5e7))


PRODUCTS = step(work(), work(half=True, bytes=0.5e9))
MOVING = step(work(kind="memory", flops=0.0), work(kind="memory", flops=0.0))  # type: ignore[arg-type]


def test_every_gpu_of_the_table_has_a_source_and_rates_that_fit_its_generation() -> None:
    for gpu in gpu_models():
        assert len(gpu.source) > 10
        assert (gpu.half is not None) == gpu.generation.tensor_cores, gpu.name
        assert (gpu.tf32 is not None) == gpu.generation.tf32, gpu.name
        assert gpu.half is None or gpu.half > gpu.fp32
    assert len({gpu.name for gpu in gpu_models()}) == len(gpu_models())


@pytest.mark.parametrize(
    ("text", "name"),
    [("v100", "V100"), ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("1080ti", "GTX-1080-Ti"), ("H100 80GB HBM3", "H100"),
     ("Tesla T4", "T4"), ("A100-40GB", "A100-40GB"), ("V100-SXM2-16GB", "V100")],
)  # fmt: skip
def test_a_gpu_is_found_by_the_names_it_goes_by(text: str, name: str) -> None:
    assert [gpu.name for gpu in gpus_named(text)] == [name]


def test_an_unknown_gpu_is_told_with_near_names_and_the_list() -> None:
    with pytest.raises(DeviceError, match=r"the table has no GPU 'V1000'; did you mean V100.*It has GTX-1070, .*B200"):
        gpus_named("A100,V1000")
    with pytest.raises(DeviceError, match="no GPU is named"):
        gpus_named(",")


def test_products_gain_from_tensor_cores_and_not_without_them() -> None:
    assert half_speed_up(PRODUCTS, V100, SETTING).middle > 2.5
    assert half_speed_up(PRODUCTS, GTX, SETTING).middle < 1.1


def test_casts_alone_make_half_precision_slower() -> None:
    casting = step(work(flops=1e9), Work(operations=work(flops=1e9).operations * 2))
    assert half_speed_up(casting, V100, SETTING).middle < 0.6


def test_tf32_takes_from_the_gain_where_the_gpu_has_it_alone() -> None:
    tf32 = StepSetting(fp32_math="tf32")
    assert half_speed_up(PRODUCTS, A100, tf32).middle < 0.5 * half_speed_up(PRODUCTS, A100, SETTING).middle
    assert half_speed_up(PRODUCTS, V100, tf32) == half_speed_up(PRODUCTS, V100, SETTING)


def test_channels_last_spares_the_copies_of_tensor_cores_alone() -> None:
    def gain(name: str) -> float:
        (gpu,) = gpus_named(name)
        images = work(half=True, kind="convolution", layout_bytes=1e9)  # type: ignore[arg-type]
        seconds = [step_seconds(images, gpu, calibration().efficiency, fp32_math="stock", channels_last=last)
                   for last in (False, True)]  # fmt: skip
        return seconds[0] / seconds[1]

    assert gain("V100") > 1.1
    assert gain("GTX-1080-Ti") == 1


def test_graphs_pay_where_the_host_is_slower_than_the_gpu() -> None:
    small = step(work(flops=1e6, bytes=1e4), work(half=True, flops=1e6, bytes=1e4))
    assert predicted(small, H100, SETTING).cuda_graphs.verdict == "pays"
    assert predicted(PRODUCTS, H100, SETTING).cuda_graphs.ratio.middle == pytest.approx(1, abs=0.01)


def test_a_measured_speed_up_moves_the_prediction_towards_it_and_narrows_it() -> None:
    alone = half_speed_up(PRODUCTS, H100, SETTING)
    other = half_speed_up(PRODUCTS, H100, SETTING, Known(gpu=gpus_named("H200")[0], speed_up=1.0))
    assert other.middle < alone.middle
    assert other.high / other.low < alone.high / alone.low


@given(st.floats(0.2, 5), st.floats(0.01, 1))
def test_a_verdict_is_given_if_nine_of_ten_such_ratios_agree(middle: float, spread: float) -> None:
    found = Range.around(middle, spread)
    assert found.low < middle < found.high
    distance = math.log(middle / 1.05) / spread
    expected = "pays" if distance > 1.29 else "does not" if distance < -1.29 else None
    assert expected in (None, verdict_of(found))
    assert abs(distance) > 1.28 or verdict_of(found) == "unclear"


def test_the_largest_batch_fits_and_is_larger_in_half() -> None:
    fp32, half = predicted(PRODUCTS, V100, SETTING).largest_batch
    assert 1e9 + fp32 * 1e8 < 16 * 2**30
    assert 1.8 * fp32 < half < 2.2 * fp32


def test_what_a_gpu_lacks_is_told() -> None:
    codes = {gpu.name: {finding.code for finding in missing_on(gpu)} - {"kernels-unknown"} for gpu in (GTX, V100, H100)}
    assert codes == {
        "GTX-1080-Ti": {"missing-tensor-cores", "missing-bf16", "missing-tf32", "missing-triton"},
        "V100": {"missing-bf16", "missing-tf32"},
        "H100": set(),
    }


@pytest.mark.parametrize(
    ("architectures", "gpu", "missing"),
    [(["sm_75", "sm_80", "sm_90"], "V100", True), (["sm_75", "sm_80", "sm_90"], "RTX-3090", False),
     (["sm_70", "compute_70"], "B200", False), (["sm_90a"], "H100", False), (["sm_80", "sm_86"], "A100", False)],
)  # fmt: skip
def test_kernels_run_on_their_architecture_and_later_minor_versions(
    architectures: list[str], gpu: str, missing: bool
) -> None:
    found = _kernels_missing(gpus_named(gpu)[0], architectures, "2.11.0")
    assert [finding.code for finding in found] == ["missing-kernels"] * missing
    assert all("torch 2.11.0 here has no kernels for compute capability" in str(finding) for finding in found)


def test_a_speed_up_is_read_from_text_or_from_a_policy_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert known_from("V100=2.1") == Known(gpu=V100, speed_up=2.1)
    with pytest.raises(DeviceError, match=r"'fast' is no speed-up; write --measured V100=2\.1"):
        known_from("V100=fast")
    folder = tmp_path_factory.mktemp("policies")
    evidence = "evidence: {baseline: {samples_per_s: 100.0}, amp_recipe: {samples_per_s: 150.0}}\n"
    full, empty = folder / "full.yaml", folder / "empty.yaml"
    head = "schema: amptune.policy/1\nvalid_for: {nvidia.com/gpu.product: NVIDIA-H200}\n"
    full.write_text(head + evidence)
    empty.write_text(head)
    assert known_from(str(full)) == Known(gpu=gpus_named("H200")[0], speed_up=1.5)
    with pytest.raises(FileFormatError, match="give GPU=SPEEDUP instead"):
        known_from(str(empty))
