"""The command `amptune tune`: measures, decides, writes the policy."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from amptune.cli.options import (
    COUNT,
    FILE,
    MEMORY,
    SECONDS,
    AtLeast,
    GroupedCommand,
    json_option,
    objective_options,
    print_error,
    print_json,
    progress_unless,
    say,
    target_argument,
)
from amptune.cli.session import Session, pass_session
from amptune.errors import StudyError, suggestion
from amptune.policy.knobs.knob import LARGEST

if TYPE_CHECKING:
    from amptune.policy.settings import Policy
    from amptune.search.request import TuningRequest
    from amptune.search.sampler.policy_sampler import Sampler
    from amptune.search.space.global_batch import GlobalBatch

__all__ = ["tune_command"]


_GROUPS = {
    "Result": ["output", "force", "report", "verbose", "quiet", "dry_run", "as_json"],
    "Effort": ["budget", "trials"],
    "What is best": ["objective", "least_speed", "baseline", "max_memory"],
    "What may change": ["batch_size", "global_batch", "devices", "compile_", "pins", "space"],
    "Where it runs": ["device", "workers", "study", "seed", "sampler"],
}

_RARE = [
    *("force", "report", "trials", "least_speed", "global_batch", "devices"),
    *("space", "workers", "study", "seed", "sampler"),
]


@click.command("tune", cls=GroupedCommand, groups=_GROUPS, rare=_RARE)
@target_argument
@click.option("-o", "--output", type=FILE, default="policy.yaml", show_default=True,
              help="Where the policy is written.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a file that amptune did not write for TARGET, or that was edited.")
@click.option("--budget", type=SECONDS, default="300s", show_default=True, help="Wall-clock time of the whole command.")
@click.option("--trials", type=COUNT, help="Try at most this many policies.")
@click.option(
    "--space", type=FILE, metavar="NAME|FILE", help="Search space; by default the one of this machine's hardware."
)
@click.option("--batch-size", metavar="auto|N", help="Per device. Default: the workload's own; auto searches it too.")
@click.option("--global-batch", type=COUNT, metavar="N",
              help="Samples of one optimizer step over all devices, to be kept: batches are accumulated.")  # fmt: skip
@click.option("--devices", type=COUNT, default=1, show_default=True,
              help="How many devices train together. If so many GPUs are visible, steps are timed on all of them, with "
              "the exchange of gradients; else it is a number for --global-batch. torchrun gives it too.")  # fmt: skip
@click.option("--max-memory", type=MEMORY, metavar="SIZE", help="What a policy may take of the device's: 60GiB.")
@click.option("--compile/--no-compile", "compile_", default=None,
              help="Whether to try torch.compile. Default: where the budget has time for it.")  # fmt: skip
@objective_options("throughput", "Most samples per second, least peak memory, or least energy per sample.")
@click.option("--baseline", type=FILE, help="What training uses today. Default: stock, or what a script sets.",
              metavar="stock|amp-fp16|amp-bf16|transformers|FILE")  # fmt: skip
@click.option("--set", "pins", multiple=True, metavar="KNOB=VALUE", help="Pin a knob instead of searching it.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@click.option("--workers", type=COUNT, default=1, show_default=True,
              help="So many GPUs tune at once, on one study; with --device cpu, shares of its cores.")  # fmt: skip
@click.option("--worker", "of_run", hidden=True, metavar="BEGAN", help="Help the run of another process.")
@click.option(
    "--report", type=FILE, metavar="F.html", help="Write a page of what was found too, as `amptune report` does."
)
@click.option("--study", type=FILE, metavar="DIR|URL", help="Where trials are remembered. Default: .amptune/TARGET.")
@click.option(
    "--seed",
    type=AtLeast(0),
    default=0,
    show_default=True,
    help="Of the search; batches have their own.",
)
@click.option("--sampler", type=click.Choice(["amptune", "tpe", "gp", "random"]), default="amptune", show_default=True,
              help="What proposes policies: amptune's own sampler, or one of Optuna's.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Print the policies that were compared and all findings too.")
@click.option("-q", "--quiet", is_flag=True, help="Print the answer alone: no progress, no findings.")
@click.option("--dry-run", is_flag=True, help="Show what TARGET trains, and measure nothing.")
@json_option
@pass_session
def tune_command(
    session: Session,
    /,
    output: str,
    force: bool,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    dry_run: bool,
    report: str | None,
    workers: int,
    of_run: str | None,
    **options: Any,
) -> int:
    """Find the best policy for TARGET on this machine.

    TARGET is a training script, which runs as it is; what stands behind -- are its own arguments. What it writes
    meanwhile is kept apart. Or it is an amptune.Workload, or a function that returns one: FILE.py, if it has just one,
    FILE.py:NAME or PACKAGE.MODULE:NAME. `amptune init` writes a starter.
    Stock PyTorch and the AMP recipe are measured first. The same command again resumes its study: a policy that had its
    trial gets no second one. It also replaces the policy that it wrote; no other file, without --force.
    """
    from amptune.cli.policy_output import deliver, require_outputs, require_replaceable
    from amptune.cli.workers import beside, end_with_parent, parts_of, use_cores

    if of_run is not None:
        end_with_parent()
    require_outputs(output, report)
    pins = _pins(options.pop("pins"))
    options["devices"] = session.devices(options["devices"], options["device"])
    ranks = session.ranks(options["devices"], options["device"]) if workers == 1 else 1
    _require_one_job(workers, session)
    mine, *others = parts_of(workers, options["device"], options["trials"])
    use_cores(mine.cores)
    session.start_importing(options["target"], options["device"])
    from amptune.search.pipeline import TuningInterrupted, run_tuning

    request = replace(_request(session, pins=pins, ranks=ranks, **options | {"trials": mine.trials}), workers=workers)
    if dry_run:
        return _show(request, session, as_json=as_json)
    require_replaceable(output, options["target"], force=force)
    _require_folder(request.folder)
    tell = partial(
        deliver,
        request=request,
        target=options["target"],
        output=output,
        report=report,
        as_json=as_json,
        verbose=verbose,
        quiet=quiet,
    )
    progress = progress_unless(quiet, request.budget, verbose=verbose)
    if of_run is not None:  # the process that started this one decides
        try:
            with progress as observer:
                run_tuning(replace(request, began=of_run), observer, session.evaluator)
        except TuningInterrupted as interrupted:
            if interrupted.__cause__ is not None:
                raise interrupted.__cause__ from None
        return 0
    try:
        with progress as observer, beside(others, request, observer):
            decision = run_tuning(request, observer, session.evaluator)
    except TuningInterrupted as interrupted:
        if interrupted.decision is None:
            nothing = "interrupted before the baseline was measured: nothing to write"
            say(nothing, err=True)
            if as_json:
                print_error(130, "interrupted", nothing)
        else:
            tell(interrupted.decision)
            say("interrupted: this is the best so far; the same command continues", err=True)
            if interrupted.__cause__ is not None:
                raise interrupted.__cause__ from None
        return 130
    tell(decision)
    return 0


def _require_one_job(workers: int, session: Session) -> None:
    if workers > 1 and session.torchrun is not None:
        raise click.BadParameter("torchrun's processes train together: leave it out", param_hint="--workers")


def _show(request: TuningRequest, session: Session, *, as_json: bool) -> int:
    """Prints what the target trains, and its baseline."""
    from amptune.search.pipeline import prepared_for
    from amptune.search.space.candidates import candidates_for

    prepared = prepared_for(request, session.evaluator)
    subject, baseline = prepared.subject, candidates_for(prepared, request.wanted).baseline
    trains = subject.summary or f"{subject.parameters / 1e6:.3g} M parameters, {subject.batch_size} samples"
    if as_json:
        data = {"target": subject.name, "trains": trains, "baseline": str(baseline), "hardware": prepared.hardware.name}
        print_json("amptune.dry-run/1", {**data, "findings": []})
    else:
        say(f"{subject.name}: {trains}\nbaseline: {baseline}\non: {prepared.hardware.name}")
    return 0


def _require_folder(folder: Path) -> None:
    """Raises `StudyError` if the study's folder is none or cannot be written to, before the workload is built."""
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written to" if existing.is_dir() else "is no folder"
        raise StudyError(f"the study's folder {folder} cannot be used: {existing} {why}; choose another with --study")


