"""Every Protocol of the system: read this file and you know how the parts meet.

    Task -> AgentLoop(LLM) -> Episode -> Reward -> TransferQueue -> Plan -> TrainEngine -> CheckpointEngine -> RolloutEngine

Adapters stand side by side in their rooms and implement these structurally; they never import each other, and only
`assemble` knows their names. Each port has a fake in its room and a contract suite in tests/contracts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar

from tandem.calls import Collect, Dispatch, register
from tandem.data_proto import DataProto
from tandem.types import (
    BatchRef,
    Chunk,
    Episode,
    GenerateRequest,
    GroupKey,
    Json,
    Key,
    LossRef,
    Message,
    Metrics,
    PolicyRef,
    RewardResult,
    Sample,
    SamplingParams,
    Stop,
    Task,
)
from tandem.weights import Held, OpenedWeights, Room, SentWeights, WeightBlock, WeightLayout, WeightPart, WeightPiece, WeightShard

Place = Literal["device", "host"]
"""On the host nothing is computed or sampled; optimiser state, weights (unless another engine reads them) and caches leave the
device, if that is not the CPU. `place` gives the bytes that lie on the device then, by what they are; none where it is the CPU.
"""

# ----------------------------------------------------------------------------------------------------- weights


class WeightSource(Protocol):
    """What a rollout engine loads from. shared: the engine already reads this storage, so nothing has to move.

    blocks: which numbers will come, or come changed. shards: once; a piece is there until the next one is asked for. A source may
    write whole blocks to where `room` says instead, and gives no pieces of these. Both may wait for another process, and block;
    RunError for what did not come as it was sent.
    """

    @property
    def shared(self) -> bool: ...
    @property
    def blocks(self) -> Sequence[WeightBlock]: ...
    def shards(self, room: Room = ...) -> Iterator[WeightPiece]: ...


# ----------------------------------------------------------------------------------------------------- engines


class TrainEngine(Protocol):
    """Holds a model and its optimiser. Calls block; a batch is whole rows with the columns that the call reads.

    Every call reads token columns `tokens`, `mask` and the row column `temperature` (float32 [B], 0 counts as 1).
    """

    def forward(self, batch: DataProto, want: frozenset[str], *, top: int = 0) -> DataProto:
        """No gradient. Returns the same rows (keys, lengths) with the wanted token columns only.

        want, of a policy: "logprobs" (float32 [N], of each masked token given those before it in its row, 0 elsewhere),
        "entropy" and "sum_pi_squared" (likewise, of the distribution it was drawn from), "top_ids" and "top_logprobs" (int64
        and float32 [N, top], the likeliest tokens at each masked place, likeliest first). Of one with an adapter also
        "base_logprobs" (float32 [N], those with the adapter switched off). Of a value model: "values" (float32 [N], of the
        state in which each masked token was chosen). Raises ColumnError for anything that the engine cannot give.
        """
        ...

    def forward_backward(self, batch: DataProto, loss: LossRef) -> tuple[Metrics, DataProto]:
        """Adds the gradient of sum_t loss_weights[t] * loss[t] to the accumulated one, in micro-batches.

        batch has `loss_weights` (float32 [N], aggregation and global denominators included: the engine never
        normalises) and what the named loss reads; with column `teacher_topk_ids` (int64 [N, K]) the loss is given the
        logprobs of those tokens too. The second result holds `logprobs` (or `values`) of this pass.
        """
        ...

    def evaluate(self, batch: DataProto, loss: LossRef) -> Metrics:
        """The loss and metrics of `forward_backward` as `eval/...`; nothing changes. Raises NonFiniteError."""
        ...

    def step(self) -> Metrics:
        """Clips, refuses a non-finite gradient (counted; NonFiniteError past the limit), updates, clears gradients."""
        ...

    def reset_optimizer(self) -> None:
        """The optimiser forgets what it measured; weights and count of updates stay. EngineError while a gradient is pending."""
        ...

    def layout(self) -> WeightLayout: ...
    def weight_shards(self) -> Iterator[WeightShard]: ...
    def place(self, where: Place, *, weights: bool = True) -> Mapping[str, int]: ...  # EngineError while a gradient is pending

    def save(self, path: Path) -> None:
        """Everything that `load` needs to go on bit for bit, as files in the directory `path`."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """A copy of all that `save` writes, to be written later in any thread: by each rank that holds the model, in one order."""
        ...

    def load(self, path: Path) -> None: ...

    def load_weights(self, path: Path) -> None:
        """The weights of a Hugging Face directory, and an optimiser that begins anew; counts stay. Raises ModelError, and nothing
        has changed then, where the directory holds another model; EngineError while a gradient is pending.
        """
        ...


class RolloutEngine(Protocol):
    """Token in, token out.

    capabilities: "batch_invariant" (a sample does not depend on its companions), "exact" (logprobs equal the trainer's
    bit for bit), "keep_kv", "media", "lora": declared, and probed.
    """

    @property
    def policy(self) -> PolicyRef: ...
    @property
    def capabilities(self) -> frozenset[str]: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks in order, the last with `stop`; closing it ends the request. EngineError at once for what cannot be served."""
        ...

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        """New weights; caches of older policies are dropped; running requests go on under the new weights."""
        ...

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held: ...  # also while paused

    async def pause(self) -> None:
        """After this returns no token is sampled until `resume`; running requests keep their place."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, keys: Collection[Key]) -> None:
        """Ends these requests: each gives a last chunk with stop "abort", after the tokens it has. Unknown keys are fine."""
        ...

    async def place(self, where: Place) -> Mapping[str, int]: ...  # running requests keep their place
    async def close(self) -> None: ...


class CheckpointEngine(Protocol):
    """Moves weights from the ranks of a TrainEngine, which are those of a WorkerGroup of WeightWorkers, to RolloutEngines.

    admitted: the engines that may be sampled from, since they hold what was published last.
    """

    @property
    def admitted(self) -> Sequence[RolloutEngine]: ...

    async def connect(self, train: WorkerGroup, rollouts: Sequence[RolloutEngine]) -> None: ...

    async def publish(self, policy: PolicyRef) -> Metrics:
        """All admitted rollouts hold the trainer's weights as `policy` when this returns: where weights move, both ends agree on
        their wire hash and on a probe batch's logprobs before. Raises EngineError where none is admitted.
        """
        ...

    async def aclose(self) -> None: ...


# ------------------------------------------------------------------------------------------------------- queue


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who takes; a consumer that comes back after a crash has a higher incarnation, and its older leases are void."""

    name: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one consumer has until it acknowledges them or gives them back; lent: with columns that they lack."""

    id: int
    consumer: Consumer
    ref: BatchRef
    lent: bool = False


class TransferQueue(Protocol):
    """Rows are samples, columns are what stages add; a group is offered when all its places are filled or dropped.

    A place is one episode (`Key.place`) and may be filled by several rows in one `put`.
    """

    async def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        """Holds places, at admission, and gives the open ones: all, or once after a restore what is left. Waits for room."""
        ...

    async def put(self, rows: DataProto) -> None:
        """Fills reserved places, for good where rows outlive the process. Raises QueueError for one that is not open."""
        ...

    async def write(self, rows: DataProto) -> None:
        """Adds columns to rows that are there, joined by key."""
        ...

    async def take(
        self, consumer: Consumer, columns: frozenset[str], n: int, *, window: int = 0, lacking: frozenset[str] = frozenset()
    ) -> Lease:
        """Waits for `n` whole groups that have `columns`, oldest admission first, and leases them.

        window: how many incomplete groups older than a taken one may be passed over; 0 is strict admission order.
        lacking: lends groups, for a stage that writes these columns and gives the groups back with `release`: those that lack one
        of them in some row, as soon as there is one and at most `n`, whatever is incomplete before them.
        Rows of a lease are in key order. Raises StalledError when nothing moves for the queue's limit.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """The rows are not consumed and are offered again. Raises QueueError for a lease that is void."""
        ...

    async def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        """These columns of these rows, in the order of `keys`, which may be none: then the columns are there, and empty."""
        ...

    async def ack(self, lease: Lease) -> None:
        """The rows are consumed; provisional until the next commit. Raises QueueError for a lease that is void."""
        ...

    async def drop(self, places: Collection[Key], reason: str) -> None:
        """Frees places that will not be filled, or their rows; counted by reason. A group without rows disappears."""
        ...

    async def save(self, directory: Path) -> None:
        """Writes what `restore` needs: every row and place that is not acknowledged (a leased row counts as not)."""
        ...

    async def commit(self, snapshot: str) -> None:
        """The snapshot is durable: acknowledgements made before its `save` are final, their rows are let go."""
        ...

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        """To that `save` (None: the beginning); leases are void. Offered again is what it had not seen acknowledged, and what was
        put since and outlived the process, unless a later version than `policy` sampled it.
        """
        ...

    def metrics(self) -> Metrics:
        """Depth, bytes, policies and their age, in versions; drops by reason and seconds of waiting a call since the last time."""
        ...


