"""Answers from a server with the chat completions of the OpenAI API (vLLM, SGLang, llama.cpp and others)."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ..chat import Message
from .prompts import Answer, Prompt, Sampling

# Answers that say "later": time-out, too early, too many requests, faults of the server or its proxy.
RETRIED = (408, 425, 429, 500, 502, 503, 504)
LONGEST_DELAY_S = 60.0


class ServerError(RuntimeError):
    """The server is away or refuses a request."""


@dataclass
class Server:
    """One server.

    Args:
        base_url: as for other clients, such as `http://localhost:8000/v1`.
        model: the name that the server gives to the target.
        api_key: sent as bearer token, where given.
        retries: further tries after a failed one, with delays of `delay_s`, twice that, and so on.
        timeout_s: longest wait for one answer.
        extra_body: further fields of every request; `{"return_token_ids": true}` lets vLLM tell the ids.
    """

    base_url: str
    model: str
    api_key: str | None = None
    retries: int = 6
    delay_s: float = 1.0
    timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` must start with http:// or https://, got {self.base_url!r}.")
        self.stopped = threading.Event()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One chat completion: the server's JSON.

        Raises:
            ServerError: refused, or still failing after all retries.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._post({"model": self.model, **body, **self.extra_body})
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read()[:300].decode(errors='replace').strip()}"
                if error.code not in RETRIED:
                    hint = " Does `base_url` end in /v1?" if error.code == 404 else ""
                    raise ServerError(f"{self.base_url} refuses the request ({reason}).{hint}") from error
                asked = error.headers.get("Retry-After", "")
                delay = float(asked) if asked.isdigit() else self.delay_s * 2**attempt
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
                delay = self.delay_s * 2**attempt
            # Nobody waits for a server that another thread has given up.
            if attempt == self.retries or self.stopped.wait(min(delay, LONGEST_DELAY_S)):
                break
        raise ServerError(f"{self.base_url} gave no answer in {attempt + 1} tries ({reason}).")

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            return json.load(response)


class ServerAnswerer:
    """Several requests at a time; the turns of one conversation one after the other."""

    def __init__(self, server: Server, concurrency: int = 16):
        if concurrency < 1:
            raise ValueError(f"`concurrency` must be >= 1, got {concurrency}.")
        self.server = server
        self.name = server.model
        self.concurrency = concurrency

    def answer(
        self, prompts: list[Prompt], done: Container[int], sampling: Sampling
    ) -> Iterator[list[tuple[Prompt, Answer]]]:
        """Answers as they come. After a failure those on their way are still handed out, then it is raised."""
        todo = (prompt for prompt in prompts if prompt.row not in done)
        running: dict[Future[Answer], Prompt] = {}
        failure: BaseException | None = None
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                while True:
                    while failure is None and len(running) < self.concurrency and (prompt := next(todo, None)):
                        running[pool.submit(self._converse, prompt, sampling)] = prompt
                    if not running:
                        break
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    answers = []
                    for future in finished:
                        prompt = running.pop(future)
                        if future.exception() is None:
                            answers.append((prompt, future.result()))
                        elif failure is None:
                            failure = future.exception()
                            self.server.stopped.set()
                    yield answers
            finally:
                self.server.stopped.set()
        self.server.stopped.clear()
        if failure is not None:
            raise failure

    def _converse(self, prompt: Prompt, sampling: Sampling) -> Answer:
        messages: list[Message] = []
        num_new_tokens, finished, token_ids = 0, True, None
        for turn in prompt.turns:
            messages += turn
            try:
                result = self.server.complete(self._body(prompt, messages, sampling))
                choice = result["choices"][0]
                answer = choice["message"]
                content = answer.get("content") or ""
            except ServerError as error:
                raise ServerError(f"{prompt.where}: {error}") from error
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ServerError(f"{prompt.where}: {self.server.base_url} sent no chat completion.") from error
            kept = {key: answer[key] for key in ("reasoning_content", "tool_calls") if answer.get(key)}
            messages.append({"role": "assistant", "content": content, **kept})
            num_new_tokens += (result.get("usage") or {}).get("completion_tokens") or 0
            finished = choice.get("finish_reason") != "length"
            token_ids = choice.get("token_ids")
            if not finished:
                break
        return Answer(messages, finished, num_new_tokens, token_ids)

    @staticmethod
    def _body(prompt: Prompt, messages: list[Message], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed + prompt.row,
        }
        # Not every server knows these; the first is no part of the OpenAI API.
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if prompt.tools is not None:
            body["tools"] = prompt.tools
        if prompt.chat_template_kwargs:
            body["chat_template_kwargs"] = prompt.chat_template_kwargs
        return body
