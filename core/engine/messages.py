"""What a node front and its rank say to each other, over a socket pair, framed by core.framing.

Commands are asynchronous; every sequence ends with a `Stepped` finish or `GivenBack`, a
`SequenceFailed` or the front's own `Abort`. The rank reports at most one `Stepped` per engine step.

Life of a sequence in the rank::

    Run      cached prefix + rest of the prompt here → tokens → finish
    Reserve  → Reserved; the front fills the blocks from a peer; Begin → tokens → finish
    Prefill  → Stepped.progress … (blocks stay locked while the front sends them) → Release

Blocks without a sequence that is computed: `lending_messages`.
A whole namespace: `purge_messages`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from core.engine.lending_messages import Adopt, Held, Hold, Import
from core.engine.pending import MOST_AHEAD
from core.engine.plan import Scores, SequenceId
from core.engine.purge_messages import Purge, Purged, Scrubbed
from core.errors import ConfigError
from core.framing import FrameDecoder
from core.kv.geometry import KVGeometry
from core.log import Form
from core.parallel import Plan
from core.types import FinishReason


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence, resolved: no defaults left to decide. `output_ids` are tokens that were generated
    before (a continued request); they count against `max_tokens`."""

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    namespace: str = ""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Union of the model's end tokens (unless ignored) and the caller's stop_token_ids."""
    priority: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """No token of `stop_ids` is sampled before so many output tokens."""
    logprobs: int | None = None
    """Each output token is reported with so many of the best candidates' log probabilities."""
    grammar: str = ""
    """What every output token must fit (core.text.grammar); "" for anything. The model's end tokens
    are among `stop_ids` then."""
    move_min_tokens: int = 0
    """Where the sequence loses its blocks to others and so many tokens or more would have to be
    computed again, it is given back instead (`GivenBack`); 0: never."""
    keep_blocks: bool = False
    """Its blocks stay as they are when it is given back, until Release: they are copied first."""
    deadline_s: float | None = None
    """Time left: past it the sequence fails with deadline_exceeded, wherever it stands, unless a
    peer is filling or reading its blocks just then."""


# ------------------------------------------------------------------ front → rank


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    sequence: SequenceId
    spec: SequenceSpec


class Reserve(msgspec.Struct, frozen=True, tag="reserve", tag_field="kind"):
    """Set aside blocks for the first n−1 prompt tokens; answered by Reserved or SequenceFailed."""

    sequence: SequenceId
    spec: SequenceSpec


class Begin(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """A reserved sequence's missing blocks are filled and verified: generate.

    `kv_in_place` False: nothing usable came; keep the blocks and compute the prompt here.
    """

    sequence: SequenceId
    kv_in_place: bool = True


class Prefill(msgspec.Struct, frozen=True, tag="prefill", tag_field="kind"):
    """Compute the KV of the first n−1 tokens and keep its blocks locked until Release."""

    sequence: SequenceId
    spec: SequenceSpec


class Release(msgspec.Struct, frozen=True, tag="release", tag_field="kind"):
    """The blocks of a prefill or a hold have been sent, or nobody wants them."""

    sequence: SequenceId


class Abort(msgspec.Struct, frozen=True, tag="abort", tag_field="kind"):
    """Forget the sequence, free all of it. Idempotent; nothing more is said about it."""

    sequence: SequenceId


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", tag_field="kind"):
    """Exit with status 0 after the current step."""


Command = (
    Run | Reserve | Begin | Prefill | Release | Import | Adopt | Hold | Abort | Purge | Scrubbed
    | Shutdown
)  # fmt: skip


# ------------------------------------------------------------------ rank → front


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="kind"):
    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", tag_field="kind"):
    """The rank serves. The descriptor of the shared KV memory travels with this message."""

    fingerprint: bytes
    context: int
    vocab_size: int
    geometry: KVGeometry
    max_sequences: int
    max_step_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", tag_field="kind"):
    """The rank exits after this; `message` is for the operator."""

    message: str


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved", tag_field="kind"):
    """`fill[group]` maps the index of a missing prompt block to the pool block set aside for it.

    `cached_tokens` is a multiple of 16: what the node's own prefix cache holds of the n−1 tokens.
    """

    sequence: SequenceId
    cached_tokens: int
    fill: tuple[dict[int, int], ...]


class SequenceFailed(msgspec.Struct, frozen=True, tag="sequence_failed", tag_field="kind"):
    """The sequence is gone and its blocks are free. `code` is of core.errors."""

    sequence: SequenceId
    code: str
    message: str


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one sequence gained in a step.

    `token_ids` holds the ending token too when `finish` is STOP by a stop id. `computed_tokens`
    comes with a sequence's first output: prompt tokens that this rank computed for it (the last
    prompt token included, recomputation after preemption not).
    """

    sequence: SequenceId
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    computed_tokens: int | None = None
    scores: tuple[Scores, ...] = ()
    """One for each of `token_ids` where the spec asks for log probabilities."""


class PrefillProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill has KV for its first `ready_tokens`; `complete` when that is n−1.

    `blocks[group]` are the pool blocks of the whole prompt, in order.
    """

    sequence: SequenceId
    ready_tokens: int
    computed_tokens: int
    complete: bool
    blocks: tuple[tuple[int, ...], ...]


