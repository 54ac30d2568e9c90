"""Rows of the published tables whose model can be built, and this project's own measurements, as one list."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

from amptune.predict.speed_up import StepSetting

FOLDER = Path(__file__).parent / "published"
_OWN_STEPS = Path(__file__).parent.parent / "tests" / "simulated" / "h200_grid.json"

# The tables' names of GPUs, as `amptune predict --gpu` has them. The longest that a name contains counts.
_GPUS = {
    "1080Ti": "GTX-1080-Ti", "2070MaxQ": "RTX-2070-Max-Q", "2080SuperMaxQ": "RTX-2080-Super-Max-Q",
    "2080Ti": "RTX-2080-Ti", "3070": "RTX-3070", "3080": "RTX-3080", "3090": "RTX-3090", "A40": "A40",
    "A4000": "RTX-A4000", "A4500": "RTX-A4500", "A5000": "RTX-A5000", "A5500": "RTX-A5500", "A6000": "RTX-A6000",
    "A100_PCIe": "A100-40GB", "A100_SXM4": "A100-40GB", "A100_p4": "A100-40GB", "A100 40GB": "A100-40GB",
    "A100-40GB": "A100-40GB", "A100 80GB PCIe": "A100-80GB-PCIe", "A100 80GB SXM4": "A100", "A100-80GB": "A100",
    "QuadroRTX5000": "Quadro-RTX-5000", "QuadroRTX6000": "Quadro-RTX-6000", "QuadroRTX8000": "Quadro-RTX-8000",
    "Quadro RTX 8000": "Quadro-RTX-8000", "TitanRTX": "Titan-RTX", "V100": "V100-32GB", "V100 16GB": "V100",
    "V100-16GB": "V100", "V100-32GB": "V100-32GB", "A10": "A10", "4090": "RTX-4090", "RTX 6000 Ada": "RTX-6000-Ada",
    "H100 80GB PCIe": "H100-PCIe", "H100 80GB SXM5": "H100", "GH200": "GH200", "B200": "B200",
}  # fmt: skip

# NVIDIA's models that are built here: (a part of the model's name, a part of its configuration, the workload).
_NVIDIA = (
    ("efficientnet", "efficientnet-b0", "efficientnet_b0"), ("efficientnet", "efficientnet-b4", "efficientnet_b4"),
    ("/resnet50v1.5", "", "resnet50"), ("/resnext101", "", "resnext101"), ("/se-resnext101", "", "se_resnext101"),
    ("Detection/SSD", "", "ssd"), ("BART", "=128", "bart_128"), ("BERT", "length=128", "bert_large_128"),
    ("BERT", "length=512", "bert_large_512"), ("BERT", "Fine-tuning", "bert_large_squad"),
    ("Transformer-XL", "Base", "transformerxlbase"), ("Transformer-XL", "Large", "transformerxllarge"),
    ("nnUNet", "Dimension=\t2", "nnunet_2d"), ("nnUNet", "Dimension=\t3", "nnunet_3d"), ("Jasper", "", "jasper"),
    ("QuartzNet", "", "quartznet"), ("GNMT", "", "gnmt"), ("Translation/Transformer", "", "translation_transformer"),
)  # fmt: skip
# Assumed to train in channels_last: the convolution networks offer nhwc, and SSD channels_last.
_CHANNELS_LAST = frozenset(["resnet50", "resnext101", "se_resnext101", "ssd", "efficientnet_b0", "efficientnet_b4"])
_SAMPLES = frozenset({"ssd", "resnet50", "ncf", "bert_base_squad", "bert_large_squad"})
# In the summary each is about as fast under AMP, V100 to B200; in the raw logs waveglow on V100 is 2.1 times as fast.
_AMP_OFF = frozenset({"tacotron2", "waveglow"})
_OWN = {
    "vgg16_cifar": "vgg16", "densenet161_cifar": "densenet161", "seresnext50_cifar": "seresnext50",
    "deeplabv3p": "deeplabv3plus", "bert512": "bert_base",
}  # fmt: skip
_BUILT = frozenset(
    [
        "ssd",
        "resnet50",
        "gnmt",
        "ncf",
        "transformerxlbase",
        "transformerxllarge",
        "tacotron2",
        "waveglow",
        "bert_base_squad",
        "bert_large_squad",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published ratio of half precision over FP32, in samples a second."""

    table: str
    gpu: str
    workload: str
    batch_size: int | None
    setting: StepSetting
    ratio: float
    fp32_per_s: float | None = None  # samples a second in FP32 (own rows: steps), where the table counts samples
    learned: bool = True  # False if AMP was probably off
    place: int = 0  # 0 for bf16, 1 for fp16

    @property
    def case(self) -> tuple[str, str, bool]:
        """Rows of one case differ in their GPU."""
        return self.table, self.workload, self.setting.channels_last


