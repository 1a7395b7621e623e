"""`python -m regional.node.scripted --topology FILE --state FOLDER --name NAME`: a node that has
neither ranks nor a front of its own, for rehearsals of a router.

It joins as the node of that name and says what a front says: a step's output of one token for each
sequence that decodes, at the model's `scripted.step_ms` or as fast as the router reads, until a
request has its `max_tokens`. Prompts are not read, texts not written; each answer's frames are the
same bytes, so that what is measured is the router.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import grpc
import msgspec

from core.config import Node, load
from core.events import Delta, Done, Finish, encode_frame
from core.types import BLOCK_TOKENS, WIRE_VERSION, FinishReason, GenerateRequest, Usage
from regional import rpc
from regional.pb import node_pb2 as pb

_TOKEN = encode_frame(Delta(token_ids=(4711,), text=" word"))
_request = msgspec.msgpack.Decoder(GenerateRequest)


class Playing:
    """One sequence and what it has still to say."""

    def __init__(self, attempt_id: str, prompt_tokens: int, tokens: int) -> None:
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=tokens)
        self.left = tokens
        said = pb.SequenceOutput(attempt_id=attempt_id, frames=_TOKEN, delta=True)
        ends = (Finish(reason=FinishReason.LENGTH), Done(usage=usage))
        over = pb.SequenceOutput(
            attempt_id=attempt_id,
            frames=_TOKEN + b"".join(map(encode_frame, ends)),
            delta=True,
            last=True,
        )
        self.step = pb.StepOutput(sequences=[said])
        self.end = pb.StepOutput(sequences=[over])


class Script:
    """Which sequences decode, and what a step of them says. A step that is like the one before is
    made of the same bytes."""

    def __init__(self) -> None:
        self._playing: dict[str, Playing] = {}
        self._some = asyncio.Event()
        self._step = b""

    def start(self, message: pb.Start) -> None:
        request = _request.decode(message.work.request)
        tokens = request.sampling.max_tokens or BLOCK_TOKENS
        prompt = len(message.work.token_ids)
        self._playing[message.attempt_id] = Playing(message.attempt_id, prompt, tokens)
        self._some.set()
        self._step = b""

    def abort(self, attempt_id: str) -> None:
        self._playing.pop(attempt_id, None)
        self._step = b""

    async def next(self) -> bytes:
        """A StepOutput, as it stands on the wire; waits until there is something to say."""
        while not self._playing:
            self._some.clear()
            await self._some.wait()
        ending = [name for name, one in self._playing.items() if one.left == 1]
        for one in self._playing.values():
            one.left -= 1
        if not self._step or ending:
            step = pb.StepOutput()
            for name, one in self._playing.items():
                step.MergeFrom(one.end if name in ending else one.step)
            self._step = pb.NodeMessage(step_output=step).SerializeToString()
        said = self._step
        for name in ending:
            self.abort(name)
        return said


def join(node: Node, secret: bytes) -> pb.NodeMessage:
    offer = pb.ModelOffer(
        name=node.model,
        fingerprint=b"scripted node",
        context=1 << 16,
        kv_bytes_per_token=1024,
        blocks=1 << 20,
        prefill_tokens_per_s=1e6,
        decode_tokens_per_s=1e3,
    )
    return pb.NodeMessage(
        join=pb.Join(
            wire=WIRE_VERSION,
            name=node.name,
            epoch=secrets.token_hex(8),
            role=node.role,
            secret=secret.decode(),
            models=[offer],
            max_sequences=node.max_sequences,
            max_step_tokens=node.max_step_tokens,
            pid=os.getpid(),
            age_s=3600.0,
        )
    )


async def play(address: str, node: Node, secret: bytes, step_s: float) -> None:
    """Until the router hangs up."""
    async with grpc.aio.insecure_channel(address, options=rpc.channel_options()) as channel:
        call = channel.stream_stream(
            rpc.SESSION_METHOD, response_deserializer=rpc.decode_router_message
        )()
        put = cast("Callable[[bytes], Awaitable[None]]", call.write)
        turn = asyncio.Lock()  # a call takes one write at a time

        async def write(message: bytes) -> None:
            async with turn:
                await put(message)

        await write(join(node, secret).SerializeToString())
        welcome = await call.read()
        if not isinstance(welcome, pb.RouterMessage) or not welcome.HasField("welcome"):
            raise ConnectionError(f"the router does not take it in: {welcome}")
        script = Script()
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(_hear(call, script))
            saying = [
                tasks.create_task(_say(write, script, step_s)),
                tasks.create_task(_beat(write, welcome.welcome.heartbeat_s)),
            ]
            await hearing
            for one in saying:
                one.cancel()


async def _hear(call: grpc.aio.StreamStreamCall[bytes, pb.RouterMessage], script: Script) -> None:
    while isinstance(message := await call.read(), pb.RouterMessage):
        match message.WhichOneof("body"):
            case "start":
                script.start(message.start)
            case "abort":
                script.abort(message.abort.attempt_id)


async def _say(write: Callable[[bytes], Awaitable[None]], script: Script, step_s: float) -> None:
    """A step that is late is not made up for."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        await write(await script.next())
        if step_s:
            due = max(due + step_s, loop.time())
            await asyncio.sleep(due - loop.time())


async def _beat(write: Callable[[bytes], Awaitable[None]], heartbeat_s: float) -> None:
    beat = pb.NodeMessage(heartbeat=pb.Heartbeat()).SerializeToString()
    while True:
        await asyncio.sleep(heartbeat_s)
        await write(beat)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    world = load(options.topology, state=options.state)
    region, node = world.topology.node(options.name)
    pace = world.topology.models[node.model].scripted
    step_s = pace.step_ms / 1000 if pace is not None else 0.0
    asyncio.run(play(region.grpc, node, world.secret("region"), step_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