class GivenBack(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence lost its blocks and is to go on elsewhere: this rank has forgotten it. All that it
    generated has been reported. `computed_tokens` as in TokenOutput, for one that had no output;
    `read_tokens` is how far into its prompt it came, what was cached included.

    With `tokens` it has not quite: `blocks[group]` hold the KV of so many, whole blocks, until
    Release."""

    sequence: SequenceId
    computed_tokens: int
    read_tokens: int = 0
    tokens: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now, and counters since the start of the rank."""

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    prefill_backlog_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    generated_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    drafted_tokens: int = 0
    """Guesses that the model has checked."""
    accepted_tokens: int = 0
    """Of these, the ones that were right."""
    sent_bytes: int = 0
    """What the node's ranks have sent each other to compute, and the least that its plan needs."""
    least_bytes: int = 0
    stage_seconds: tuple[float, ...] = ()
    """How long each pipeline stage has computed."""
    pipeline_bubble: float = 0.0
    """The share of the stages' time in which they stood still although there was work."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped", tag_field="kind"):
    """The outcome of one step; also sent without outputs when stats or the cache changed.

    `stored` and `evicted` are block hashes of the prefix cache (group 0), in order of happening
    within the step: evictions first.
    """

    outputs: tuple[TokenOutput, ...] = ()
    given_back: tuple[GivenBack, ...] = ()
    """After the outputs."""
    progress: tuple[PrefillProgress, ...] = ()
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    stats: EngineStats


class Pulse(msgspec.Struct, frozen=True, tag="pulse", tag_field="kind"):
    """The rank lives. Sent when nothing else has been for PULSE_S, also while a step computes."""


PULSE_S = 2.0

Reply = Reserved | Held | Purged | SequenceFailed
RankMessage = Loading | Ready | LoadFailed | Reply | Stepped | Pulse


def command_decoder() -> FrameDecoder[Command]:
    return FrameDecoder[Command](Command)


def rank_message_decoder() -> FrameDecoder[RankMessage]:
    return FrameDecoder[RankMessage](RankMessage)


# ------------------------------------------------------------------ start of a rank

EXIT_PEER = 5
"""Exit status of a rank that ends because another one of its node has; it says nothing about it."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a rank process: JSON in the environment variable SKERRY_RANK.

    `source` is the resolved path of a GGUF file or a safetensors folder; for `engine` "scripted"
    it is where the tokenizer lies. `socket_fd` is the rank's end of the pair.
    """

    node: str
    rank: int = 0
    """Its number within the node, and so its place in `plan`."""
    plan: Plan = Plan()
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Where the ranks of a node find each other; 0 for a node of one rank."""
    master_fd: int = -1
    """The socket that listens there, given to rank 0 alone; -1: rank 0 binds it itself."""
    master_secret: str = ""
    """What ranks know each other by."""
    pulse_s: float = PULSE_S
    """A rank says something at least this often."""
    socket_fd: int
    engine: str = "torch"
    source: str
    context: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    local_rank: int = 0
    """Its number among the ranks of its host."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of each host, for its ranks in order; (): as many as there are, from the first.
    """
    threads: int = 1
    kv_blocks: int
    max_sequences: int = 64
    max_step_tokens: int = 512
    depth: Annotated[int, msgspec.Meta(ge=1, le=MOST_AHEAD)] = 1
    """Plans that may be with the runner at once. Two or more hide the time between steps, which is
    1 % of a step on a CPU, and cost a newcomer a step."""
    speculate: bool = True
    """Check guesses where that gives more tokens a second."""
    mixed_step_s: float = 0.12
    """Prompts are read in chunks that keep a step about this short while others decode; 0: chunks
    as large as they may be."""
    native: bool = True
    """Use compiled kernels where they are there; False: PyTorch alone."""
    scripted: ScriptedConfig | None = None
    log: Form = "text"

    @property
    def gpu(self) -> int:
        """The CUDA device of this rank, if it is to have one. Raises ConfigError."""
        if not self.gpus:
            return self.local_rank
        if self.local_rank >= len(self.gpus):
            raise ConfigError(
                f"rank {self.rank} is number {self.local_rank + 1} of its host, "
                f"and the node has been given {len(self.gpus)} CUDA devices there"
            )
        return self.gpus[self.local_rank]


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pace and the text of a runner without a model."""

    step_s: float = 0.0
    """Time that any step takes."""
    prefill_tokens_per_s: float = 0.0
    """0: as fast as it goes."""
    repeat: bool = False
    """Play the prompt back for ever instead of once."""
    scramble: bool = False
    """Pick ids of the prompt so that each depends on every token before it."""
    skip_ids: tuple[int, ...] = ()
    """Prompt ids that are not played back: control tokens of a chat template."""
    end_id: int = 0
    block_bytes: int = 4096
    """KV bytes a block, to make transfers as heavy as a real model's."""
    layers: int = 1
    kv_heads: int = 1
    """The shape of a block, for plans to split."""
    window: int = 0
    """With a number: a second KV group, which sees so many tokens."""
    window_blocks: int = 0
    """Blocks of that group's pool."""
