"""A client in the form of Workers AI's REST calls: the envelope, the native stream, the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


class CloudflareError(Exception):
    def __init__(self, status: int, code: int, message: str, headers: httpx.Headers) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message, self.headers = status, code, message, headers


@dataclass
class WorkersAI:
    """`env.AI` over HTTP: `run` gives the result without its envelope."""

    edge: str
    account: str = "local"
    token: str = ""
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        base = f"{self.edge}/client/v4/accounts/{self.account}/ai"
        self.http = httpx.Client(base_url=base, headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> WorkersAI:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.http.close()

    def run(self, model: str, **body: Any) -> Any:
        return self._result(self.http.post(f"/run/{model}", json=body))

    def stream(self, model: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The events. Raises CloudflareError for an error event, EOFError without [DONE]."""
        sent = {**body, "stream": True}
        with self.http.stream("POST", f"/run/{model}", json=sent) as answer:
            if answer.status_code != 200:
                answer.read()
                self._result(answer)
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if event.get("success") is False:
                    self._raise(answer, event)
                yield event
        raise EOFError("the stream ended without [DONE]")

    def queue(self, model: str, *requests: dict[str, Any]) -> str:
        answer = self.http.post(f"/run/{model}?queueRequest=true", json={"requests": requests})
        result = self._result(answer)
        assert result["status"] == "queued"
        return str(result["request_id"])

    def poll(self, model: str, request_id: str) -> Any:
        path = f"/run/{model}?queueRequest=true"
        return self._result(self.http.post(path, json={"request_id": request_id}))

    def wait(self, model: str, request_id: str, within_s: float = 60.0) -> Any:
        """Poll until the answers are there. A region that is away for a while is asked again."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            try:
                result = self.poll(model, request_id)
            except (CloudflareError, httpx.TransportError) as error:
                if isinstance(error, CloudflareError) and error.code != 3040:
                    raise
            else:
                if "responses" in result:
                    return result
            time.sleep(0.05)
        raise TimeoutError(f"the batch was not done within {within_s:g} s")

    def models(self, **query: str) -> list[str]:
        answer = self.http.get("/models/search", params=query)
        return [one["name"] for one in self._result(answer)]

    def chat(self, **body: Any) -> Any:
        """The twin in OpenAI's form, without an envelope."""
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _result(self, answer: httpx.Response) -> Any:
        body = answer.json()
        assert set(body) >= {"result", "success", "errors", "messages"}
        if not body["success"]:
            self._raise(answer, body)
        assert (answer.status_code, body["errors"]) == (200, [])
        return body["result"]

    def _raise(self, answer: httpx.Response, body: Any) -> None:
        error = body["errors"][0]
        raise CloudflareError(answer.status_code, error["code"], error["message"], answer.headers)