# ------------------------------------------------------------------------------- agents, environments, rewards


class Renderer(Protocol):
    """Turns messages into tokens, only ever the new ones: tokens that exist are never made again from text."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """A whole conversation and the header of the assistant turn that follows."""
        ...

    def following(
        self, history: Sequence[Message], new: Sequence[Message], *, closed: bool, tools: Sequence[Mapping[str, Json]] = ()
    ) -> tuple[int, ...] | None:
        """The tokens between a sampled assistant turn (last of `history`) and the next: what closes it, then `new`,
        then the next header.

        closed: the turn's own tokens ended with a stop id, so that it is not written a second time. None where the
        template does not extend its rendering of `history`: the sample branches there.
        """
        ...

    def demonstration(self, messages: Sequence[Message], *, given: int = 0) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """A conversation to imitate: tokens, and a mask that is true on assistant turns with the stop id that ends them.

        given: so many messages at the beginning are no part of what is imitated, whoever wrote them.
        """
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """For people and rewards; special tokens left out."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant turn as an agent sees it."""

    message: Message
    stop: Stop


class LLM(Protocol):
    """What an agent sees; it records tokens while it talks. One per episode."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Json]] = (), params: SamplingParams | None = None
    ) -> Reply:
        """The next assistant turn of this conversation, within what is left of the sample's token budget."""
        ...

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        """Raw continuation of `tokens`, recorded as a sample of its own."""
        ...

    def samples(self) -> tuple[Sample, ...]:
        """What was recorded: one sample, and one more for each branch."""
        ...


