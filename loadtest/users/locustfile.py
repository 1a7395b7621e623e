"""For `locust -f loadtest/users/locustfile.py --host http://127.0.0.1:8787`: the mix of users.

Any OpenAI-compatible server will do; `--edges` names several. With `--trace` a public trace is
replayed instead, open loop. Times to the first token and per token, and what was within the
service level, stand in Locust's own statistics as rows of their own, by kind, edge and region. The
end of the run prints all of it as a table, adds that to the HTML report, and its exit code says
whether the service level was kept.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import gevent
import msgspec
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from loadtest.users import prompts, report
from loadtest.users.answers import Answer, Slo, lines, verdict
from loadtest.users.running import Failed, bases_of, url_of
from loadtest.users.shapes import SHAPES
from loadtest.users.stream import Asker

TURNS = 4
CONTEXT_WORDS = 900
"""A conversation that has grown beyond it starts anew."""
TOOL_ROUNDS = 3
"""Calls of a tool, at most, before an agent is to answer."""
BEGAN, BEGAN_AT = time.perf_counter(), time.time()

_collected: list[Answer] = []


@events.init_command_line_parser.add_listener
def _options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("skerry")
    group.add_argument("--model", default="default", help="as the server calls it")
    parser.add_argument("--key", default="", env_var="SKERRY_KEY", help="API key", is_secret=True)
    group.add_argument("--edges", default="", help="several base URLs, with commas; else --host")
    group.add_argument("--chat-worker", default="", help="URL of a chat Worker to be asked as well")
    group.add_argument("--shape", default="flat", choices=sorted(SHAPES))
    group.add_argument("--max-tokens", type=int, default=48)
    group.add_argument("--document-words", type=int, default=700)
    group.add_argument("--think", type=float, default=1.0, help="seconds between two turns")
    group.add_argument("--trace", default="", help="a .jsonl or .jsonl.gz with block hashes")
    group.add_argument("--speed", type=float, default=1.0, help="of a replay; 2 is twice as fast")
    group.add_argument("--words-per-block", type=int, default=24, help="of a replayed block")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--slo-ttft", type=float, default=2.0, help="seconds")
    group.add_argument("--slo-per-token", type=float, default=0.2, help="seconds")
    group.add_argument("--slo-share", type=float, default=0.95)
    group.add_argument("--until", default="", help="end the run as soon as this file is there")
    group.add_argument("--answers", default="", help="write every answer's figures there, as JSON")


class Shape(LoadTestShape):
    """Whichever of `--shape`; the time is Locust's --run-time."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        now_s, all_s = self.get_run_time(), float(options.run_time or 0)
        if (all_s and now_s > all_s) or (options.until and Path(options.until).exists()):
            return None
        users = SHAPES[options.shape](now_s, all_s or 600.0, int(options.num_users or 1))
        at_once = max(users, self.get_current_user_count(), options.spawn_rate or 1)
        return users, float(at_once)  # a crowd also leaves from one second to the next


class Client(User):
    """What the users have in common: an edge of their own, and a clock of their own."""

    abstract = True
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.options = environment.parsed_options
        self.number = next(Client._numbers)
        runner = environment.runner  # of several processes each has users of its own
        place = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        self.random = random.Random(f"{self.options.seed}-{place}-{self.number}")
        edges = _edges(environment)
        self.asker = self.client_of(edges[(self.number + place) % len(edges)])
        self.leaving = False

    def client_of(self, edge: str) -> Asker:
        return Asker(edge, self.options.key, began=BEGAN)

    def on_stop(self) -> None:
        self.asker.close()

    def stop(self, force: bool = False) -> bool:
        """What it has asked for is still read to its end; it asks for nothing more."""
        self.leaving = True
        stopped: bool = super().stop(force)
        return stopped

    def pause(self) -> float:
        """Think; returns when the next request is due. Raises StopUser."""
        due = time.perf_counter() + self.random.expovariate(1 / max(0.01, self.options.think))
        gevent.sleep(max(0.0, due - time.perf_counter()))
        if self.leaving:
            raise StopUser
        return due

    def chat(self, kind: str, messages: list[dict[str, Any]], due: float, **more: Any) -> str:
        body = {
            "model": self.options.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.options.max_tokens,
            "temperature": 0,
            **more,
        }
        return self.post(kind, "/v1/chat/completions", body, due)

    def post(self, kind: str, path: str, body: dict[str, Any], due: float) -> str:
        answer, text = self.asker.ask(kind, path, body, due)
        note(self.environment, answer)
        return text


