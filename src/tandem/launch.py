"""A run from beginning to end: its directory, its phases, and what happens around the loop.

    runs/NAME/
      config.yaml      every value of the recipe
      metrics.jsonl    a line a step              samples.jsonl   every episode, trained on or dropped
      snapshots/       to resume from             journal.jsonl   judgements that depended on a clock
      tensorboard/     curve.png  summary.json    trace.json      what ran when; final/: a Hugging Face directory
      error.txt        why the run failed, if it did
      initial/         the policy as the main phase begins, where a worker begins as a copy of it
      logs/            what worker processes wrote, if there are any
      queue/           rows that outlive their process, with queue=durable
      warmup/          metrics, snapshots and TensorBoard of the warm-up, if there is one

Both phases are the same: restore the last good snapshot if there is one, run the loop, and leave a snapshot behind.
"""

from __future__ import annotations

import gc
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from tandem import device
from tandem.assemble.directory import Begun, changed_values, finished, open_directory, steps_done
from tandem.assemble.first_tasks import check_tasks
from tandem.assemble.interrupt import complete
from tandem.assemble.measuring import Measured, lines_of, measured, told
from tandem.assemble.model import Model, build_model, check_memory
from tandem.assemble.phases import (
    Phase,
    algorithm,
    check_recipe,
    copies_snapshots,
    first_trained,
    from_dataset,
    main_phase,
    memory,
    warmup_phase,
)
from tandem.assemble.restarts import Restarts
from tandem.assemble.roles import merged
from tandem.assemble.rollout import Rollout, open_rollout
from tandem.assemble.tasks import build_dataset, check_files, notes, overlaps, sections
from tandem.assemble.trackers import build_trackers, find_trackers
from tandem.checkpoint.journal import Journal
from tandem.checkpoint.snapshots import Part, Rest, SnapshotStore
from tandem.checkpoint.under_way import UnderWay
from tandem.config import Resolved
from tandem.errors import ConfigError
from tandem.faults import crash_point
from tandem.ports import Dataset, WorkerGroup
from tandem.recipe import DatasetSection, Recipe
from tandem.runtime.placement import RuntimeConfig
from tandem.track.console import Console
from tandem.track.curve import LearningCurve, draw_png
from tandem.track.jsonl import read_series
from tandem.track.report import final_report, shown
from tandem.track.samples import SampleLog, SampleRecord
from tandem.track.summary import Summary, write_summary
from tandem.trainer import loop
from tandem.trainer.heldout import HeldOutLoss
from tandem.trainer.sampler import seed_of
from tandem.trainer.source import RolloutSource
from tandem.trainer.workers import ModelWorker
from tandem.types import Json, Metrics, PolicyRef
from tandem.weights import whole_shards, wire_hash

_SOURCE = "source.json"
_UNTOLD = "nothing was measured: the recipe names no data.heldout, or neither a reward nor responses to judge a loss by"


def run(resolved: Resolved[Recipe], *, resume: bool, dry_run: bool, begun: Begun) -> None:
    """`tandem train`. Raises TandemError. begun: called when the run's directory is there; from then on it can be resumed."""
    recipe, console = resolved.value, Console()
    check_recipe(recipe)
    find_trackers(recipe.logs)
    check_files(*sections(recipe))
    if dry_run:
        for said in changed_values(recipe.run.directory, resolved) if resume else ():
            console.print(said, markup=False)
        complete(_dry_run(recipe, console), console)
        return
    if resume and (said := finished(resolved)):
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return
    complete(_supervised(resolved, resume, console, begun), console)


def check(resolved: Resolved[Recipe]) -> None:
    """`tandem config`. Raises ConfigError for values that contradict each other."""
    check_recipe(resolved.value)