def _request(
    session: Session,
    target: str,
    arguments: tuple[str, ...],
    budget: float,
    trials: int | None,
    space: str | None,
    batch_size: str | None,
    global_batch: int | None,
    devices: int,
    max_memory: float | None,
    compile_: bool | None,
    baseline: str | None,
    pins: dict[str, str],
    device: str | None,
    study: str | None,
    seed: int,
    sampler: str,
    objective: str,
    least_speed: float | None,
    ranks: int,
) -> TuningRequest:
    from amptune.search.request import TuningRequest, place_of, source_of
    from amptune.search.space.candidates import Wanted
    from amptune.search.table.objective import objective_of

    folder, storage = place_of(study, target)
    return TuningRequest(
        source=source_of(target, arguments),
        wanted=Wanted(
            baseline=_baseline(baseline),
            space=space,
            pins=pins,
            batch_size=_batch_size(batch_size),
            global_batch=_global_batch(global_batch, devices, ranks),
            compile=compile_,
            memory_mib=max_memory,
            devices=devices,
        ),
        budget=session.budget(budget, trials),
        folder=folder,
        study=storage,
        device=device,
        ranks=ranks,
        seed=seed,
        sampler=_sampler(sampler, seed),
        objective=objective_of(objective, least_speed),
    )


def _sampler(name: str, seed: int) -> Sampler | None:
    if name == "amptune":
        return None
    from amptune.search.sampler.policy_sampler import sampler_named  # Optuna's take seconds to import

    return sampler_named(name, seed)


def _baseline(text: str | None) -> Policy | None:
    from amptune.policy.file_io import load
    from amptune.policy.policy_file import BASELINES, is_preset
    from amptune.policy.settings import STOCK

    if text is None or text == "stock":
        return STOCK if text else None
    if not is_preset(text) and not Path(text).exists():
        known = ("stock", *BASELINES)
        message = f"{text!r} is not {', '.join(known)} or a policy file; {suggestion(text, known)}"
        raise click.BadParameter(message.rstrip("; "), param_hint="--baseline")
    return load(text).policy


def _pins(texts: tuple[str, ...]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for name, value in map(_pin, texts):
        if pins.setdefault(name, value) != value:
            raise click.BadParameter(f"{name} is to be {pins[name]} and {value}", param_hint="--set")
    return pins


def _pin(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise click.BadParameter(f"{text!r} is not of the form KNOB=VALUE", param_hint="--set")
    return name, value


def _global_batch(samples: int | None, devices: int, ranks: int) -> GlobalBatch | None:
    from amptune.search.space.global_batch import GlobalBatch

    if samples is None and ranks < devices:
        why = f"says something together with --global-batch, or where {devices} GPUs are visible"
        raise click.BadParameter(why, param_hint="--devices")
    return None if samples is None else GlobalBatch(samples=samples, devices=devices)


def _batch_size(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= LARGEST:
        message = f"{text!r} is neither auto nor a whole number of at least 1, and at most {LARGEST}"
        raise click.BadParameter(message, param_hint="--batch-size")
    return int(text)