class Conversation(Client):
    """Turns upon turns, each with all before it, behind a system prompt that others share."""

    weight = 5

    @task
    def converse(self) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": prompts.system(self.random.randrange(prompts.SYSTEMS))}
        ]
        for _ in range(TURNS):
            due = self.pause()
            question = prompts.words(self.random.random(), self.random.randint(6, 30))
            messages.append({"role": "user", "content": question})
            said = self.chat("conversation", messages, due)
            messages.append({"role": "assistant", "content": said or "–"})
            if sum(len(one["content"].split()) for one in messages) > CONTEXT_WORDS:
                return


class Reader(Client):
    """Two questions about one long document."""

    weight = 1

    @task
    def read(self) -> None:
        text = prompts.document(self.random.randrange(40), self.options.document_words)
        for _ in range(2):
            due = self.pause()
            question = prompts.words(self.random.random(), 8)
            self.chat("document", [{"role": "user", "content": f"{text}\n\n{question}?"}], due)


class Agent(Client):
    """A loop: a tool is called, its result given back, one to three times; then the answer is asked
    for. Results are ours, whatever the model said, so that runs can be repeated."""

    weight = 1

    @task
    def act(self) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": prompts.system(0)},
            {"role": "user",
             "content": f"When is high tide? {prompts.words(self.random.random(), 6)}"},
        ]  # fmt: skip
        tools = list(prompts.TOOLS)
        for turn in range(self.random.randint(1, TOOL_ROUNDS)):
            self.chat("agent", messages, self.pause(), tools=tools, tool_choice="required",
                      max_tokens=64)  # fmt: skip
            messages += prompts.tool_round(turn)
        self.chat("agent", messages, self.pause(), tools=tools, tool_choice="none")


class Completer(Client):
    """Short completions, as an editor asks for."""

    weight = 3

    @task
    def complete(self) -> None:
        due = self.pause()
        body = {
            "model": self.options.model,
            "prompt": prompts.words(self.random.random(), 20),
            "max_tokens": 12,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        self.post("completion", "/v1/completions", body, due)


class WorkerCaller(Client):
    """A chat Worker: at the user's own edge where the URL is of one of them (a deploy is to all),
    else where the URL says."""

    weight = 1

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        there = urlsplit(url_of(self.options.chat_worker))
        self.path = there.path
        base = f"{there.scheme}://{there.netloc}"
        if base not in _edges(environment):
            self.asker.close()
            self.asker = self.client_of(base)

    @task
    def call(self) -> None:
        due = self.pause()
        content = prompts.words(self.random.random(), 12)
        self.post("worker", self.path, {"messages": [{"role": "user", "content": content}]}, due)


class Replayer(Client):
    """A trace's requests when they came, whatever became of those before: one user plays it all."""

    fixed_count = 1
    weight = 0

    @task
    def replay(self) -> None:
        pool: list[gevent.Greenlet[..., Any]] = []
        began = time.perf_counter()
        edges = _edges(self.environment)
        for number, line in enumerate(_trace(Path(self.options.trace))):
            due = began + line["timestamp"] / 1000 / self.options.speed
            gevent.sleep(max(0.0, due - time.perf_counter()))
            pool.append(gevent.spawn(self._one, edges[number % len(edges)], line, due))
            pool = [one for one in pool if not one.dead]
        gevent.joinall(pool)
        self.environment.runner.quit()

    def _one(self, edge: str, line: dict[str, Any], due: float) -> None:
        asker = self.client_of(edge)
        content = prompts.from_blocks(line["hash_ids"], self.options.words_per_block)
        body = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": min(self.options.max_tokens, line["output_length"]),
            "temperature": 0,
        }
        answer, _ = asker.ask("replay", "/v1/chat/completions", body, due)
        asker.close()
        note(self.environment, answer)


