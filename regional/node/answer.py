"""What the choices of one request have written so far: token ids in, event frames out. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import SequenceSpec, TokenOutput
from core.engine.plan import Scores
from core.errors import RequestError, to_fault
from core.events import Delta, Done, Finish, TokenLogprob, ToolCallDelta, encode_frame
from core.types import FinishReason, GenerateRequest, Timings, Usage


class Written(Protocol):
    """What a writer gives out for a push: see core.text."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> FinishReason | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]: ...


class Writer(Protocol):
    """Detokeniser and stop strings of one choice."""

    def push(
        self,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        scores: Sequence[Scores] = (),
    ) -> Written: ...


class Pieces(Protocol):
    """What a reader of calls lets out."""

    @property
    def text(self) -> str: ...
    @property
    def calls(self) -> tuple[ToolCallDelta, ...]: ...


class Calls(Protocol):
    """Reads the calls of one choice out of its text: see core.text.tools. `calls`: how many so
    far."""

    @property
    def calls(self) -> int: ...

    def push(self, text: str, *, last: bool = False) -> Pieces: ...


class Text(Protocol):
    """The part of a text model that a front needs."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def writer(
        self, stops: tuple[str, ...], end_ids: frozenset[int], *, min_tokens: int = 0
    ) -> Writer: ...

    def calls(self, request: GenerateRequest, choice: int) -> Calls | None: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the hand-off brought: prompt tokens that the prefill node computed, time, bytes."""

    computed_tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """What attempts took that were preempted. `prompt_read`: whole, so `computed_tokens`, the
    prompt tokens that were computed for it, is final. `read_tokens`: how far into the prompt they
    came, what was cached included."""

    prompt_read: bool = False
    computed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0
    kv_bytes: int = 0
    read_tokens: int = 0

    def computed_with(self, computed: int, read: int) -> int:
        """Prompt tokens that somebody computed, each counted once, after one more attempt that
        computed the last `computed` of the first `read`: what it found cached may be what those
        before it had computed, and what it computed may be what they had found cached."""
        if self.prompt_read:
            return self.computed_tokens
        read_before = max(self.read_tokens, self.computed_tokens)
        cached_before, cached = read_before - self.computed_tokens, read - computed
        further = max(0, read - max(cached, read_before))
        return self.computed_tokens + further + max(0, min(cached_before, read) - cached)


@dataclass(frozen=True, slots=True)
class Left:
    """Where an answer of one choice stands that goes on elsewhere; see core.types.ResumePoint."""

    token_ids: tuple[int, ...]
    chars_sent: int
    spent: Spent


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames of one step of one choice. `cut`: a stop string ended it while the rank goes on.
    `last`: all choices have ended."""

    frames: bytes
    delta: bool
    cut: bool
    last: bool


class _Choice:
    """One choice: its writer, and what of a continued one the client has already."""

    def __init__(self, request: GenerateRequest, spec: SequenceSpec, text: Text) -> None:
        self.tokens = 0
        self.ended = False
        self.token_ids = [*spec.output_ids]
        self.chars_sent = 0
        """Of the text as the model wrote it, calls and all."""
        self._index = spec.choice
        wanted = request.sampling
        self._writer = text.writer(wanted.stop, spec.stop_ids, min_tokens=wanted.min_tokens)
        self._calls = text.calls(request, spec.choice) if request.tools else None
        self.reason: FinishReason | None = None
        """Why it ended, once it has."""
        self._carry = ""
        self._skip = 0
        self.ended_before: FinishReason | None = None
        """What it was continued with is a whole answer already."""
        if spec.output_ids:  # a continued answer: its text up to here is known to the client
            self._skip = sum(p.chars_sent for p in request.resume if p.choice == spec.choice)
            self.chars_sent = self._skip
            written = self._writer.push(spec.output_ids, None)
            self._carry = written.text
            self.tokens, self.ended_before = written.tokens, written.finish

    def absorb(self, output: TokenOutput) -> bytes:
        """Delta and Finish, as far as there are any."""
        if self.ended_before is not None:
            return self.close(self.ended_before)
        written = self._writer.push(output.token_ids, output.finish, output.scores)
        text, calls = self._unsent(written.text, last=written.finish is not None)
        self.tokens = written.tokens
        self.token_ids += written.token_ids
        frames = b""
        if text or calls or written.token_ids or written.logprobs:
            frames = encode_frame(
                Delta(
                    choice=self._index,
                    token_ids=written.token_ids,
                    text=text,
                    logprobs=written.logprobs,
                    tool_calls=calls,
                )
            )
        return frames if written.finish is None else frames + self._finish(written.finish)

    def close(self, reason: FinishReason) -> bytes:
        """The end, after what the client has not yet got of an answer that was whole before."""
        text, calls = self._unsent("", last=True)
        rest = b""
        if text or calls:
            rest = encode_frame(Delta(choice=self._index, text=text, tool_calls=calls))
        return rest + self._finish(reason)

    def _finish(self, reason: FinishReason) -> bytes:
        self.ended = True
        if reason is FinishReason.STOP and self._calls is not None and self._calls.calls:
            reason = FinishReason.TOOL_CALLS
        self.reason = reason
        return encode_frame(Finish(choice=self._index, reason=reason))

    def _unsent(self, text: str, *, last: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What goes out after `text` was written, its calls apart: nothing that the client has."""
        text, self._carry = self._carry + text, ""
        known, text = text[: self._skip], text[self._skip :]
        self._skip -= len(known)
        self.chars_sent += len(text)
        if self._calls is None:
            return text, ()
        self._calls.push(known)
        pieces = self._calls.push(text, last=last)
        return pieces.text, pieces.calls