def measure(resolved: Resolved[Recipe], model: Path | None) -> None:
    """`tandem eval`: the recipe's held-out tasks on its model, or on the one in the directory `model`."""
    recipe, console = resolved.value, Console()
    if model is not None:
        recipe = merged(recipe, algorithm(recipe), model)
    check_recipe(recipe)
    check_files(recipe.data.heldout)
    recipe = replace(recipe, rollout=replace(recipe.rollout, engines=1, lend=False))  # all is in this process
    complete(_measure(recipe, console), console)


async def _supervised(resolved: Resolved[Recipe], resume: bool, console: Console, begun: Begun) -> None:
    """The run, which goes on as a resumed one where a worker's process dies."""
    restarts = Restarts(resolved.value.trainer.restarts, console)
    while True:
        try:
            return await _run(resolved, resume, console, begun, restarts)
        except Exception:
            if not restarts.go_on():
                raise
        resume = True
        gc.collect()  # of what is built again there is one at a time


async def _run(resolved: Resolved[Recipe], resume: bool, console: Console, begun: Begun, restarts: Restarts) -> None:
    """Builds everything that a recipe can be wrong about before anything on the disk changes."""
    recipe, directory, began_s = resolved.value, resolved.value.run.directory, time.monotonic()
    async with AsyncExitStack() as stack:
        model, rollout, phases, heldout = await _built(recipe, stack)
        phase, initial, copies = phases[-1], directory / "initial", phases[-1].roles.copies
        if resume and copies and steps_done(recipe) and not initial.is_dir():
            raise ConfigError(
                f"{copies[0].name} would be a copy of the policy as the run began, and {initial} is not there: resume the run "
                f"with the algorithm.* that it had, or begin another one"
            )
        stack.enter_context(open_directory(directory, resolved, resume, console))
        begun()
        console.print(model.describe(), markup=False, highlight=False, soft_wrap=True)
        for said in (*(note for each in phases for note in each.notes), *notes(heldout)):
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        _warn_of_overlaps(phases, heldout, console)
        if not phase.workers.shared:
            console.print(phase.workers.describe(), markup=False, highlight=False)
        if not recipe.sampling.full_support and not from_dataset(recipe):
            console.print(
                "warning: top_p, top_k, min_p or temperature 0 cut what is sampled from, and logprobs are those of the whole "
                "distribution: the samples are off-policy (metric rollout/cut_support)",
                style="yellow",
            )
        if not from_dataset(recipe) and (about := recipe.trainer.schedule.warning(phase.algorithm)) is not None:
            console.print(f"warning: {about}", style="yellow")
        main = _PhaseRun(recipe, phase, directory, console, restarts, rollout, heldout, recipe.trainer.snapshot_every)
        if recipe.warmup is not None and main.store.latest() is None:
            warmup = _PhaseRun(recipe, phases[0], directory / "warmup", console, restarts, None, None, recipe.warmup.snapshot_every)
            await warmup.run(began_s)
        await main.run(began_s)
        _finish(recipe, main, directory, console)


async def _built(recipe: Recipe, stack: AsyncExitStack) -> tuple[Model, Rollout | None, list[Phase], Dataset | None]:
    """Everything that a recipe can be wrong about: the model, what generates, the phases in order, what it is measured on."""
    model, rollout = build_model(recipe, first_trained(recipe)), None
    if not from_dataset(recipe) or recipe.reward is not None:
        journal = stack.enter_context(closing(Journal(recipe.run.directory / "journal.jsonl")))
        rollout = await stack.enter_async_context(open_rollout(recipe, model, journal))
    phases = [await _main_phase(recipe, model, rollout)]
    heldout = await _heldout(recipe, model) if recipe.reward is not None else None
    if recipe.warmup is not None:
        phases.insert(0, warmup_phase(recipe, model, recipe.run.directory / "warmup"))
    return model, rollout, phases, heldout


