"""A phase: one run of the loop with what it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.algos.columns import reads, unit_of
from tandem.algos.notes import NOTES
from tandem.algos.table import configure, learns_values
from tandem.assemble.engines import Engine, cache_bytes, check_engines, num_alone, publish_to
from tandem.assemble.model import Model, fits
from tandem.assemble.queues import Queue, check_queue, check_room, queue_of_process, rollout_queue
from tandem.assemble.roles import KINDS, Roles, base_stages, build_roles, check_roles
from tandem.assemble.rollout import Rollout
from tandem.assemble.tasks import Form, build_dataset, notes
from tandem.assemble.workers import Job, Workers
from tandem.checkpoint.gathered import gather
from tandem.errors import ConfigError, PlanError
from tandem.models.decoder import Decoder
from tandem.models.values import ValueModel, value_model_on
from tandem.ports import CheckpointEngine, RolloutEngine, Source, WorkerGroup
from tandem.recipe import DatasetSection, Recipe
from tandem.rewards.model import ModelReward
from tandem.rollout.router import Router
from tandem.rollout.weights import load
from tandem.track.samples import SampleRecord
from tandem.train.config import TrainConfig
from tandem.trainer import stages
from tandem.trainer.credit import COLUMNS as CREDITED
from tandem.trainer.dataset import Comparisons, DatasetSource, Demonstrations
from tandem.trainer.heldout import HeldOutLoss
from tandem.trainer.kl_control import KLControls
from tandem.trainer.learner import LearnerConfig, MinibatchLearner
from tandem.trainer.lending import LendingSource
from tandem.trainer.plan import NOTHING, BatchStage, Plan, plan
from tandem.trainer.sampler import seed_of
from tandem.trainer.schedule import Schedule
from tandem.trainer.source import RolloutSource
from tandem.trainer.workers import ModelWorker, TrainWorker
from tandem.types import Algorithm, PolicyRef


@dataclass(frozen=True)
class Phase:
    """One run of the loop with what it works on.

    model: what it trains, with the text side; it is called the policy, even where it gives values, and its versions count the
    steps. roles: the models beside it. kl: its adaptive KL coefficients. heldout: the objective on held-out tasks, where it is
    one of a dataset and there are such tasks. ahead: the stages that the source runs as groups complete; plan: all others.
    notes: what a user should know of the data.
    """

    name: str
    steps: int
    model: Model
    algorithm: Algorithm
    source: RolloutSource | DatasetSource
    plan: Plan
    learner: MinibatchLearner
    policy: WorkerGroup
    roles: Roles
    kl: KLControls
    queue: Queue
    workers: Workers
    checkpoint: CheckpointEngine
    engines: tuple[RolloutEngine, ...]
    lender: Router | None = None
    heldout: HeldOutLoss | None = None
    ahead: Plan = NOTHING
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> Source:
        """What the loop takes from the source; trainers may be lent while it waits."""
        return self.source if self.lender is None else LendingSource(self.source, self.lender)

    @property
    def copies_policy(self) -> bool:
        """Whether something begins with the weights that the policy has when the phase begins."""
        return bool(self.roles.copies) or not self.workers.shared

    async def begin(self, initial: Path) -> None:
        """Gives every worker its weights; those of the policy as the phase begins are in `initial`, if something copies them."""
        if not self.workers.shared:
            await self.policy.call(TrainWorker.load_weights, initial)
        await self.roles.begin(initial)
        await self.checkpoint.connect(self.policy, self.engines)

    async def peaks(self) -> dict[str, list[int]]:
        """The most bytes that the process of each rank has held, by role; roles that share a process share the number."""
        groups = {"policy": self.policy, **{role.name: role.workers for role in self.roles.all}}
        return {name: await workers.call_each(ModelWorker.peak_memory) for name, workers in groups.items()}

    async def current(self) -> Model:
        """The model with the weights that the policy has now."""
        if not self.workers.shared:
            load(self.model.decoder, await gather(self.policy))
        return self.model


def from_dataset(recipe: Recipe) -> bool:
    """Whether the main phase learns from a dataset's responses and not from what the policy samples."""
    chosen = algorithm(recipe)
    sampled = (RolloutSource.columns - Demonstrations.columns) | {"old_logprobs"}
    return chosen.advantage is None and not reads(chosen) & sampled


