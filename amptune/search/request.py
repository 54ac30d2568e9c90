"""The request for a tuning run: the workload, the wishes, the budget, and where trials are kept."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from amptune.errors import ObjectiveError, StudyError, TargetError, first_line
from amptune.hardware.cuda_driver import gpu_count
from amptune.measure.workers.source import Source
from amptune.policy.policy_file import BASELINES
from amptune.policy.settings import STOCK, Policy
from amptune.search.plan.budget import Budget
from amptune.search.space.candidates import Wanted
from amptune.search.space.knobs import SEARCHED, pin, with_choices
from amptune.search.space.space_file import load_space
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.workload.by_value import to_bytes
from amptune.workload.script import is_script
from amptune.workload.targets import parse_target
from amptune.workload.workload import Workload

if TYPE_CHECKING:
    from amptune.search.sampler.policy_sampler import Sampler

__all__ = ["TuningRequest", "hide_from_git", "place_of", "ranks_of", "require_known", "source_of", "workers_log"]

# Where studies are kept that have no place of their own.
STUDIES = Path(".amptune")

# Seconds in which a server answers, if there is one.
REACHED_S = 10


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """A request for one tuning run. `study` is a folder or a database URL; `folder` has the log and the locks.

    `sampler` proposes policies; by default amptune's own. So many `workers` of one command share the machine. Steps are
    timed over so many `ranks`: each of the devices that will train, or the first alone. `run`
    names it among all runs of the study; `began` is UTC, ISO 8601. Raises `ObjectiveError` if a sampler is given that
    cannot serve the objective.
    """

    source: Source
    wanted: Wanted
    budget: Budget
    folder: Path
    study: Path | str
    device: str | None = None
    workers: int = 1
    ranks: int = 1
    seed: int = 0
    sampler: Sampler | None = None
    objective: Objective = THROUGHPUT
    run: str = field(default_factory=lambda: uuid4().hex)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def __post_init__(self) -> None:
        if self.sampler is not None and self.objective.name != "throughput":
            raise ObjectiveError(
                f"a study's values are samples per second, so only amptune's own sampler serves {self.objective.name}"
            )

    @property
    def artifacts(self) -> Path:
        """The folder for what torch.compile made of policies."""
        return self.folder / "artifacts"

    @property
    def options(self) -> tuple[str, ...]:
        """The wishes as options of `amptune tune`; the same options select the same study."""
        wanted, whole = self.wanted, self.wanted.global_batch
        compiling = {None: (), True: ("--compile",), False: ("--no-compile",)}[wanted.compile]
        valued = {
            "--baseline": _name_of(wanted.baseline, is_script=self.source.is_script),
            "--space": wanted.space,
            "--batch-size": wanted.batch_size,
            "--global-batch": whole and whole.samples,
            "--devices": wanted.devices if wanted.devices > 1 else None,
            "--max-memory": None if wanted.memory_mib is None else f"{wanted.memory_mib:.10g}MiB",
            "--device": self.device,
        }
        named = (part for name, value in valued.items() if value is not None for part in (name, str(value)))
        pinned = (part for name, value in wanted.pins.items() for part in ("--set", f"{name}={value}"))
        return (*named, *compiling, *pinned)


def _name_of(baseline: Policy | None, *, is_script: bool) -> str | None:
    """Returns the baseline's option value, None for the default; FILE if only a file can hold it."""
    if baseline is None or baseline == STOCK:
        return "stock" if is_script and baseline is not None else None
    return next((name for name, it in BASELINES.items() if it == baseline), "FILE")


