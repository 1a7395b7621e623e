"""`python -m core.engine.drive MODEL`: ranks driven as a node front drives them, for measurements.

Starts one rank process, or those of a plan, and speaks JSON, a line each way, on stdin and stdout;
torch stays in the ranks. The first line out says that they are ready. Then, for each line in, one
line out:

    {"op": "play", "requests": [{"at": 0.5, "prompt": [ids], "tokens": 64, "schema": "…"}, …]}
        → {"times": [[seconds of each token], …]}   both counted from the start of the play
    {"op": "encode", "text": "…"} → {"ids": […]}
    {"op": "memory"} → {"rss": bytes, "pool": bytes of it that are KV memory}
    {"op": "stats"} → {…}                           the rank's last gauges and counters

Answers are greedy and go on to their last token, or to the end of a document that fits their JSON
Schema. Ends with its stdin, and the ranks with it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec

from core.engine import drive_ranks
from core.engine.messages import (
    Abort,
    Command,
    EngineStats,
    RankConfig,
    RankMessage,
    Ready,
    Run,
    SequenceFailed,
    SequenceSpec,
    Stepped,
)
from core.engine.plan import SequenceId
from core.errors import ConfigError, InternalError, RequestError
from core.parallel import Plan
from core.text.model import TextModel, load_text
from core.types import BLOCK_TOKENS, GenerateRequest, ModelName, RequestId, ResponseFormat


class Arrival(msgspec.Struct, frozen=True):
    """`at`: seconds after the start of the play. `schema`: JSON text; "" leaves the answer free."""

    at: float
    prompt: tuple[int, ...]
    tokens: int
    schema: str = ""


class Play(msgspec.Struct, frozen=True, tag="play", tag_field="op"):
    requests: tuple[Arrival, ...]


class Encode(msgspec.Struct, frozen=True, tag="encode", tag_field="op"):
    text: str


class Memory(msgspec.Struct, frozen=True, tag="memory", tag_field="op"):
    pass


class Stats(msgspec.Struct, frozen=True, tag="stats", tag_field="op"):
    pass


Order = Play | Encode | Memory | Stats


class Driver:
    """Owns the rank processes and speaks to the one that schedules. `ready` is what that one said
    when it came up.

    Raises ConfigError when the rank does not come up, InternalError when it goes or refuses.
    """

    def __init__(self, config: RankConfig) -> None:
        self._stats: EngineStats | None = None
        self._plays = 0
        self._source = Path(config.source)
        self._ranks = drive_ranks.start(config)
        self._leader = self._ranks[0]
        try:
            self.loaded = drive_ranks.wait_until_ready(self._ranks)
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> Ready:
        return self.loaded.ready[0]

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @property
    def pid(self) -> int:
        return self._leader.pid

    def play(self, requests: Sequence[Arrival]) -> list[list[float]]:
        """Times of each request's tokens."""
        self._plays += 1
        names = [SequenceId(f"{self._plays}.{n}") for n in range(len(requests))]
        times: dict[SequenceId, list[float]] = {name: [] for name in names}
        specs = [self._spec(request) for request in requests]
        coming = sorted(range(len(requests)), key=lambda n: requests[n].at, reverse=True)
        running: set[SequenceId] = set()
        began = time.perf_counter()
        try:
            while coming or running:
                now = time.perf_counter() - began
                due: list[Command] = []
                while coming and requests[coming[-1]].at <= now:
                    index = coming.pop()
                    running.add(names[index])
                    due.append(Run(names[index], specs[index]))
                self._leader.send(*due)
                pause = requests[coming[-1]].at - now if coming else None
                for message in self._leader.receive(pause):
                    running -= _note(message, times, time.perf_counter() - began)
                    if isinstance(message, Stepped):
                        self._stats = message.stats
        except BaseException:
            with suppress(OSError):  # a rank that has gone has nothing left to abort
                self._leader.send(*(Abort(name) for name in running))
            raise
        return [times[name] for name in names]

    def encode(self, text: str) -> list[int]:
        return self._text.encode_prompt(text)

    @cached_property
    def _text(self) -> TextModel:
        return load_text(self._source)

    def _spec(self, arrival: Arrival) -> SequenceSpec:
        spec = _greedy(arrival)
        if not arrival.schema:
            return spec
        request = GenerateRequest(
            id=RequestId("drive"),
            model=ModelName("drive"),
            seed=0,
            rendered_at=0,
            response_format=ResponseFormat(schema=arrival.schema),
        )
        return msgspec.structs.replace(
            spec, grammar=self._text.grammar(request), stop_ids=self._text.end_ids
        )

    def memory(self) -> dict[str, int]:
        return resident(Path(f"/proc/{self.pid}/smaps").read_text(encoding="utf-8"))

    def stats(self) -> EngineStats | None:
        return self._stats

    def close(self) -> None:
        """The ranks have ended when this returns."""
        drive_ranks.stop(self._ranks)