def first_trained(recipe: Recipe) -> type[Decoder]:
    """What the first phase trains: a value model where the objective of a dataset is one of values, and nothing comes before it."""
    return ValueModel if recipe.warmup is None and from_dataset(recipe) and learns_values(algorithm(recipe)) else Decoder


def algorithm(recipe: Recipe) -> Algorithm:
    """Raises ConfigError for parameters that do not fit, and for what only a model beside the policy is trained for."""
    name = recipe.algorithm.name
    if role := next((role for role, kind in KINDS.items() if kind.objective == name), None):
        raise ConfigError(f"algorithm.name={name} is what {role} is trained for, and no policy. {NOTES[name].choose}")
    return configure(recipe.algorithm.name, recipe.algorithm.params)


def check_recipe(recipe: Recipe) -> None:
    """Looks at values alone, without a model and data. Raises ConfigError with all that contradict each other."""
    problems: list[str] = []
    for check in (check_queue, _check_algorithm, _check_sampling, _check_lengths):
        try:
            check(recipe)
        except ConfigError as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_algorithm(recipe: Recipe) -> None:
    recipe.trainer.schedule.check_runnable(one_process=recipe.placement.name == "inline")
    chosen = algorithm(recipe)
    _check_batch(recipe, chosen)
    check_roles(recipe, chosen)


def _check_sampling(recipe: Recipe) -> None:
    check_engines(recipe)
    chosen = algorithm(recipe)
    if recipe.reward is None and recipe.reward_model is None and "rewards" in reads(chosen):
        raise ConfigError(
            f"algorithm {chosen.name} needs a reward: name one, e.g. reward.function=exact_match, reward.url=http://... or "
            f"reward_model.path=..."
        )
    if recipe.reward is not None and from_dataset(recipe) and learns_values(chosen):
        raise ConfigError(f"reward judges what a policy writes, and {chosen.name} trains a model of values: leave reward out")
    if recipe.model.library != "tandem" and (recipe.reward is not None or not from_dataset(recipe)):
        raise ConfigError(
            f"model.library={recipe.model.library}: the native engine generates with tandem's own decoder, so that such a model is "
            "trained on a dataset (sft, preferences, distillation), without a reward: choose such an algorithm and reward=null"
        )


def _check_lengths(recipe: Recipe) -> None:
    """That answers as long as the limits fit into the context, beside a prompt of one token, and the context into a new model."""
    context, new = recipe.engine.max_context, recipe.model.new
    if new is not None and context > new.max_positions:
        raise ConfigError(
            f"engine.max_context={context} is above the {new.max_positions} positions of the model: lower it, or raise "
            f"model.new.max_positions={new.max_positions}"
        )
    limits = {"sampling.max_tokens": recipe.sampling.max_tokens}
    if recipe.evaluation.max_tokens is not None and recipe.data.heldout is not None:
        limits["evaluation.max_tokens"] = recipe.evaluation.max_tokens
    name, most = max(limits.items(), key=lambda limit: limit[1])
    if most >= context and (not from_dataset(recipe) or (recipe.reward is not None and recipe.data.heldout is not None)):
        raise ConfigError(
            f"{name}={most} new tokens after a prompt are more than engine.max_context={context}, which is of both together: lower "
            f"{name}, or raise engine.max_context"
        )


def warmup_phase(recipe: Recipe, model: Model, directory: Path) -> Phase:
    """directory: of the phase's files."""
    warmup = recipe.warmup
    assert warmup is not None
    sft, num = configure("sft"), warmup.rows_per_step
    alone, pools = recipe, recipe.placement.pools
    if recipe.placement.name != "inline":
        pool = "policy" if "policy" in pools else "trainer"
        alone = replace(recipe, runtime=replace(recipe.placement, pools={pool: pools.get(pool, 1)}))
    return _dataset_phase(
        alone, model, directory, None, "warmup", warmup.data, None, sft, warmup.steps, num, warmup.train, LearnerConfig()
    )