async def _heldout(recipe: Recipe, model: Model) -> Dataset | None:
    if recipe.data.heldout is None:
        return None
    dataset = build_dataset(recipe.data.heldout, "heldout", seed_of(recipe.seed, "heldout"), model.renderer)
    longest = max(recipe.sampling.max_tokens, recipe.evaluation.max_tokens or 0)
    await check_tasks(dataset, recipe, model.renderer, judged=True, max_tokens=longest, most=recipe.evaluation.tasks)
    return dataset


def _warn_of_overlaps(phases: Sequence[Phase], heldout: Dataset | None, console: Console) -> None:
    sections = {"train": "data.train", "warmup": "warmup.data"}
    losses = [phase.heldout.dataset for phase in phases if phase.heldout is not None]
    measured = losses if heldout is None else [heldout]
    for said in overlaps({sections[phase.name]: phase.source.dataset for phase in phases}, measured):
        console.print(f"warning: {said}", style="yellow", markup=False, highlight=False, soft_wrap=True)


async def _main_phase(recipe: Recipe, model: Model, rollout: Rollout | None) -> Phase:
    """Raises DataError for tasks, and ConfigError for sizes, with which it would fail later."""
    phase = main_phase(recipe, model, rollout, recipe.run.directory)
    if recipe.placement.name != "ray":  # whose workers have memory of other machines
        check_memory(memory(recipe, phase))
    if isinstance(phase.source, RolloutSource):
        judged, longest = phase.roles.judge is None, recipe.sampling.max_tokens
        await check_tasks(phase.source.dataset, recipe, model.renderer, judged=judged, max_tokens=longest)
    return phase


# ------------------------------------------------------------------------------------------------------ one phase