def require_known(request: TuningRequest) -> None:
    """Raises `SpaceError` for a space, knob or value that there is on no machine, `StudyError` for a database
    without a driver, or that cannot be reached.

    So these are told before the workload is built; what depends on the machine is told after.
    """
    if isinstance(request.study, str):
        _require_database(request.study)
    wanted = request.wanted
    if request.source.is_script and (wanted.batch_size or wanted.global_batch or wanted.devices > 1):
        raise TargetError(
            "a script that runs as it is decides on its batches and devices itself: leave --batch-size, --global-batch "
            "and --devices out, or write its step as an amptune.Workload (`amptune init`)"
        )
    space = load_space(wanted.space or "cpu")
    if wanted.space is None:  # that of this machine is not known yet: any knob may be in it
        for name in sorted(SEARCHED.keys() - {"batch_size", "accumulate"} - {knob.name for knob in space.knobs}):
            space = with_choices(space, name, (SEARCHED[name].stock,), SEARCHED[name].stock)
    for name, text in wanted.pins.items():
        if name not in ("batch_size", "accumulate") or wanted.batch_size is None:
            pin(space, name, text)


def _require_database(url: str) -> None:
    """Raises `StudyError` if there is no such kind of database, its driver is missing, or it cannot be reached."""
    import sqlalchemy  # Optuna's, which takes long to import

    try:
        dialect: Any = sqlalchemy.make_url(url).get_dialect()
        (dialect.import_dbapi if hasattr(dialect, "import_dbapi") else dialect.dbapi)()
        if dialect.name != "sqlite":  # a file, which opening would make
            limit = {"connect_timeout": REACHED_S} if dialect.driver.startswith("psycopg") else {}
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args=limit)
            engine.connect().close()
    except (ImportError, ValueError, sqlalchemy.exc.SQLAlchemyError) as error:
        kind, reason = url.partition(":")[0], first_line(error)
        if isinstance(error, ValueError):  # of the only number in a URL
            reason = "its port is no whole number"
        elif isinstance(error, ImportError) and kind.startswith("postgresql"):
            reason += "; in a clone of amptune, pip install '.[postgres]' brings the drivers"
        raise StudyError(f"the study cannot be read or written: {reason} (--study {kind}://…)") from error


def ranks_of(devices: int, device: str | None) -> int:
    """Returns over how many processes steps are timed: one for each of the `devices` if so many GPUs are here."""
    if devices == 1 or device not in (None, "cuda"):
        return 1
    count = gpu_count()
    return devices if count is not None and count >= devices else 1


def source_of(workload: Workload | Callable[[], Workload] | str, arguments: Sequence[str] = ()) -> Source:
    """Returns where workers get the workload from: a target, an object, or a function that builds it there.

    `arguments` are those of a target's script. Raises `TargetError` for a malformed target, a missing file, and what
    cannot be sent to other processes.
    """
    if isinstance(workload, str):
        target = parse_target(workload)
        runs = is_script(target, arguments)
        return Source(target=target.absolute(), arguments=tuple(arguments), is_script=runs)
    if not isinstance(workload, Workload) and (not callable(workload) or isinstance(workload, type)):
        raise TargetError(
            "tune() takes a Workload, a function that returns one, or a target such as 'train.py:workload', "
            f"not {type(workload).__name__}"
        )
    return Source(pickled=to_bytes(workload, "workload"))


@contextmanager
def workers_log() -> Iterator[Path]:
    """Yields the file that workers write to. It stays if there is anything in it, since messages name it."""
    log = Path(tempfile.mkdtemp(prefix="amptune-")) / "workers.log"
    try:
        yield log
    finally:
        if not log.exists() or log.stat().st_size == 0:
            shutil.rmtree(log.parent, ignore_errors=True)


def hide_from_git(folder: Path) -> None:
    """Tells git to leave out the folder of all studies, if this is one of them: they serve this machine alone."""
    ignored = STUDIES / ".gitignore"
    if folder.parent == STUDIES and not ignored.exists():
        with suppress(OSError):
            ignored.write_text("*\n")


def place_of(study: str | Path | None, name: str) -> tuple[Path, Path | str]:
    """Returns (folder for log and locks, where the trials are kept: that folder or a database URL)."""
    default = STUDIES / re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if study is None:
        return default, default
    if "://" in str(study):
        return default, str(study)
    return Path(study), Path(study)
