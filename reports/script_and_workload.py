"""Are a script's steps timed as those of the same training written as a `Workload`? Policies in turn, under both.

    python reports/script_and_workload.py FOLDER --out times.jsonl

FOLDER has public scripts in folders of their own, at the commits that reports/README.md names: mnist, vae, words (of
pytorch/examples) and timm (pytorch-image-models), with made-up data of their formats: `--make-data` writes it. Each is
measured in processes of its own, script and workload by turns, under stock PyTorch, bf16, and bf16 compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "mnist": ("main.py", ["--batch-size", "1024"]),
    "vae": ("main.py", ["--batch-size", "4096"]),
    "words": (
        "main.py",
        [
            *("--accel", "--use-optimizer", "--lr=0.001", "--model=Transformer", "--emsize=512", "--nhead=8"),
            *("--nhid=2048", "--nlayers=6", "--batch_size=64", "--bptt=128", "--data=data/words"),
        ],
    ),
    "timm": (
        "train.py",
        ["--data-dir=imgs", "--model=resnet50", "--num-classes=4", "-b128", "-j14", "--log-interval=1000"],
    ),
}
WORDS, BPTT = 10_000, 128


def make_data(folder: Path) -> None:
    """Writes random digits, words and pictures where the scripts look for them."""
    rng = np.random.default_rng(0)
    raw = folder / "data/MNIST/raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 60_000), ("t10k", 1000)):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count).astype(np.uint8)
        head = np.array([2051, count, 28, 28], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels.tobytes())
    (folder / "words/data/words").mkdir(parents=True, exist_ok=True)
    for part, lines in (("train", 150_000), ("valid", 1000), ("test", 1000)):
        words = rng.integers(0, WORDS - 1, (lines, 20))
        text = "\n".join(" ".join(f"w{one}" for one in line) for line in words)
        (folder / f"words/data/words/{part}.txt").write_text(text + "\n")
    pictures = import_module("PIL.Image")
    for part, count in (("train", 4096), ("validation", 64)):
        for label in range(4):
            (folder / f"timm/imgs/{part}/{label}").mkdir(parents=True, exist_ok=True)
            for at in range(count // 4):
                picture = pictures.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).resize((256, 256))
                picture.save(folder / f"timm/imgs/{part}/{label}/{at}.jpg")


def workload_of(name: str) -> Any:
    """Returns the training of a script, written by hand; it runs in the script's folder."""
    import amptune

    sys.path.insert(0, str(Path.cwd()))
    if name == "mnist":
        return amptune.Workload(
            model=import_module("main").Net,
            batch=lambda n: (torch.randn(n, 1, 28, 28), torch.randint(10, (n,))),
            loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
            batch_size=1024,
        )
    if name == "vae":
        sys.argv[1:] = ["--batch-size", "4096"]
        script = import_module("main")
        return amptune.Workload(
            model=script.VAE,
            batch=lambda n: torch.rand(n, 1, 28, 28),
            step=own_step(lambda model, x: (model(x), x), lambda out, x: script.loss_function(out[0], x, *out[1:])),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
            batch_size=4096,
        )
    if name == "words":
        return amptune.Workload(
            model=lambda: import_module("model").TransformerModel(WORDS, 512, 8, 2048, 6, 0.2),
            batch=lambda n: (torch.randint(WORDS, (BPTT, n)), torch.randint(WORDS, (BPTT * n,))),
            step=own_step(lambda model, batch: (model(batch[0]).view(-1, WORDS), batch[1]), nn.NLLLoss(), clip=0.25),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            batch_size=64,
            batch_dim=1,
        )
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    smooth = LabelSmoothingCrossEntropy(smoothing=0.1)
    return amptune.Workload(
        model=lambda: timm.create_model("resnet50", num_classes=4),
        batch=lambda n: (torch.randn(n, 3, 224, 224), torch.randint(4, (n,))),
        loss=lambda model, batch: smooth(model(batch[0]), batch[1]),
        optimizer=lambda model: create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=2e-5, momentum=0.9),
        batch_size=128,
    )


def own_step(outputs_of: Any, loss: Any, clip: float | None = None) -> Any:
    """Returns a step that computes its loss in FP32, outside of autocast, and reads it, as these scripts do."""

    def step(tuned: Any, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with tuned.autocast():
            found = outputs_of(model, batch)
        value = loss(*tree_map(lambda one: one.float() if one.is_floating_point() else one, found))
        tuned.scaler.scale(value).backward()
        tuned.scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        value.item()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        return value  # type: ignore[no-any-return]

    return step


def measure(name: str, kind: str) -> None:
    """Prints the steps of a script, or of the workload, under each policy, twice."""
    from amptune.measure.bench.bench import Bench
    from amptune.measure.results.outcome import Measurement
    from amptune.policy.settings import Policy
    from amptune.search.measuring import BLOCK
    from amptune.workload.running_script import workload_of_script

    path, arguments = SCRIPTS[name]
    workload = workload_of_script(Path(path), arguments) if kind == "script" else workload_of(name)
    bench = Bench(workload, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    bf16 = Policy(autocast="bf16", fp32_math="tf32", memory_format="channels_last", fused_optimizer=name != "mnist")
    policies = {"stock": Policy(), "bf16": bf16, "bf16, compiled": replace(bf16, compile="default")}
    for turn in range(2):
        for words, policy in policies.items():
            found = bench.measure(policy, BLOCK)
            ms = statistics.median(found.step_ms) if isinstance(found, Measurement) else None
            row = {"name": name, "kind": kind, "policy": words, "turn": turn, "ms": ms}
            print("ROW", json.dumps(row | ({} if ms else {"failure": str(found)})), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make-data", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", nargs="*", choices=SCRIPTS)
    parser.add_argument("--only", nargs=2, metavar=("NAME", "KIND"), help="measure in this process")
    asked = parser.parse_args()
    if asked.make_data:
        make_data(asked.folder)
    elif asked.only:
        measure(*asked.only)
    else:
        for name in asked.names or SCRIPTS:
            for kind in ("script", "workload", "script", "workload"):
                command = [sys.executable, str(Path(__file__).resolve()), ".", "--only", name, kind]
                where = asked.folder / name
                done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300)  # noqa: S603
                rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
                print(name, kind, *rows, *([] if rows else [done.stderr[-1500:]]), sep="\n  ", flush=True)
                with asked.out.open("a") as file:
                    file.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