@dataclass
class _PhaseRun:
    """A phase and what is done between its steps: the loop's Hooks. spent_s: wall time of earlier processes."""

    recipe: Recipe
    phase: Phase
    directory: Path
    console: Console
    restarts: Restarts
    rollout: Rollout | None
    heldout: Dataset | None
    snapshot_every: int
    spent_s: float = 0.0
    before: Mapping[str, float] = field(default_factory=dict[str, float])
    last: Measured | None = None
    peaks: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])

    def __post_init__(self) -> None:
        self.store = SnapshotStore(self.directory / "snapshots", self.recipe.snapshots, device.fingerprint())
        self.copied = copies_snapshots(self.recipe, self.phase)

    async def run(self, began_s: float) -> None:
        """Leaves the phase's model with the weights that it has at the end."""
        phase, initial = self.phase, (self.directory / "initial").resolve()
        if not self.copied:
            said = "this machine has no room for a copy of what is trained, so that the run waits while a snapshot is written"
            self.console.print(f"{phase.name}: {said}", markup=False, highlight=False, soft_wrap=True)
        self.began_s = began_s
        if phase.copies_policy and (self.store.latest() is None or not initial.is_dir()):
            phase.model.save(initial)
        self.restarts.watch(phase.name, self.store, phase.workers)
        async with phase.workers, aclosing(phase.checkpoint):
            await phase.begin(initial)
            try:
                await self._run()
            finally:
                await phase.queue.close()
            self.peaks = await phase.peaks()
            await phase.current()

    async def _run(self) -> None:
        phase = self.phase
        with (
            closing(build_trackers(self.recipe, phase, self.directory, self.console)) as self.trackers,
            closing(SampleLog(self.directory / "samples.jsonl")) as self.samples,
        ):
            await self._restore()
            if self.restarts.logged(phase.name):
                self.trackers.log(Metrics.sum({"run/restarts": 1}), phase.source.policy.version)
            if not self.before and self._measures:
                await phase.checkpoint.publish(phase.source.policy)  # before the loop does: engines elsewhere have no weights yet
                first = await self._evaluate(0)
                self.before = first.values
                for episode in first.result.episodes[:3] if first.result is not None else ():
                    self.console.print(shown(SampleRecord.of(episode), self.recipe.evaluation.solved), soft_wrap=True)
            async with UnderWay(self.store, self.recipe.placement.limit_s, self._warn) as self.snapshots:
                await loop.train(phase.batches, phase.plan, phase.learner, phase.checkpoint, self.trackers, self, steps=phase.steps)
            if self._measures and self.last is None:  # resumed after the last step, whose metrics are logged
                self.last = await self._measured()

    async def after_step(self, policy: PolicyRef, metrics: Metrics) -> None:
        del metrics  # they are logged already
        step, last = policy.version, policy.version == self.phase.steps
        self.restarts.reached(f"step of {self.phase.name}", step)
        self.snapshots.look()
        if isinstance(self.phase.source, RolloutSource):
            self.samples.write(self.phase.source.settled, step)
        if self.phase.roles.due(step):
            weights = (self.directory / "reset").resolve()
            (await self.phase.current()).save(weights)
            await self.phase.roles.reset(self.phase.policy, step, weights)
            shutil.rmtree(weights)
            self.trackers.log(Metrics.sum({"train/resets": 1}), step)
        score = None
        if self._measures and (last or _due(step, self.recipe.trainer.eval_every)):
            score = (await self._evaluate(step)).score
        if last or _due(step, self.snapshot_every):
            await self.snapshots.ended()
            await self._snapshot(step, score)

    # ------------------------------------------------------------------------------------------ resume

    async def _snapshot(self, step: int, score: float | None) -> None:
        state: dict[str, Json] = {
            "kl": self.phase.kl.state(),
            "trackers": self.trackers.state(),
            "samples": self.samples.state(),
            "before": dict(self.before),
            "spent_s": self._wall_s(),
            "restarts": self.restarts.total,
        }
        models = {"train": self.phase.policy, **{role.name: role.workers for role in self.phase.roles.saved}}
        parts = {name: _saving(workers, copied=self.copied) for name, workers in models.items()}
        finish = await self.store.begin(step, {**parts, "queue": self._save_queue}, state, score=score)
        self.snapshots.start(step, self._finish(finish, step))

    async def _finish(self, finish: Rest, step: int) -> None:
        """The snapshot counts, and what the queue had consumed before it is consumed for good."""
        await finish()
        self.restarts.reached(f"snapshot of {self.phase.name}", step)
        crash_point("commit.before")
        await self.phase.queue.commit(str(step))
        crash_point("commit.after")

    async def _save_queue(self, path: Path) -> None:
        """With the state of the source, which may go on filling the queue as soon as another task has its turn."""
        await self.phase.queue.save(path)
        (path / _SOURCE).write_text(json.dumps(self.phase.source.state()))

    async def _restore(self) -> None:
        snapshot = self.store.latest()
        if snapshot is None:
            if (self.directory / "metrics.jsonl").stat().st_size:
                self.console.print(f"{self.phase.name}: there is no snapshot yet, starting over", markup=False)
            self.trackers.restore({})
            self.samples.restore({})
            await self.phase.queue.restore("", None, self.phase.source.policy)
            return
        crash_point("restore.before")
        for warning in snapshot.warnings:
            self._warn(warning)
        state = cast("Mapping[str, Mapping[str, Json]]", snapshot.state)
        await self.phase.policy.call(ModelWorker.load, snapshot.part("train").resolve())
        for role in self.phase.roles.saved:
            await role.workers.call(ModelWorker.load, snapshot.part(role.name).resolve())
        crash_point("restore.models")
        self.phase.source.restore(json.loads((snapshot.part("queue") / _SOURCE).read_text()))
        await self.phase.queue.restore(str(snapshot.step), snapshot.part("queue"), self.phase.source.policy)
        self.phase.kl.restore(state["kl"])
        self.trackers.restore(state["trackers"])
        self.samples.restore(state["samples"])
        self.before = cast("Mapping[str, float]", state["before"])
        self.spent_s = cast("float", snapshot.state["spent_s"])
        self.restarts.total = max(self.restarts.total, cast("int", snapshot.state.get("restarts", 0)))
        crash_point("restore.after")
        self.console.print(f"{self.phase.name}: resuming from {snapshot.path}", markup=False)

    def _warn(self, what: str) -> None:
        self.console.print(f"warning: {what}", style="yellow", markup=False)

    def _wall_s(self) -> float:
        return self.spent_s + time.monotonic() - self.began_s

    # -------------------------------------------------------------------------------------- evaluation

    @property
    def _measures(self) -> bool:
        return self.heldout is not None or self.phase.heldout is not None

    async def _evaluate(self, step: int) -> Measured:
        self.last = await self._measured()
        self.trackers.log(self.last.metrics, step)
        return self.last

    async def _measured(self) -> Measured:
        phase = self.phase
        return await measured(self.recipe, phase.heldout, phase.source.policy, self.rollout, self.heldout)

    def summary(self) -> Summary:
        before, after = told(self.before, self.last.values if self.last is not None else {})
        facts: dict[str, Json] = {
            "seed": self.recipe.seed,
            "restarts": self.restarts.total,
            "weights": wire_hash(whole_shards(self.phase.model.decoder)),
            "peak_memory_bytes": device.peak_memory_bytes(),
            "peak_memory_bytes_by_role": {role: list[Json](peaks) for role, peaks in self.peaks.items()},
            "planned_memory_bytes": dict[str, Json](memory(self.recipe, self.phase)),
        }
        return Summary(before, after, self.phase.steps, self._wall_s(), facts)