def main_phase(recipe: Recipe, model: Model, rollout: Rollout | None, directory: Path) -> Phase:
    """rollout: what generates; None where nothing does. directory: of its files.

    The recipe is one that `check_recipe` has passed. Raises ConfigError for what its models do not fit.
    """
    if rollout is None or from_dataset(recipe):
        return _dataset_phase(
            recipe,
            model,
            directory,
            rollout.engine if rollout is not None else None,
            "train",
            recipe.data.train,
            recipe.data.heldout,
            algorithm(recipe),
            recipe.trainer.steps,
            recipe.rollout.groups_per_step * recipe.rollout.group_size,
            recipe.train,
            recipe.learner,
        )
    timing, chosen, spare = recipe.trainer.schedule, algorithm(recipe), recipe.rollout.spare_groups
    timing.check_correction(chosen)
    if spare and timing.mode != "sync":
        raise ConfigError(
            f"rollout.spare_groups={spare} is of trainer.mode=sync; in {timing.mode} generation is ahead anyway, and "
            f"trainer.window lets a step leave its slowest groups to a later one"
        )
    in_flight = timing.in_flight(recipe.rollout.groups_per_step) + spare
    check_room(recipe, in_flight, "rollout.groups_per_step, rollout.spare_groups and trainer.staleness")
    queue = rollout_queue(recipe, directory)
    alone, turns = num_alone(recipe), timing.placement == "colocated"
    workers = Workers(recipe.placement, queue, directory / "logs", alone, turns=turns)
    roles = build_roles(recipe, model, chosen, workers, _updates(recipe.trainer.steps, recipe.learner))
    if roles.warmup_steps >= recipe.trainer.steps:
        raise ConfigError(
            f"warmup_steps={roles.warmup_steps} of the models beside it would leave the policy none of the "
            f"trainer.steps={recipe.trainer.steps} to be trained in; lower one or raise the other"
        )
    updates = _updates(recipe.trainer.steps - roles.warmup_steps, recipe.learner)
    on_policy = workers.shared and _on_policy(recipe, model, timing, chosen)
    by_pass = not on_policy and _has_pass(chosen)
    job = Job("policy", recipe.train.over(updates), chosen, against=None if by_pass else "rollout_logprobs")
    policy = workers.group(model.decoder, job)
    engines, checkpoint = publish_to(recipe, model, rollout.engine, workers, directory / "logs")
    workers.check()
    of_policy = [stages.on_policy(queue)] if on_policy else _policy_stages(chosen, policy, queue)
    derived = stages.derived(chosen, queue, seed=seed_of(recipe.seed, "derived"))
    resample = stages.resample(chosen, queue, seed=seed_of(recipe.seed, "resample"))
    kl = KLControls(chosen)
    credit = (stages.advantages(chosen, queue),) if chosen.advantage is not None else ()
    base = base_stages(recipe, chosen, policy)
    known = (*credit, *of_policy, resample, *derived, *kl.stages(queue), *base, *roles.stages)
    planned = _planned(chosen.needs | roles.needs, RolloutSource.columns, known, chosen)
    ahead, rest = (NOTHING, planned) if workers.shared else planned.split()  # in one process nothing would overlap
    dataset = build_dataset(recipe.data.train, "train", seed_of(recipe.seed, "tasks"), model.renderer)
    source = RolloutSource(
        dataset=dataset,
        agent=rollout.agent,
        reward=rollout.reward if roles.judge is None else ModelReward(roles.judge.workers),
        make_llm=rollout.make_llm,
        params=recipe.sampling,
        queue=queue,
        engines=(rollout.engine,),
        algorithm=chosen,
        schedule=timing,
        config=recipe.rollout,
        seed=recipe.seed,
        policy=PolicyRef(),
        reads=planned.reads,
        record=lambda episode: SampleRecord.of(episode).line(),
        ahead=ahead,
        tells=CREDITED & (planned.gives | planned.reads),
        components=_components(recipe, chosen, planned),
        watch=workers.lost,
        trainers=roles.trained(policy) if workers.shared else {},
        shuffled=recipe.data.train.shuffled,
    )
    return Phase(
        name="train",
        steps=recipe.trainer.steps,
        model=model,
        algorithm=chosen,
        source=source,
        ahead=ahead,
        plan=rest,
        learner=MinibatchLearner(roles.learners(policy, chosen), recipe.learner, seed=recipe.seed),
        policy=policy,
        roles=roles,
        kl=kl,
        queue=queue,
        workers=workers,
        checkpoint=checkpoint,
        engines=engines,
        lender=rollout.engine if isinstance(rollout.engine, Router) and recipe.rollout.lend else None,
        notes=notes(dataset),
    )


