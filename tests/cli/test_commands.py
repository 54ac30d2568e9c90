"""The commands, run in this process: on a recorded machine, or on this one without workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from commands import WORKLOADS, Done, Machine, interrupting, run
from in_this_process import measuring_here

from amptune.cli.entry import cli
from amptune.cli.tune import _baseline
from amptune.hardware.detect import probe
from amptune.measure.results.subject import Prepared
from amptune.measure.results.training_runs import LossCurve
from amptune.policy.file_io import load
from amptune.policy.settings import Policy
from amptune.search.pipeline import locked

REPOSITORY = Path(__file__).resolve().parents[2]

TUNE = ("tune", "train.py:small")
FEW = ("--budget", "60s", "--trials", "4")


def test_tuning_writes_a_policy_that_is_valid_where_it_was_tuned(folder: Path) -> None:
    done = run(*TUNE, *FEW, folder=folder, evaluator=Machine(hardware=probe("cpu")))
    assert done.returncode == 0, done.stderr
    assert "policy written to policy.yaml" in done.stdout
    assert run("check", "policy.yaml", folder=folder).returncode == 0
    assert "autocast" in run("explain", "policy.yaml", folder=folder).stdout
    elsewhere = run(*TUNE, *FEW, folder=folder, evaluator=Machine())
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert run("check", "policy.yaml", folder=folder).returncode == 4


def test_progress_is_told_in_order_each_line_with_the_time_left(folder: Path) -> None:
    done = run("tune", "train.py:small", "--budget", "60s", "--trials", "2", folder=folder, evaluator=Machine())
    lines = re.findall(r"^\[ *(\d+) s left\] +(.*)", done.stderr, flags=re.MULTILINE)
    left_s, said = zip(*((int(seconds), words) for seconds, words in lines), strict=True)
    assert list(left_s) == sorted(left_s, reverse=True)
    stages = [
        "building the workload",
        "resnet50: 25,000,000",
        "search space hopper",
        "1 *",
        "comparison: ",
        "search ended",
    ]
    found = [next(place for place, words in enumerate(said) if words.startswith(stage)) for stage in stages]
    assert found == sorted(found)
    assert found[0] == 0


def test_the_answer_is_three_lines_and_verbose_has_the_tables_and_all_findings(folder: Path) -> None:
    few = ("--budget", "60s", "--trials", "4", "--no-compile")
    done = run(*TUNE, *few, folder=folder, evaluator=Machine())
    found, sure, next_step = done.stdout.splitlines()
    policy = "fp16, channels_last, CUDA graphs of whole steps, fused optimizer"
    assert re.fullmatch(rf"{policy}: 2\.55× \[2\.\d\d, 2\.\d\d\] the speed of the baseline", found)
    assert re.fullmatch(r"confirmed, over 99\.9 % sure: \d+ measurements in \d+ processes, 4 trials, \d+ s", sure)
    assert next_step == (
        'policy written to policy.yaml. In training: amptune.apply("policy.yaml", model); train by '
        "tuned.training_step, which it records"
    )
    verbose = run(*TUNE, *few, "-v", "--study", "other", folder=folder, evaluator=Machine())
    assert ("ms/step" in done.stdout, "ms/step" in verbose.stdout) == (False, True)
    assert verbose.stderr.count("\n• ") > done.stderr.count("\n• ")


def test_where_nothing_is_better_the_answer_says_to_keep_what_one_has(folder: Path) -> None:
    same = Machine(true_ms=lambda _: 10.0)
    lines = run(*TUNE, *FEW, folder=folder, evaluator=same).stdout.splitlines()
    assert lines[0] == "keep what you have: no policy was shown to be faster"
    assert re.match(
        r"(confirmed|likely): none of \d+ others is better|undecided: .+ (better|measurements|tell)", lines[1]
    )
    assert any(line.startswith("policy written to policy.yaml; ") for line in lines[2:4])  # 80 columns: it may be long


def test_the_same_command_again_resumes_and_its_budget_counts_from_the_start(folder: Path) -> None:
    class Slow(Machine):
        def prepare(self, limit_s: float) -> Prepared:
            assert limit_s == 60.0
            self.clock.advance(25.0)
            return super().prepare(limit_s)

    first = run(*TUNE, "--budget", "60s", "--trials", "2", folder=folder, evaluator=Slow())
    assert first.stderr.startswith("[  60 s left] building the workload\n[  35 s left] resnet50")
    again = run(*TUNE, "--budget", "60s", "--trials", "1", folder=folder, evaluator=Machine())
    assert "2 trials remembered" in again.stderr
    assert "search ended after 1 new trial:" in again.stderr


def test_an_interruption_before_the_baseline_is_measured_writes_nothing(folder: Path) -> None:
    done = run(*TUNE, "--budget", "60s", "--json", folder=folder, evaluator=Machine(interfere=interrupting(after=0)))
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode == 130
    assert answer["findings"][0]["code"] == "interrupted"
    assert "interrupted before the baseline was measured: nothing to write" in done.stderr
    assert not (folder / "policy.yaml").exists()


def test_an_interruption_while_packages_are_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "amptune", "probe"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("place", "why"), [("taken", "is no folder"), ("locked", "cannot be written to")])
def test_a_studys_folder_that_cannot_be_used_is_told_before_the_workload_is_built(
    place: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "taken").touch()
    (folder / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "locked")  # root may write anywhere
    done = run(*TUNE, "--study", f"{place}/study", folder=folder, evaluator=Machine())
    assert (done.returncode, "building" in done.stderr) == (2, False)
    said = f"the study's folder {place}/study cannot be used: {folder / place} {why}; choose another with --study"
    assert said in done.stderr


def test_an_interruption_in_a_callback_is_not_lost() -> None:
    """Python prints and drops what is raised in the callback of a weak reference, as those of imports are."""
    code = (
        "import os, signal, time, weakref; from amptune.cli import entry; class_ = type('A', (), {})\n"
        "def wait(**_):\n"
        "    it = class_(); ref = weakref.ref(it, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "    del it; time.sleep(60)\n"
        "entry.cli.invoke = lambda _: wait()\n"
        "entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "probe"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "train.py:small", "--device", "cuda"), "device 'cuda' does not exist here: CUDA's driver has none"),
        (("verify", "amp-bf16", "train.py:small", "--device", "cuda:1"), "device 'cuda:1' does not exist here"),
        (("diagnose", "train.py:small", "--device", "gpu"), "'gpu' is no device: write cpu, cuda or cuda:1"),
        (("tune", "train.py:small", "--budget", "soon"), "is no duration"),
        (("verify", "train.py", "policy.yaml"), "the policy stands first: amptune verify policy.yaml train.py"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_imported_or_built(
    arguments: tuple[str, ...], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(_: str) -> None:
        pytest.fail("workers were started")

    monkeypatch.setattr("amptune.cli.device.gpu_count", lambda: 0)
    monkeypatch.setattr("amptune.measure.workers.processes.start_importing", started)
    done = run(*arguments, folder=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert "building" not in done.stderr


def test_an_interruption_of_what_has_nothing_to_write_says_so_and_exits_with_130(folder: Path) -> None:
    claiming(folder, 2.0)
    machine = Machine(interfere=interrupting(after=0))
    done = run("verify", "policy.yaml", "train.py:small", folder=folder, evaluator=machine)
    assert done.returncode == 130
    assert done.stderr.endswith("\ninterrupted\n")
    assert machine.closed


def test_arguments_of_the_script_stand_behind_two_dashes_and_in_the_command_that_measures_more(folder: Path) -> None:
    done = run("tune", "train.py:small", "--budget", "60s", "--", "--lr", "0.1", folder=folder, evaluator=Machine())
    assert done.returncode == 0, done.stderr
    report = run("report", "train.py:small", "--json", folder=folder)
    assert json.loads(report.stdout)["command"].endswith(" -- --lr 0.1")
    done = run("tune", "train.py:small", "--lr", "0.1", folder=folder, evaluator=Machine())
    assert (done.returncode, "TARGET [-- ARGUMENTS]" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sampler", "tpe", "--objective", "memory"], "only amptune's own sampler"),
        (["--devices", "2"], "together with --global-batch"),
    ],
)
def test_options_that_do_not_serve_are_refused_before_anything_is_measured(
    folder: Path, options: list[str], words: str
) -> None:
    machine = Machine()
    assert_refused(run(*TUNE, *options, folder=folder, evaluator=machine), folder, 2, words)
    assert machine.measured == []


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("train.py:smal", 2, "did you mean small"),
        ("train.py:no_parameters", 2, "nothing to train"),
        ("train.py:raises", 1, "the training step raised ValueError: labels out of range"),
        ("train.py:not_a_number", 3, "nonfinite: the loss is nan at step 1"),
    ],
)
def test_mistakes_in_a_workload_have_clear_errors_and_codes(folder: Path, target: str, code: int, words: str) -> None:
    with measuring_here(f"{folder}/{target}") as here:
        assert_refused(run("tune", target, "--budget", "20s", folder=folder, evaluator=here), folder, code, words)


def assert_refused(done: Done, folder: Path, code: int, words: str) -> None:
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (folder / "policy.yaml").exists()
    assert code != 2 or not list(folder.glob(".amptune/*"))


STEPS = """
def step(tuned, model, optimizer, batch):
    with tuned.autocast():
        loss = nn.functional.cross_entropy(model(tuned.batch(batch[0])), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    return loss

twice = of(loss=None, step=step)
"""


@pytest.mark.parametrize("command", [("tune", "--force"), ("verify", "policy.yaml"), ("diagnose",)], ids=" ".join)
def test_a_step_that_applies_its_gradients_twice_is_refused_by_every_command(
    folder: Path, command: tuple[str, ...]
) -> None:
    (folder / "steps.py").write_text(WORKLOADS + STEPS)
    claiming(folder, 2.0)
    with measuring_here(f"{folder}/steps.py:twice") as here:
        done = run(*command, "steps.py:twice", "--budget", "20s", folder=folder, evaluator=here)
    assert done.returncode == 2, done.stderr
    assert "the optimizer steps again on" in " ".join(done.stderr.split())


def test_with_json_a_mistake_in_the_options_is_an_object_too(folder: Path) -> None:
    done = run(*TUNE, "--no-such-option", "--json", folder=folder)
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode == 2
    assert answer["findings"][0]["code"] == "usage"
    assert answer["findings"][0]["message"] in done.stderr.replace("\n", " ")
    assert run(*TUNE, "--trials", "0", "--", "--json", folder=folder).stdout == ""


def test_a_full_disk_prints_the_policy_instead(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    done = run(*TUNE, *FEW, "-o", "/dev/full", folder=folder, evaluator=Machine())
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stdout.startswith("schema: amptune.policy/1")
    as_json = run(*TUNE, *FEW, "-o", "/dev/full", "--json", folder=folder, evaluator=Machine())
    assert json.loads(as_json.stdout)["exit_code"] == 2
    assert "schema: amptune.policy/1" in as_json.stderr
    page = run(*TUNE, *FEW, "--report", "/dev/full", "--json", folder=folder, evaluator=Machine())
    assert json.loads(page.stdout)["exit_code"] == 2


def test_the_starter_workload_runs_as_it_stands_and_is_not_replaced(folder: Path) -> None:
    assert run("init", "mine.py", folder=folder).returncode == 0
    with measuring_here(f"{folder}/mine.py:workload") as here:
        done = run("tune", "mine.py:workload", "--budget", "12s", "--trials", "2", folder=folder, evaluator=here)
    assert done.returncode == 0, done.stderr
    again = run("init", "mine.py", folder=folder)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_profiles_are_built_and_resolved_and_files_checked_for_machines_elsewhere(folder: Path) -> None:
    for name, product in {"A": "A", "B": "B", "C": "A"}.items():
        (folder / f"{name}.yaml").write_text(
            f"schema: amptune.policy/1\nname: {name}\nvalid_for: {{nvidia.com/gpu.product: {product}}}\n"
        )
    assert run("check", "--any-hardware", "A.yaml", "B.yaml", folder=folder).returncode == 0
    assert run("check", "--any-hardware", "A.yaml", "train.py", folder=folder).returncode == 2
    build = ("profile", "build", "A.yaml", "B.yaml")
    assert run(*build, "-o", "cluster.yaml", folder=folder).returncode == 0
    onto_itself = run(*build, "-o", "./A.yaml", folder=folder)
    assert "A.yaml is one of the policies, and would be overwritten" in onto_itself.stderr
    twice = run(*build, "C.yaml", "-o", "twice.yaml", folder=folder)
    assert "C.yaml: is for the same machines as A.yaml: keep one of them" in twice.stderr
    assert (onto_itself.returncode, twice.returncode, (folder / "twice.yaml").exists()) == (2, 2, False)
    resolve = ("profile", "resolve", "cluster.yaml", "--json")
    answer = json.loads(run(*resolve, "--label", "nvidia.com/gpu.product=B", folder=folder).stdout)
    assert (answer["entry"], "nvidia.com/gpu.product" in str(answer["rejected"])) == (1, True)
    assert run(*resolve, folder=folder).returncode == 4


def test_every_command_has_help_and_stands_in_the_docs() -> None:
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    for name, command in cli.commands.items() or {n: cli.get_command(None, n) for n in cli.list_commands(None)}.items():  # type: ignore[arg-type]
        assert command is not None
        assert command.help
        assert f"`amptune {name}" in page, f"docs/commands.md lacks amptune {name}"


def test_a_second_tuner_on_the_same_study_is_refused(folder: Path) -> None:
    with locked(folder / "study", None):
        second = run(*TUNE, *FEW, "--study", "study", folder=folder, evaluator=Machine())
    assert second.returncode == 2
    assert "another amptune is tuning in study" in second.stderr
    assert run(*TUNE, *FEW, "--study", "study", folder=folder, evaluator=Machine()).returncode == 0


def claiming(folder: Path, speedup: float, *, labels: str = "{}") -> None:
    text = f"autocast: bf16\nbatch_size: 128\nvalid_for: {labels}\nevidence: {{speedup: {speedup}}}\n"
    (folder / "policy.yaml").write_text(f"schema: amptune.policy/1\n{text}")


VERIFY = ("verify", "policy.yaml", "train.py:small")


@pytest.mark.parametrize(
    ("claim", "noise", "code", "said"),
    [
        (1.05, 0.002, 0, "holds"),
        (1e9, 0.002, 1, "the claim does not hold"),
        (1.05, 0.3, 1, "could not tell: "),
    ],
)
def test_a_claim_is_measured_again(folder: Path, claim: float, noise: float, code: int, said: str) -> None:
    claiming(folder, claim)
    told = run(*VERIFY, "--budget", "10s", folder=folder, evaluator=Machine(noise=noise))
    assert (told.returncode, said in " ".join(told.stdout.split())) == (code, True), told.stderr
    answer = json.loads(run(*VERIFY, "--budget", "10s", "--json", folder=folder, evaluator=Machine(noise=noise)).stdout)
    assert answer["holds"] is (code == 0)
    assert answer["claimed"]["speedup"] == claim
    assert (answer["measured"]["speedup"] > 1.05) or code


def test_what_was_tuned_is_verified(folder: Path) -> None:
    run(*TUNE, *FEW, folder=folder, evaluator=Machine())
    assert run(*VERIFY, folder=folder, evaluator=Machine()).returncode == 0
    slower = run(*VERIFY, folder=folder, evaluator=Machine(true_ms=lambda _: 100.0))
    assert slower.returncode == 1
    assert "the claim does not hold" in slower.stdout


def test_a_claim_made_on_other_hardware_exits_with_4_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amptune.measure.workers.processes.start_importing", lambda _: None)
    monkeypatch.setattr("amptune.search.verification.WorkerEvaluator", None)
    claiming(folder, 2.0, labels='{nvidia.com/gpu.product: "NVIDIA-Nothing"}')
    done = run("verify", "policy.yaml", "train.py:endless", folder=folder)
    assert done.returncode == 4
    assert "NVIDIA-Nothing where it was tuned" in done.stderr


def test_the_baseline_may_be_a_preset() -> None:
    assert _baseline("transformers") == Policy(fused_optimizer=True)
    assert _baseline("apex:O2") == load("apex:O2").policy
    with pytest.raises(click.BadParameter, match="is not stock, amp-fp16, amp-bf16, transformers or a policy file"):
        _baseline("missing.yaml")


LONG = ("verify", "amp-bf16", "train.py:small", "--numerics", "--steps", "40", "--seeds", "3")


def test_a_policy_that_trains_like_fp32_is_verified_with_its_curves(folder: Path) -> None:
    with measuring_here(f"{folder}/train.py:small") as here:
        done = run(*LONG, folder=folder, evaluator=here)
        told = run(*LONG, "--json", folder=folder, evaluator=here)
    assert done.returncode == told.returncode == 0, done.stderr
    assert "trains like FP32, over 40 steps and 3 seeds" in " ".join(done.stdout.split())
    assert "the curves are in .amptune/train.py-small/curves.jsonl" in done.stdout
    answer = json.loads(told.stdout)
    assert answer["schema"] == "amptune.verify-numerics/1"
    assert (answer["holds"], answer["answer"], answer["seeds"]) == (True, "met", 3)
    assert len((folder / answer["curves"]).read_text().splitlines()) == 6


def steady(policy: Policy, steps: int, seed: int) -> LossCurve:
    return LossCurve(losses=((2.0 if policy.autocast == "bf16" else 1.0) + seed / 100,) * steps)


def test_a_policy_that_does_not_train_like_fp32_exits_with_1_and_an_interrupted_look_with_130(folder: Path) -> None:
    def interrupted(policy: Policy, steps: int, seed: int) -> LossCurve:
        if seed == 1:
            raise KeyboardInterrupt
        return steady(policy, steps, seed)

    done = run(*LONG, folder=folder, evaluator=Machine(curve=steady))
    assert (done.returncode, "does not train like FP32: loss in " in done.stdout) == (1, True)
    done = run(*LONG, folder=folder, evaluator=Machine(curve=interrupted))
    assert done.returncode == 130
    assert "could not tell: an answer needs 3 seeds (trained: 1); it was interrupted" in " ".join(done.stdout.split())
    assert len((folder / ".amptune/train.py-small/curves.jsonl").read_text().splitlines()) == 2
    alone = run("verify", "amp-bf16", "train.py:small", "--steps", "40", folder=folder, evaluator=Machine())
    assert (alone.returncode, "--steps: is for --numerics only" in alone.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["policy", "profile", "space"])
def test_a_schema_is_printed_as_json(folder: Path, kind: str) -> None:
    assert json.loads(run("schema", kind, folder=folder).stdout)["type"] == "object"