def _saving(workers: WorkerGroup, *, copied: bool) -> Part:
    async def save(path: Path) -> Rest:
        await workers.call(ModelWorker.save, path, copied)
        return partial(workers.call, ModelWorker.saved)

    return lambda path: save(path.resolve())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ------------------------------------------------------------------------------------------------------ the end


def _finish(recipe: Recipe, main: _PhaseRun, directory: Path, console: Console) -> None:
    """final/, the curve, summary.json, which comes last since a run that has it is finished, and the report."""
    final = directory / "final"
    main.phase.model.save(final)
    summary = main.summary()
    places = {"model": final, "metrics": directory / "metrics.jsonl", "samples": directory / "samples.jsonl"}
    next_command = shlex.join(["tandem", "eval", str(directory)])
    _say_planned(memory(recipe, main.phase), console)
    elsewhere = {} if main.phase.workers.shared else {f"process of {role}": peaks for role, peaks in main.peaks.items()}
    for name, peaks in {"this process": [device.peak_memory_bytes()], **elsewhere}.items():
        for peak in peaks:
            _say_memory(f"measured, {name}", peak, console, "at most, with Python, torch and activations")
    if main.last is None:
        write_summary(directory / "summary.json", summary)
        console.print(_UNTOLD)
        for what, where in places.items():
            console.print(f"{what:<16} {where}", markup=False)
        return
    metrics = directory / "metrics.jsonl"
    losses = main.phase.heldout is not None
    trained, measured = ("train/loss", "loss") if losses else ("reward/mean", "pass@1")
    curve = LearningCurve(
        f"{recipe.run.name}: {main.phase.algorithm.name}, seed {recipe.seed}",
        read_series(metrics, trained),
        read_series(metrics, f"eval/{measured}"),
        before=summary.eval_before[measured],
        after=summary.eval_after[measured],
        of="losses" if losses else "rewards",
    )
    draw_png(curve, directory / "curve.png")
    write_summary(directory / "summary.json", summary)
    idle = read_series(metrics, "train/groups_without_advantage").values
    if idle and min(idle) == 1:
        console.print("warning: no group had an advantage in any step, so nothing was learned: look at the rewards", style="yellow")
    result = main.last.result
    samples = [SampleRecord.of(episode) for episode in result.episodes] if result is not None else []
    greedy = [SampleRecord.of(episode) for episode in result.greedy_episodes] if result is not None else []
    solved = recipe.evaluation.solved
    best = max((each.reward for each in (*samples, *greedy) if each.reward is not None), default=0.0)
    if 0 < best < solved:
        console.print(
            f"warning: no held-out answer passed: the best reward was {best:g}, and evaluation.solved={solved:g} is what counts as "
            f"passed: lower it if that answer was right",
            style="yellow",
        )
    places |= {"curve": directory / "curve.png"}
    final_report(console, summary, curve, samples, places, next_command, solved=solved)