def published_rows() -> tuple[list[Row], list[str]]:
    """Returns the rows that can be predicted, and the others in words."""
    rows: list[Row] = []
    left: list[str] = []
    for table in ("lambda_train_fp32_vs_amp", "lambda_raw_older_gpus_train"):
        for found in _read(table):
            name = f"{table}: {found['gpu']} {found['workload']}"
            if found["workload"] not in _BUILT:
                left.append(f"{name}: the model is not built here")
            else:
                rows.append(_lambda_row(table, found))
    for found in _read("dle_v100_a100_train_1gpu"):
        workload = _nvidia_workload(found["model"], found["config"])
        if not found["amp_over_base"] or workload is None:
            left.append(f"dle: {found['gpu']} {found['model']} {found['config']}: "
                        + ("the model is not built here" if workload is None else "no ratio"))  # fmt: skip
        else:
            setting = StepSetting(fp32_math="tf32", channels_last=workload in _CHANNELS_LAST)
            rows.append(
                Row(table="dle", gpu=_gpu(found["gpu"]), workload=workload, batch_size=None, setting=setting,
                    ratio=float(found["amp_over_base"]))
            )  # fmt: skip
    return _one_each(rows), left


def _one_each(rows: list[Row]) -> list[Row]:
    """Returns one row for each GPU, model and batch, with the median ratio of the machines that have that GPU."""
    alike: dict[Row, list[Row]] = {}
    for row in rows:
        alike.setdefault(replace(row, ratio=0.0, fp32_per_s=None), []).append(row)
    return [sorted(group, key=lambda row: row.ratio)[len(group) // 2] for group in alike.values()]


def own_rows() -> list[Row]:
    """Returns the H200's rows of every bundled workload, and the cases of forum threads."""
    rows = []
    measured: dict[tuple[str, str, str], float] = {}
    for one in json.loads(_OWN_STEPS.read_text())["rows"]:
        if one["compile"] == "off" and not one["cudnn_benchmark"]:
            workload = _OWN.get(one["workload"], one["workload"])
            measured[workload, one["memory_format"], one["precision"]] = one["step_ms"]
    for (workload, layout, precision), step_ms in measured.items():
        base = {"fp32": "ieee", "tf32": "tf32"}.get(precision)
        if base:
            halves = [measured.get((workload, layout, half)) for half in ("bf16", "fp16")]
            for place, half_ms in enumerate(halves):
                if half_ms is None:
                    continue
                setting = StepSetting(fp32_math=base, channels_last=layout == "channels_last")  # type: ignore[arg-type]
                rows.append(Row(table=f"own_{base}", gpu="H200", workload=f"zoo:{workload}", batch_size=None,
                                setting=setting, ratio=step_ms / half_ms, fp32_per_s=1000 / step_ms,
                                place=place))  # fmt: skip
    for found in _read("cases"):
        setting = StepSetting(fp32_math="stock", channels_last=found["memory_format"] == "channels_last")
        rows.append(Row(table="case", gpu=found["gpu"], workload=f"zoo:{found['workload']}",
                        batch_size=int(found["batch"]), setting=setting,
                        ratio=float(found["half_over_fp32"])))  # fmt: skip
    return rows


def _read(table: str) -> list[dict[str, str]]:
    with (FOLDER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _lambda_row(table: str, found: dict[str, str]) -> Row:
    half = int(float(found["batch_amp"]))
    return Row(
        table=table,
        gpu=_gpu(found["gpu"]),
        workload=found["workload"],
        batch_size=int(float(found["batch_fp32"])),
        setting=StepSetting(fp32_math="tf32", half_batch_size=half),
        ratio=float(found["amp_over_fp32"]),
        fp32_per_s=float(found["fp32_or_tf32"]) if found["workload"] in _SAMPLES else None,
        learned=not (table == "lambda_train_fp32_vs_amp" and found["workload"] in _AMP_OFF),
    )


def _gpu(text: str) -> str:
    return _GPUS[max((name for name in _GPUS if name in text), key=len)]


def _nvidia_workload(model: str, config: str) -> str | None:
    return next((name for part, detail, name in _NVIDIA if part in f"/{model}" and detail in config), None)