def _note(
    message: RankMessage, times: dict[SequenceId, list[float]], now: float
) -> set[SequenceId]:
    """Write down what `message` brought; the sequences that ended with it."""
    if isinstance(message, SequenceFailed) and message.sequence in times:
        raise InternalError(f"the rank refused a sequence: {message.message}")
    if not isinstance(message, Stepped):
        return set()
    ended = set()
    for output in message.outputs:
        if output.sequence in times:
            times[output.sequence] += [now] * len(output.token_ids)
            if output.finish is not None:
                ended.add(output.sequence)
    return ended


def _greedy(arrival: Arrival) -> SequenceSpec:
    return SequenceSpec(token_ids=arrival.prompt, max_tokens=arrival.tokens, temperature=0.0)


def resident(smaps: str) -> dict[str, int]:
    """Resident bytes out of /proc/PID/smaps, and those among them of anonymous shared memory."""
    total = pool = 0
    in_pool = False
    for line in smaps.splitlines():
        head, _, rest = line.partition(":")
        if " " in head:  # the first line of a mapping: addresses, rights, …, name
            in_pool = "/memfd:" in line
        elif head == "Rss":
            size = int(rest.split()[0]) * 1024
            total += size
            pool += size if in_pool else 0
    return {"rss": total, "pool": pool}


def answer(driver: Driver, order: Order) -> object:
    match order:
        case Play(requests):
            return {"times": driver.play(requests)}
        case Encode(text):
            return {"ids": driver.encode(text)}
        case Memory():
            return driver.memory()
        case Stats():
            return driver.stats()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file or a folder of safetensors")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--native", choices=("on", "off"), default="on")
    parser.add_argument("--speculation", choices=("on", "off"), default="on")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of layers")
    options = parser.parse_args(arguments)
    config = RankConfig(
        node="drive",
        socket_fd=-1,
        engine=options.engine,
        source=options.model,
        dtype=options.dtype,
        threads=options.threads,
        kv_blocks=-(-options.kv_tokens // BLOCK_TOKENS),
        max_step_tokens=options.step_tokens,
        native=options.native == "on",
        speculate=options.speculation == "on",
        plan=Plan(tp=options.tp, pp=options.pp),
    )
    decode = msgspec.json.Decoder(Order).decode
    began = time.perf_counter()
    try:
        driver = Driver(config)
        try:
            _say({
                "ready_s": time.perf_counter() - began,
                "pid": driver.pid,
                "pids": driver.pids,
                "vocab_size": driver.ready.vocab_size,
                "kv_bytes_per_token": driver.ready.geometry.bytes_per_token,
                "weights_s": driver.loaded.weights_s,
            })  # fmt: skip
            for line in sys.stdin.buffer:
                _say(answer(driver, decode(line)))
        finally:
            driver.close()
    except (ConfigError, RequestError, msgspec.MsgspecError) as error:
        _say({"error": str(error)})
        return 1
    return 0


def _say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
