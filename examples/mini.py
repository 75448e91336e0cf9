"""The whole of GRPO on one page, made of Tandem's public parts: read it from `main` upwards.

    $ python examples/mini.py          # 40 steps, five seconds of one core
    step  1  reward 0.4909  length 8.297  entropy 2.616  largest gap 0
    ...
    step 40  reward 0.9922  length 12  entropy 2.174  largest gap 0

A small decoder with random weights writes up to twelve characters after a list of digits, and is rewarded by how much of
what it wrote is digits. Nothing is pretended: the decoder, the engine that samples, the estimator, the loss and the
optimiser are those of `tandem train`, and after any number of steps the weights are the same, bit for bit
(tests/e2e/test_mini.py). What is left out is what a run needs beside the algorithm: a queue, snapshots, evaluation,
failed rewards, dropped groups, workers elsewhere, other modes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence

import torch

from tandem.agents.single_turn import SingleTurn
from tandem.algos.advantages import group_baseline, spread
from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data.builtin import TaskSet
from tandem.data.tasks.sorting import Sorting
from tandem.data_proto import DataProto
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.ports import Dataset
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.session import Session
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.sampler import TaskOrder, seed_of
from tandem.types import Episode, Key, PolicyRef, SamplingParams, Task
from tandem.weights import Room, WeightShard, nowhere, whole_shards

SEED, TASKS, GROUPS, GROUP_SIZE = 0, 512, 8, 8
MAX_TOKENS, LR = 12, 3e-3


def digits(task: Task, group: Sequence[Episode]) -> list[float]:
    """The reward: one number an episode. A recipe names it `reward.function=examples/mini.py:digits`."""
    del task
    return [sum(letter.isdigit() for letter in episode.completion) / MAX_TOKENS for episode in group]


# --------------------------------------------------------------------------------------------------------- rollout


async def rollout(engine: NativeEngine, renderer: TemplateRenderer, tasks: Dataset, step: int) -> list[list[Episode]]:
    """GROUPS tasks, each answered GROUP_SIZE times, all at once: the engine batches whatever is asked of it.

    A key names an episode for good. What is sampled depends on seed, key and position, and on nothing that runs beside it.
    """
    order, agent = TaskOrder(len(tasks), seed_of(SEED, "train")), SingleTurn()
    params = SamplingParams(max_tokens=MAX_TOKENS)

    async def episode(ordinal: int, member: int) -> Episode:
        key = Key("train", ordinal, member)
        llm = Session(engine, renderer, key, params, seed=SEED, max_context=engine.config.max_context)
        return await agent(tasks[order.position(ordinal)], llm, key)

    async def group(ordinal: int) -> list[Episode]:
        return list(await asyncio.gather(*(episode(ordinal, member) for member in range(GROUP_SIZE))))

    return list(await asyncio.gather(*(group(step * GROUPS + i) for i in range(GROUPS))))


# -------------------------------------------------------------------------------------------------------- training


def update(trainer: TorchEngine, groups: Sequence[Sequence[Episode]], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """One optimiser step on these episodes. B rows one after the other, N tokens, no padding: `mask` says which were sampled.

    Advantage of an episode: (reward - mean of its group) / (std of its group + 1e-6), on each token that it sampled. Loss of a
    token: -min(r A, clip(r, 0.8, 1.2) A) with r = exp(logprob - old logprob). Loss of the step: the mean over a row's tokens,
    then over rows, which is what the weights say; whoever splits the batch may do so anywhere.
    """
    grpo = configure("grpo")
    rows = DataProto.from_samples([sample for group in groups for episode in group for sample in episode.samples])
    old = trainer.forward(rows, frozenset({"logprobs", "entropy"}))
    mask = rows["mask"]
    gap = (old["logprobs"] - rows["rollout_logprobs"])[mask].abs().max()  # 0: sampler and trainer agree bit for bit

    rewards_B = torch.tensor([value for group in rewards for value in group])
    groups_B = torch.arange(len(groups)).repeat_interleave(GROUP_SIZE)
    advantages_B = group_baseline(rewards_B, groups_B)
    batch = rows.with_columns(
        token={
            "old_logprobs": old["logprobs"],
            "advantages": spread(advantages_B, mask, rows.lengths),
            "loss_weights": loss_weights(mask, rows.lengths, aggregation="seq-mean-token-mean"),
        }
    )
    trainer.forward_backward(batch, loss_ref(grpo))  # micro-batches inside
    trainer.step()  # clips the gradient's norm, and refuses one that is not finite
    return {
        "reward": rewards_B.mean().item(),
        "length": mask.sum().item() / len(rows),
        "entropy": old["entropy"][mask].mean().item(),
        "largest gap": gap.item(),
    }


# ------------------------------------------------------------------------------------------------------ publishing


class Shared:
    """The trainer's parameters are the engine's: nothing moves, and what the cache holds of the old ones is dropped."""

    shared = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        return whole_shards(self._decoder)


# ------------------------------------------------------------------------------------------------------------ loop


async def train(steps: int) -> Decoder:
    tokenizer = character_tokenizer("".join(sorted(Sorting.characters)), template=PLAIN_TEMPLATE)
    renderer = TemplateRenderer(tokenizer)
    tasks = TaskSet(Sorting, "train", seed=seed_of(SEED, "tasks"), size=TASKS)
    shape = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=64,
    )
    decoder = init_decoder(shape, seed_of(SEED, "weights"), torch.float32)
    trainer = TorchEngine(decoder, TrainConfig(lr=LR))
    engine = NativeEngine(decoder, renderer.text, NativeConfig(slots=64, max_context=64), exact=True)
    policy = PolicyRef()
    for step in range(steps):
        groups = await rollout(engine, renderer, tasks, step)
        rewards = [digits(group[0].task, group) for group in groups]
        metrics = update(trainer, groups, rewards)
        policy = policy.next()
        await engine.load_weights(Shared(decoder), policy)
        print(f"step {step + 1:2}  " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    await engine.close()
    return decoder


def main() -> None:
    torch.set_num_threads(1)
    asyncio.run(train(int(sys.argv[1]) if len(sys.argv) > 1 else 40))


if __name__ == "__main__":
    main()