def _planned(needs: frozenset[str], have: frozenset[str], stages: Sequence[BatchStage], chosen: Algorithm) -> Plan:
    try:
        return plan(needs, have, stages)
    except PlanError as problem:
        raise ConfigError(f"algorithm {chosen.name} cannot be trained with yet: {problem}") from problem


def _on_policy(recipe: Recipe, model: Model, timing: Schedule, chosen: Algorithm) -> bool:
    """Whether the update's old_logprobs are known: what sampled has the weights of its only step, and the same bits by law 5.

    The trainer must be the model that the probe has looked at, in this process.
    """
    exact = model.probed is not None and model.probed.exact
    one_step = recipe.learner.epochs * recipe.learner.minibatches == 1
    for_them_alone = _has_pass(chosen) and "sum_pi_squared" not in reads(chosen)
    fresh = timing.worst_age == 0 and not recipe.rollout.spare_groups
    return exact and fresh and one_step and for_them_alone


def _has_pass(chosen: Algorithm) -> bool:
    """Whether the policy gives its logprobs before the update: these, else the update's, are measured against the sampler's."""
    return not chosen.params.get("bypass") and not reads(chosen).isdisjoint({"old_logprobs", "sum_pi_squared"})


def _policy_stages(chosen: Algorithm, workers: WorkerGroup, queue: Queue) -> list[BatchStage]:
    """What the policy gives before its update, in one pass; with bypass the sampler's logprobs stand for its own."""
    outputs = {"old_logprobs": "logprobs"}
    if "sum_pi_squared" in reads(chosen):
        outputs["sum_pi_squared"] = "sum_pi_squared"
    if not chosen.params.get("bypass"):
        return [stages.model_outputs("old_logprobs", workers, outputs, "current", against="rollout_logprobs")]
    del outputs["old_logprobs"]
    own = [stages.model_outputs("policy", workers, outputs, "current")] if outputs else []
    return [stages.bypass(queue), *own]


def _check_batch(recipe: Recipe, chosen: Algorithm) -> None:
    groups, size = recipe.rollout.groups_per_step, recipe.rollout.group_size
    if from_dataset(recipe):
        groups, size = groups * size, 1
    if size < chosen.min_episodes:
        raise ConfigError(f"rollout.group_size={size} is below the {chosen.min_episodes} episodes that {chosen.name} compares")
    if 0 < recipe.rollout.enough_episodes < chosen.min_episodes:
        raise ConfigError(
            f"rollout.enough_episodes={recipe.rollout.enough_episodes} is below the {chosen.min_episodes} episodes that "
            f"{chosen.name} compares"
        )
    if groups < recipe.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={recipe.learner.minibatches} is above the {groups} groups of a step, which are not split; "
            f"lower it or raise rollout.groups_per_step"
        )


def _components(recipe: Recipe, chosen: Algorithm, planned: Plan) -> tuple[str, ...]:
    """The declared parts of a reward. Raises ConfigError where the recipe and the algorithm do not agree on rewards."""
    judge, weights = recipe.reward if recipe.reward_model is None else None, chosen.params.get("reward_weights")
    names = judge.promised if judge is not None else ()
    if "reward_components" in planned.reads:
        if not names:
            raise ConfigError(
                f"algorithm {chosen.name} credits the parts of a reward one by one: name them, e.g. "
                f"reward.components=[correct,format], and return RewardResult(value, {{'correct': ..., 'format': ...}}); "
                f"or give reward.parts"
            )
        if isinstance(weights, list) and len(weights) != len(names):
            raise ConfigError(f"algorithm.reward_weights={weights} must have one entry for each of reward.components={list(names)}")
    shaping = recipe.rollout.shaping
    if shaping.on and "rewards" not in planned.reads:
        raise ConfigError(f"rollout.shaping changes column rewards, which {chosen.name} does not read: leave it out")
    if shaping.overlong_buffer_tokens > recipe.sampling.max_tokens:
        raise ConfigError(
            f"rollout.shaping.overlong_buffer_tokens={shaping.overlong_buffer_tokens} is above "
            f"sampling.max_tokens={recipe.sampling.max_tokens}, of which it is a part"
        )
    return names


def _updates(steps: int, learner: LearnerConfig) -> int:
    return steps * learner.epochs * learner.minibatches


