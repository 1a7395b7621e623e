from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("join", "heartbeat", "reserved", "failed", "prefill_done", "step_output", "cache_events", "leaving", "preempted", "pulling", "sent", "purged")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PULLING_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: Heartbeat
    reserved: Reserved
    failed: Failed
    prefill_done: PrefillDone
    step_output: StepOutput
    cache_events: CacheEvents
    leaving: Leaving
    preempted: Preempted
    pulling: Pulling
    sent: Sent
    purged: Purged
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., step_output: _Optional[_Union[StepOutput, _Mapping]] = ..., cache_events: _Optional[_Union[CacheEvents, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., pulling: _Optional[_Union[Pulling, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., purged: _Optional[_Union[Purged, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("wire", "name", "epoch", "role", "secret", "release", "models", "max_sequences", "max_step_tokens", "pid", "pools", "plan", "ranks", "age_s", "scattered")
    WIRE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SCATTERED_FIELD_NUMBER: _ClassVar[int]
    wire: int
    name: str
    epoch: str
    role: str
    secret: str
    release: str
    models: _containers.RepeatedCompositeFieldContainer[ModelOffer]
    max_sequences: int
    max_step_tokens: int
    pid: int
    pools: int
    plan: str
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    age_s: float
    scattered: bool
    def __init__(self, wire: _Optional[int] = ..., name: _Optional[str] = ..., epoch: _Optional[str] = ..., role: _Optional[str] = ..., secret: _Optional[str] = ..., release: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelOffer, _Mapping]]] = ..., max_sequences: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., pid: _Optional[int] = ..., pools: _Optional[int] = ..., plan: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., age_s: _Optional[float] = ..., scattered: _Optional[bool] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "pid", "part")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    part: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., part: _Optional[str] = ...) -> None: ...

class ModelOffer(_message.Message):
    __slots__ = ("name", "fingerprint", "context", "kv_bytes_per_token", "blocks", "prefill_tokens_per_s", "decode_tokens_per_s", "tier_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    context: int
    kv_bytes_per_token: int
    blocks: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tier_blocks: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., context: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., tier_blocks: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "running", "waiting", "blocks_used", "blocks_cached", "prefill_backlog_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "generated_tokens", "computed_prompt_tokens", "cached_prompt_tokens", "preemptions", "kv_bytes_sent", "kv_bytes_received", "draining", "drafted_tokens", "accepted_tokens", "rank_bytes_sent", "rank_bytes_least", "pipeline_bubble", "stage_seconds", "kv_bytes_per_s", "others", "tier_bytes_per_s", "tiers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    RANK_BYTES_LEAST_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_BUBBLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    prefill_backlog_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    generated_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    draining: bool
    drafted_tokens: int
    accepted_tokens: int
    rank_bytes_sent: int
    rank_bytes_least: int
    pipeline_bubble: float
    stage_seconds: _containers.RepeatedScalarFieldContainer[float]
    kv_bytes_per_s: float
    others: _containers.RepeatedCompositeFieldContainer[PoolWork]
    tier_bytes_per_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    def __init__(self, sequence: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., prefill_backlog_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., draining: _Optional[bool] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., rank_bytes_sent: _Optional[int] = ..., rank_bytes_least: _Optional[int] = ..., pipeline_bubble: _Optional[float] = ..., stage_seconds: _Optional[_Iterable[float]] = ..., kv_bytes_per_s: _Optional[float] = ..., others: _Optional[_Iterable[_Union[PoolWork, _Mapping]]] = ..., tier_bytes_per_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("kind", "off", "blocks", "places", "written", "loaded", "evicted", "refused", "damaged", "foreign", "failed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    off: str
    blocks: int
    places: int
    written: int
    loaded: int
    evicted: int
    refused: int
    damaged: int
    foreign: int
    failed: int
    def __init__(self, kind: _Optional[str] = ..., off: _Optional[str] = ..., blocks: _Optional[int] = ..., places: _Optional[int] = ..., written: _Optional[int] = ..., loaded: _Optional[int] = ..., evicted: _Optional[int] = ..., refused: _Optional[int] = ..., damaged: _Optional[int] = ..., foreign: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class PoolWork(_message.Message):
    __slots__ = ("prefills", "prefill_tokens", "sequences", "answer_tokens")
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefills: int
    prefill_tokens: int
    sequences: int
    answer_tokens: int
    def __init__(self, prefills: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., answer_tokens: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("attempt_id", "ticket", "cached_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    ticket: Ticket
    cached_tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "generation", "lease_s", "endpoints")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    generation: int
    lease_s: float
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, id: _Optional[str] = ..., generation: _Optional[int] = ..., lease_s: _Optional[float] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("rank", "address", "group", "first_layer", "layers", "first_head", "heads", "dtype", "block_bytes", "blocks", "offers")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    group: int
    first_layer: int
    layers: int
    first_head: int
    heads: int
    dtype: str
    block_bytes: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., group: _Optional[int] = ..., first_layer: _Optional[int] = ..., layers: _Optional[int] = ..., first_head: _Optional[int] = ..., heads: _Optional[int] = ..., dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("kind", "address", "host")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: str
    host: str
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class Pulling(_message.Message):
    __slots__ = ("attempt_id", "ticket", "cached_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    ticket: Ticket
    cached_tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("attempt_id", "tokens", "lacking_tokens", "kv_bytes", "seconds")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LACKING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    tokens: int
    lacking_tokens: int
    kv_bytes: int
    seconds: float
    def __init__(self, attempt_id: _Optional[str] = ..., tokens: _Optional[int] = ..., lacking_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("attempt_id", "computed_tokens", "cached_tokens", "kv_bytes", "seconds")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    computed_tokens: int
    cached_tokens: int
    kv_bytes: int
    seconds: float
    def __init__(self, attempt_id: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("attempt_id", "stage", "code", "message", "retryable")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    stage: str
    code: str
    message: str
    retryable: bool
    def __init__(self, attempt_id: _Optional[str] = ..., stage: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("attempt_id", "token_ids", "chars_sent", "spent")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHARS_SENT_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    chars_sent: int
    spent: Spent
    def __init__(self, attempt_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., chars_sent: _Optional[int] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ...) -> None: ...

class Spent(_message.Message):
    __slots__ = ("prompt_read", "computed_tokens", "prefill_s", "decode_s", "transfer_s", "kv_bytes", "read_tokens")
    PROMPT_READ_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_read: bool
    computed_tokens: int
    prefill_s: float
    decode_s: float
    transfer_s: float
    kv_bytes: int
    read_tokens: int
    def __init__(self, prompt_read: _Optional[bool] = ..., computed_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., read_tokens: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("attempt_id", "frames", "delta", "last")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    frames: bytes
    delta: bool
    last: bool
    def __init__(self, attempt_id: _Optional[str] = ..., frames: _Optional[bytes] = ..., delta: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "stored", "evicted", "pool", "tier")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    stored: bytes
    evicted: bytes
    pool: int
    tier: int
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., evicted: _Optional[bytes] = ..., pool: _Optional[int] = ..., tier: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Purged(_message.Message):
    __slots__ = ("id", "error", "requests", "cached_blocks", "scrubbed_blocks", "host_blocks", "disk_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    error: str
    requests: int
    cached_blocks: int
    scrubbed_blocks: int
    host_blocks: int
    disk_blocks: int
    def __init__(self, id: _Optional[str] = ..., error: _Optional[str] = ..., requests: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., scrubbed_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("welcome", "rejected", "reserve", "prefill", "start", "abort", "drain", "recount", "send", "proceed", "purge")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RECOUNT_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    PROCEED_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    rejected: Rejected
    reserve: Reserve
    prefill: Prefill
    start: Start
    abort: Abort
    drain: Drain
    recount: Recount
    send: Send
    proceed: Proceed
    purge: Purge
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., recount: _Optional[_Union[Recount, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., proceed: _Optional[_Union[Proceed, _Mapping]] = ..., purge: _Optional[_Union[Purge, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("wire", "heartbeat_s")
    WIRE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    wire: int
    heartbeat_s: float
    def __init__(self, wire: _Optional[int] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("request", "token_ids", "deadline_s", "move_min_tokens", "spent", "compute_tokens", "answer_tokens", "sequences", "pull_tokens", "pull_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PULL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    move_min_tokens: int
    spent: Spent
    compute_tokens: int
    answer_tokens: int
    sequences: int
    pull_tokens: int
    pull_s: float
    def __init__(self, request: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ..., move_min_tokens: _Optional[int] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ..., compute_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., pull_tokens: _Optional[int] = ..., pull_s: _Optional[float] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("attempt_id", "work", "pool")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    work: Work
    pool: int
    def __init__(self, attempt_id: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., pool: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("attempt_id", "work", "ticket", "pool")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    work: Work
    ticket: Ticket
    pool: int
    def __init__(self, attempt_id: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., pool: _Optional[int] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("attempt_id", "work", "ticket", "pool", "tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    work: Work
    ticket: Ticket
    pool: int
    tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., pool: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Proceed(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("attempt_id", "work", "queued_s", "pool")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    work: Work
    queued_s: float
    pool: int
    def __init__(self, attempt_id: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., queued_s: _Optional[float] = ..., pool: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt_id", "reason")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    reason: str
    def __init__(self, attempt_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Recount(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Purge(_message.Message):
    __slots__ = ("id", "namespace")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace: str
    def __init__(self, id: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...