def _say_planned(planned: Mapping[str, int], console: Console) -> None:
    _say_memory("estimated, together", sum(planned.values()), console, "what is held from step to step, by its sizes")


def _say_memory(name: str, size: int, console: Console, note: str = "") -> None:
    """A line of a table. size: in bytes."""
    told = f"memory   {name:<30} {size / 2**20:10,.1f} MiB"
    console.print(f"{told}  {note}" if note else told, markup=False, highlight=False, soft_wrap=True)


async def _measure(recipe: Recipe, console: Console) -> None:
    if recipe.data.heldout is None:
        raise ConfigError("there is nothing to evaluate on: give data.heldout a task or a path")
    model = build_model(recipe, first_trained(recipe))
    console.print(model.describe(), markup=False, highlight=False, soft_wrap=True)
    async with AsyncExitStack() as stack:
        loss = await _heldout_loss(recipe, recipe.data.heldout, model) if from_dataset(recipe) else None
        if loss is None and recipe.reward is None:
            raise ConfigError("there is nothing to measure by: name a reward, e.g. reward.function=exact_match")
        rollout = await stack.enter_async_context(open_rollout(recipe, model)) if recipe.reward is not None else None
        heldout = await _heldout(recipe, model) if rollout is not None else None
        found = await measured(recipe, loss, PolicyRef(), rollout, heldout)
    for line in lines_of(found.values):
        console.print(line)
    for episode in found.result.episodes[:3] if found.result is not None else ():
        console.print(shown(SampleRecord.of(episode), recipe.evaluation.solved), soft_wrap=True)


async def _heldout_loss(recipe: Recipe, heldout: DatasetSection, model: Model) -> HeldOutLoss | None:
    """What measures the objective of a dataset, without the data that it is trained on."""
    here = replace(recipe, data=replace(recipe.data, train=heldout), runtime=RuntimeConfig("inline"))
    phase, initial = main_phase(here, model, None, recipe.run.directory), recipe.run.directory / "initial"
    if (copied := phase.roles.copies) and not initial.is_dir():
        name = copied[0].name
        raise ConfigError(f"{name} is the policy as the run began, and there is no {initial}: give {name}.path its directory")
    await phase.roles.begin(initial)
    return phase.heldout


async def _dry_run(recipe: Recipe, console: Console) -> None:
    """Builds everything, prints the plan, and stops before the first step."""
    async with AsyncExitStack() as stack:
        model, _, phases, heldout = await _built(recipe, stack)
        console.print(model.describe(), markup=False, highlight=False, soft_wrap=True)
        _warn_of_overlaps(phases, heldout, console)
        for phase in phases:
            first = f"{phase.ahead}, as groups complete; " if phase.ahead.stages else ""
            steps = f"{phase.name:<8} {phase.steps} steps of {phase.algorithm.name}"
            console.print(f"{steps}: {first}{phase.plan} -> update", markup=False, soft_wrap=True)
            for role in phase.roles.all:
                console.print(f"model    {role.describe()}", markup=False, soft_wrap=True)
    planned = memory(recipe, phases[-1])
    for name, size in planned.items():
        _say_memory(name, size, console)
    _say_planned(planned, console)
    for line in phases[-1].workers.describe().splitlines():
        console.print(f"place    {line}", markup=False, highlight=False, soft_wrap=True)
    apart = "rewards in processes of their own; " if recipe.reward is not None and recipe.reward.apart else ""
    console.print(f"place    {apart}all else here, on the CPU, {recipe.run.threads} thread(s)", soft_wrap=True)