MIX = (Conversation, Reader, Agent, Completer)


@events.init.add_listener
def _chosen(environment: Environment, **_: Any) -> None:
    """Which of the users this run is about. Ends Locust where an address is none."""
    options = environment.parsed_options
    if options is None:
        return
    try:
        bases_of(options.edges or environment.host or "http://unset")
        url_of(options.chat_worker or "http://unset")
    except Failed as failure:
        raise SystemExit(str(failure)) from failure
    if options.trace:
        environment.user_classes = [Replayer]
    else:
        environment.user_classes = [*MIX, *([WorkerCaller] if options.chat_worker else [])]


def note(environment: Environment, answer: Answer) -> None:
    """Into our figures and into Locust's: rows by kind, edge and region, as far as they are
    known."""
    _collected.append(answer)
    failure = RuntimeError(answer.error) if answer.error else None
    fire = environment.events.request.fire
    good = _slo(environment).holds(answer)
    places = (f"edge {answer.edge}", f"region {answer.region}" if answer.region else "")
    for name in filter(None, (answer.kind, *places)):

        def row(what: str, seconds: float | None, name: str = name) -> None:
            if seconds is not None:
                fire(request_type=what, name=name, response_time=1000 * seconds,
                     response_length=0, exception=None, context={})  # fmt: skip

        fire(request_type="answer", name=name, response_time=1000 * answer.total_s,
             response_length=answer.completion_tokens, exception=failure, context={})  # fmt: skip
        row("first token", answer.ttft_s)
        row("per token", answer.per_token_s)
        row("within SLO", answer.total_s if good else None)  # its rate is the goodput


@events.report_to_master.add_listener
def _report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    data["answers"] = [msgspec.to_builtins(one) for one in _collected]
    _collected.clear()


@events.worker_report.add_listener
def _reported(client_id: str, data: dict[str, Any], **_: Any) -> None:
    _collected.extend(msgspec.convert(data.get("answers", []), list[Answer]))


@events.quitting.add_listener
def _end(environment: Environment, **_: Any) -> None:
    """The summary, and the exit code by the service level. A worker leaves that to its master."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options, slo = environment.parsed_options, _slo(environment)
    seconds = max((one.at_s + one.total_s for one in _collected), default=0.0)
    print("\n" + "\n".join([*lines(_collected, slo, seconds), report.OVERLAP]))
    if options.answers:
        told = {"began": BEGAN_AT, "seconds": seconds, "slo": slo, "answers": _collected}
        Path(options.answers).write_bytes(msgspec.json.encode(told))
    page = Path(options.html_file) if options.html_file else None
    if page is not None and page.exists():  # it is written before this, if the run had its time
        added = report.section(_collected, slo, seconds)
        page.write_text(report.with_section(page.read_text("utf-8"), added), "utf-8")
    good, _words = verdict(_collected, slo)
    if environment.process_exit_code is None:
        environment.process_exit_code = 0 if good else 1
    if isinstance(environment.runner, MasterRunner):
        print(f"from {len(environment.runner.worker_indexes)} processes")


def _edges(environment: Environment) -> list[str]:
    return bases_of(environment.parsed_options.edges or str(environment.host))


def _slo(environment: Environment) -> Slo:
    options = environment.parsed_options
    return Slo(ttft_s=options.slo_ttft, per_token_s=options.slo_per_token, share=options.slo_share)


def _trace(path: Path) -> Iterator[dict[str, Any]]:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
