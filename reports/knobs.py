"""What a knob gives and costs: blocks, whole steps, activations computed again, Linears in FP8.

    python reports/knobs.py blocks --out reports/NAME/blocks.jsonl convnext_tiny swin_t timm:poolformer_s24:128
    python reports/knobs.py whole_steps --out reports/NAME/steps.jsonl llama_150m t5_base zoo:resnet18:8
    python reports/knobs.py checkpoint --out reports/NAME/checkpoint.jsonl llama_150m zoo:gpt2:8
    python reports/knobs.py float8 --steps 1000 --out reports/NAME/float8.jsonl wide_decoder large_encoder:64

A model is one of `foreign_models.py` or `wide_models.py`, `zoo:NAME`, or `timm:NAME`, which
trains on pictures with a drop path rate of 0.1; `:BATCH_SIZE` follows. Each policy, and those of the files after
`--policy`, trains by `tuned.training_step` on a few batches that lie on the GPU; a line has the median of three
blocks, and the host's own time. With `--steps` the first model trains on, on new batches, and the line has the mean
losses of 50 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_models  # beside this program
import torch
import wide_models
from torch._inductor.utils import fresh_cache

import amptune
from amptune.changes.blocks import repeated_paths
from amptune.changes.tensor_tree import map_tensors
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Float8Rule, Policy
from amptune.workload import zoo
from amptune.workload.workload import Workload

BATCHES, FIRST_STEPS, BLOCKS, BLOCK_STEPS = 4, 12, 3, 30
MEAN_OF = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("knob", choices=KNOBS)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", nargs="*", default=[], help="policy files to train under too")
    parser.add_argument("--steps", type=int, default=0, help="steps of the first model whose losses are kept")
    arguments = parser.parse_args()
    for model in arguments.models:
        workload = workload_of(model)
        steps = arguments.steps if model == arguments.models[0] else 0
        found = [amptune.load(path) for path in arguments.policy]
        files = [one.policy for one in found if isinstance(one, amptune.PolicyFile)]
        for policy in (*KNOBS[arguments.knob](plain_for(workload), workload), *files):
            with fresh_cache():  # what compiling takes is a figure
                figures = timed(workload_of(model), policy, steps)
            line = {"model": model, "gpu": torch.cuda.get_device_name(), **figures}
            with arguments.out.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)


def workload_of(model: str) -> Workload:
    name, _, size = model.removeprefix("zoo:").removeprefix("timm:").partition(":")
    home = next((one for one in (foreign_models, wide_models) if hasattr(one, name)), None)
    if model.startswith("timm:"):
        found = of_timm(name)
    else:
        found = zoo.workload(name) if model.startswith("zoo:") or home is None else getattr(home, name)()
    return replace(found, batch_size=int(size)) if size else found


def of_timm(name: str) -> Workload:
    import timm  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

    own = foreign_models.vit_small_patch16_224()
    return replace(own, name=name, model=lambda: timm.create_model(name, drop_path_rate=0.1))


def plain_for(workload: Workload) -> Policy:
    convolves = any(isinstance(module, torch.nn.Conv2d) for module in workload.model().modules())
    return Policy(autocast="bf16", memory_format="channels_last" if convolves else "contiguous", fused_optimizer=True)


def with_blocks(plain: Policy, _: Workload) -> Iterator[Policy]:
    yield replace(plain, cuda_graphs=True)
    yield replace(plain, compile="blocks", cuda_graphs=True)
    yield replace(plain, compile="reduce-overhead")


def with_whole_steps(plain: Policy, _: Workload) -> Iterator[Policy]:
    for own in (plain, replace(plain, compile="blocks")):
        yield replace(own, cuda_graphs=True)
        yield replace(own, cuda_graphs="step")
    yield replace(plain, compile="reduce-overhead")


def with_checkpoint(plain: Policy, workload: Workload) -> Iterator[Policy]:
    all_blocks = tuple(repeated_paths(workload.model()))
    for compile_mode in ("off", "default", "reduce-overhead"):
        for blocks in ((), all_blocks[::2], all_blocks):
            yield replace(plain, compile=compile_mode, checkpoint=blocks)


def with_float8(plain: Policy, workload: Workload) -> Iterator[Policy]:
    model = workload.model()
    blocks = tuple(Float8Rule(path=path) for path in repeated_paths(model))
    own = replace(plain, compile="blocks")
    yield own
    yield replace(own, float8_modules=blocks)


KNOBS = {
    "blocks": with_blocks,
    "whole_steps": with_whole_steps,
    "checkpoint": with_checkpoint,
    "float8": with_float8,
}


def timed(workload: Workload, policy: Policy, steps: int = 0) -> dict[str, Any]:
    """Returns the figures of training under a policy."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = workload.model().cuda()
    began_s = time.perf_counter()
    with amptune.apply(policy, model, guard=False) as tuned:
        assert workload.loss is not None  # noqa: S101  # these models have no step of their own
        train = tuned.training_step(workload.loss, tuned.optimizer(workload.optimizer(model)), workload.clip)
        drawn = [workload.batch(workload.batch_size) for _ in range(BATCHES)]
        batches = [map_tensors(lambda tensor: tensor.cuda(), batch) for batch in drawn]
        losses = [float(train(batches[step % BATCHES])) for step in range(FIRST_STEPS)]
        ready_s = time.perf_counter() - began_s
        blocks = sorted(block_ms(train, batches) for _ in range(BLOCKS))
        ms, host_ms = blocks[BLOCKS // 2]
        peak_mib = torch.cuda.max_memory_reserved() >> 20
        return {
            "policy": policy_to_dict(policy),
            "ms": round(ms, 3),
            "host_ms": round(host_ms, 3),
            "ready_s": round(ready_s, 1),
            "peak_reserved_mib": peak_mib,
            "losses": [round(statistics.fmean(losses[:2]), 4), round(losses[-1], 4)],
            "curve": list(curve_of(train, workload, steps)),
            "findings": list(map(str, tuned.findings)),
        }


def curve_of(train: Any, workload: Workload, steps: int) -> Iterator[float]:
    """Yields the mean losses of parts of further steps, on new batches."""
    for _ in range(steps // MEAN_OF):
        losses = []
        for _ in range(MEAN_OF):
            batch = map_tensors(lambda tensor: tensor.cuda(), workload.batch(workload.batch_size))
            losses.append(train(batch).detach())
        yield round(float(torch.stack(losses).mean()), 4)


def block_ms(train: Any, batches: list[Any]) -> tuple[float, float]:
    """Returns the ms of a step in a block, and those that the host takes to launch it."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for step in range(BLOCK_STEPS):
        train(batches[step % BATCHES])
    launched_s = time.perf_counter()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began_s) / BLOCK_STEPS, 1000 * (launched_s - began_s) / BLOCK_STEPS


if __name__ == "__main__":
    main()