class Answer:
    """All choices of one request; `specs` has one sequence for each. `placed_at` is when this node
    heard of the request."""

    def __init__(
        self,
        request: GenerateRequest,
        specs: Sequence[SequenceSpec],
        text: Text,
        *,
        placed_at: float,
        spent: Spent = Spent(),
    ) -> None:
        self.transfer = Transfer()
        self.queued_s = 0.0
        self.delta_sent = False
        self._prompt = len(specs[0].token_ids)
        self._choices = [_Choice(request, spec, text) for spec in specs]
        self._placed_at = placed_at
        self._spent = spent
        self._first_at: float | None = None
        self._computed_here = 0
        self._read_here = 0

    def whole(self, *, now: float) -> Chunk | None:
        """The answer's end, when all choices were whole before anything was generated here."""
        reasons = [one.ended_before for one in self._choices]
        frames = b""
        for one, reason in zip(self._choices, reasons, strict=True):
            if reason is None:
                return None
            frames += one.close(reason)
        frames += encode_frame(self._done(now))
        return Chunk(frames=frames, delta=True, cut=False, last=True)

    def absorb(self, choice: int, output: TokenOutput, *, now: float) -> Chunk:
        """The frames that `output` of that choice makes."""
        if output.computed_tokens is not None and choice == 0:
            # the others find the prompt in the cache: it is counted once
            self._computed_here = output.computed_tokens
        if self._first_at is None:
            self._first_at, self._read_here = now, self._prompt
        one = self._choices[choice]
        frames = one.absorb(output)
        delta = bool(frames)
        self.delta_sent = self.delta_sent or delta
        last = all(each.ended for each in self._choices)
        if last:
            frames += encode_frame(self._done(now))
        return Chunk(
            frames=frames,
            delta=delta,
            cut=one.ended and output.finish is None,
            last=last,
        )

    def left(self, *, now: float, computed_tokens: int = 0, read_tokens: int = 0) -> Left:
        """Where the only choice stands. `computed_tokens` is what the rank computed of the prompt,
        and `read_tokens` how far it came, for a sequence without any output here."""
        (choice,) = self._choices
        if self._first_at is None:
            # A hand-off brings all but the prompt's last token, which whoever goes on computes.
            handed = self.transfer.computed_tokens > 0
            self._computed_here = max(computed_tokens, int(handed))
            self._read_here = self._prompt if handed else max(read_tokens, computed_tokens)
        timings = self._timings(now)
        spent = Spent(
            prompt_read=self._spent.prompt_read or self._first_at is not None,
            computed_tokens=self._computed,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            transfer_s=timings.transfer_s,
            kv_bytes=timings.kv_bytes,
            read_tokens=max(self._read_here, self._spent.read_tokens),
        )
        return Left(tuple(choice.token_ids), choice.chars_sent, spent)

    def standing(self, now: float) -> Done:
        """What has been used so far, as if it ended now."""
        return self._done(now)

    @property
    def first_s(self) -> float | None:
        """From its arrival here to its first token."""
        return None if self._first_at is None else self._first_at - self._placed_at

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the choices ended that have."""
        return tuple(one.reason.value for one in self._choices if one.reason is not None)

    def fault(self, error: RequestError) -> bytes:
        """The frame that ends the stream irregularly."""
        return encode_frame(to_fault(error))

    @property
    def _computed(self) -> int:
        """Prompt tokens that somebody computed for this request, each once."""
        here = self.transfer.computed_tokens + self._computed_here
        return self._spent.computed_with(here, max(self._read_here, here))

    def _done(self, now: float) -> Done:
        return Done(
            usage=Usage(
                prompt_tokens=self._prompt,
                completion_tokens=sum(one.tokens for one in self._choices),
                cached_tokens=max(0, self._prompt - self._computed),
            ),
            timings=self._timings(now),
        )

    def _timings(self, now: float) -> Timings:
        """Of all attempts together: what an answer waits for while it is read anew is decode."""
        spent = self._spent
        first_at = now if self._first_at is None else self._first_at
        if spent.prompt_read:
            first_at = self._placed_at
        return Timings(
            queue_s=self.queued_s,
            prefill_s=spent.prefill_s + first_at - self._placed_at,
            decode_s=spent.decode_s + now - first_at,
            transfer_s=spent.transfer_s + self.transfer.seconds,
            kv_bytes=spent.kv_bytes + self.transfer.bytes,
        )