class AgentLoop(Protocol):
    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers: the messages that the agent sees next, and the reward of this step."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    done: bool = False
    truncated: bool = False


class Env(Protocol):
    """One episode's world: single use, no reset. Sharing between episodes lives in whatever builds it."""

    async def start(self) -> tuple[Message, ...]: ...
    async def step(self, action: Message) -> StepResult: ...
    async def close(self) -> None: ...


class Reward(Protocol):
    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        """One result an episode, in order; a judgement that could not be made is a failed result, never a 0."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandboxed program: seconds; bytes of memory, of output or one file, of all files; processes at once."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    files_bytes: int = 64 << 20
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sandboxed program ended; `limit` names the limit that ended it."""

    exit_code: int | None
    stdout: str
    stderr: str
    limit: Literal["cpu", "wall", "memory", "output"] | None = None


class Sandbox(Protocol):
    async def run(self, program: Sequence[str], files: Mapping[str, str], limits: Limits) -> Outcome:
        """Runs `program` (argv) in a fresh directory that holds `files`; nothing of it survives the call."""
        ...


# -------------------------------------------------------------------------------------------- single controller


P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class WorkerGroup(Protocol):
    """The ranks of one role. Results are of mergeable types: DataProto, BatchRef, Metrics, None."""

    @property
    def size(self) -> int: ...

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """`await group.call(TrainWorker.update, ref)`: dispatched and collected as the method is registered."""
        ...

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The same arguments to every rank; one result a rank, of any type."""
        ...


class WeightWorker(Protocol):
    """A worker with one rank of a TrainEngine, to those that move its weights.

    open_weights: it makes a sender with `outlet` (checkpoint.transport), unless another rank holds the same, and sends it.
    send_weights: the `number`th publish; delta: what changed since the one before, unless `whole` asks for everything.
    """

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def weights(self) -> WeightPart: ...
    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def open_weights(self, outlet: Callable[[int, Sequence[WeightBlock]], Any]) -> OpenedWeights | None: ...
    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def send_weights(self, number: int, delta: bool, whole: bool) -> SentWeights | None: ...
    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def logprobs(self, rows: DataProto) -> DataProto: ...  # as TrainEngine.forward gives them


class Runtime(Protocol):
    """Where workers live, for the length of an `async with`: groups are declared before, and built as it begins."""

    def group(
        self, role: str, pool: str, factory: str, *arguments: object, replicas: int = 1, collectives: bool = False
    ) -> WorkerGroup:
        """A worker for `role` on every rank of a pool, made there by `factory(rank, *arguments)`, "package.module:attr".

        replicas: how many neighbours share their rows. collectives: the ranks meet in a torch.distributed process group.
        """
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# ------------------------------------------------------------------------------------------------------ trainer


class Learner(Protocol):
    """The WorkerGroups of the roles that are trained behind one call."""

    async def update(self, batch: BatchRef, policy: PolicyRef) -> Metrics: ...  # policy: the one that is trained


class Source(Protocol):
    """Where batches come from: rollouts, or a dataset."""

    @property
    def policy(self) -> PolicyRef: ...

    def __aiter__(self) -> AsyncGenerator[BatchRef, None]:
        """Batches without end, each leased until `advance`. Closing the generator ends what runs behind it."""
        ...

    async def advance(self, policy: PolicyRef) -> Metrics:
        """The batch was trained on and made `policy`: acknowledges its lease; the next one's gate is that policy's."""
        ...

    def training(self) -> AbstractAsyncContextManager[None]:
        """Around plan and update: where engines share hardware it changes hands here."""
        ...

    def state(self) -> dict[str, Json]: ...
    def restore(self, state: Mapping[str, Json]) -> None: ...


class Tracker(Protocol):
    """Where metrics go. A NaN is recorded as what it is; what is logged twice for one step is recorded twice."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def state(self) -> dict[str, Json]:
        """Where the record stands, and it is durable up to there: what a snapshot keeps."""
        ...

    def restore(self, state: Mapping[str, Json]) -> None:
        """Forgets what was logged after that `state()`, before anything is logged here; {} is the very beginning."""
        ...

    def close(self) -> None: ...


class Dataset(Protocol):
    """Tasks by position. Reading position i twice gives the same task; the sampler in trainer/ decides the order."""

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...