def _dataset_phase(
    recipe: Recipe,
    model: Model,
    directory: Path,
    engine: Engine | None,
    name: str,
    data: DatasetSection,
    heldout: DatasetSection | None,
    chosen: Algorithm,
    steps: int,
    tasks_per_step: int,
    config: TrainConfig,
    learner: LearnerConfig,
) -> Phase:
    if learns_values(chosen):
        if recipe.lora is not None:
            raise ConfigError(f"lora adapts a policy, and {chosen.name} trains a model of values, with its head: leave lora out")
        if not isinstance(model.decoder, Decoder):
            raise ConfigError(f"{chosen.name} trains a model of values, which model.library={recipe.model.library} has not")
        model = replace(model, decoder=value_model_on(model.decoder))
    form: Form = "pairs" if "chosen" in chosen.needs else "demonstrations"
    maker = (Comparisons if form == "pairs" else Demonstrations)(model.renderer, recipe.engine.max_context)
    check_room(recipe, tasks_per_step, "warmup.rows_per_step" if name == "warmup" else "rollout.groups_per_step and group_size")
    queue = queue_of_process(recipe)
    workers = Workers(recipe.placement, queue, directory / "logs", num_alone(recipe) if engine is not None else 0, turns=True)
    dataset = build_dataset(data, "train", seed_of(recipe.seed, "demonstrations"), model.renderer, form)
    source = DatasetSource(
        dataset=dataset,
        maker=maker,
        queue=queue,
        tasks_per_step=tasks_per_step,
        seed=recipe.seed,
        policy=PolicyRef(),
        shuffled=data.shuffled,
    )
    policy = workers.group(model.decoder, Job("policy", config.over(_updates(steps, learner)), chosen))
    engines, checkpoint = publish_to(recipe, model, engine, workers, directory / "logs")
    roles = build_roles(recipe, model, chosen, workers, _updates(steps, learner))
    workers.check()
    known = (*base_stages(recipe, chosen, policy), *roles.stages)
    planned = _planned(chosen.needs | roles.needs, source.columns, known, chosen)
    measured, tasks = None, None
    if heldout is not None:
        tasks = build_dataset(heldout, "heldout", seed_of(recipe.seed, "heldout"), model.renderer, form)
        num = min(len(tasks), recipe.evaluation.tasks)
        if any(maker.fits(tasks[i]) for i in range(num)):
            measured = HeldOutLoss(
                dataset=tasks, maker=maker, tasks=num, queue=queue, plan=planned, workers=policy, unit=unit_of(chosen)
            )
    return Phase(
        name=name,
        steps=steps,
        model=model,
        algorithm=chosen,
        source=source,
        plan=planned,
        learner=MinibatchLearner(roles.learners(policy, chosen), learner, seed=recipe.seed),
        policy=policy,
        roles=roles,
        kl=KLControls(chosen),
        queue=queue,
        workers=workers,
        checkpoint=checkpoint,
        engines=engines,
        heldout=measured,
        notes=notes(dataset, tasks),
    )


def memory(recipe: Recipe, phase: Phase) -> dict[str, int]:
    """Bytes of what lasts from step to step; activations of one micro-batch and a snapshot's copy come on top."""
    decoder = phase.model.decoder
    weights, trained = (4 * count for count in phase.model.sizes)
    beside = [(role, role.model.num_parameters * 4) for role in phase.roles.all]
    return {
        "weights": weights,
        "gradients": trained,
        "AdamW moments": 2 * trained,
        **{role.name: size * (1 if role.objective is None else 4) for role, size in beside},  # with gradients and moments
        **({"weights of rollout engines": alone * weights} if (alone := num_alone(recipe)) and phase.engines else {}),
        "rollout KV cache": cache_bytes(recipe, decoder) if isinstance(decoder, Decoder) and phase.engines else 0,
    }


def copies_snapshots(recipe: Recipe, phase: Phase) -> bool:
    """Whether there is room for a copy of what a snapshot saves, which is written while the run goes on."""
    if recipe.placement.name == "ray":  # whose workers have memory of other machines
        return True
    roles = {role.name: role.model.num_parameters * (4 if role.objective is None else 12) for role in phase.roles.saved}
    copy = 12 * phase.model.sizes[1] + sum(roles.values())  # weights and moments in float32
    return fits({**memory(recipe, phase), "copy": copy})
