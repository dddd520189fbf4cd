"""Answers from a server, against a stub that fails in the ways servers fail."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from xpress_hf import cli
from xpress_hf.training.regeneration import (
    Sampling,
    Server,
    ServerAnswerer,
    ServerError,
    read_prompts,
    regenerate,
)

ROWS = [{"prompt": f"prompt {number}"} for number in range(12)]


class Stub(ThreadingHTTPServer):
    """Echoes the last message in capitals. `plan(number)` tells what to do with the request of that number (from 0):
    an HTTP status, "drop" (close the connection), "garbage" (no JSON) or "empty" (JSON without an answer)."""

    daemon_threads = True

    def __init__(self, plan=lambda number: 200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan = plan
        self.lock = threading.Lock()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.busy = self.most_busy = 0
        self.both = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
            if self.server.busy >= 2:
                self.server.both.set()
        try:
            self.reply(self.server.plan(number), body)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def reply(self, what, body):
        if what == "drop":
            return
        if what == "wait":
            self.server.both.wait(5)
        text = body["messages"][-1]["content"].upper()
        message = {"role": "assistant", "content": text}
        reason = "length" if "too long" in body["messages"][-1]["content"] else "stop"
        choice = {"message": message, "finish_reason": reason, "token_ids": [len(text)]}
        answer = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}})
        if what == "empty":
            answer = json.dumps({"choices": []})
        status = what if isinstance(what, int) else 200
        if status != 200:
            answer = json.dumps({"error": {"message": "the stub refuses"}})
        self.send_response(status if self.path == "/v1/chat/completions" else 404)
        self.end_headers()
        self.wfile.write(b"garbage" if what == "garbage" else answer.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = []

    def make(plan=lambda number: 200) -> Stub:
        made.append(Stub(plan))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answerer(server: Stub, concurrency: int = 1, retries: int = 3, **values) -> ServerAnswerer:
    return ServerAnswerer(Server(server.url, "served", retries=retries, delay_s=0.01, **values), concurrency)


def lines_of(path) -> list[dict]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["row"] for record in records}) == len(records)
    return sorted(records, key=lambda record: record["row"])


def test_what_is_asked_and_what_is_kept(stub, tmp_path):
    server = stub()
    rows = [{"messages": [{"role": "system", "content": "think"}, {"role": "user", "content": "one"}], "id": "a"}]
    prompts = read_prompts(rows, chat_template_kwargs={"enable_thinking": False})
    sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20, seed=7, max_new_tokens=9)
    talk = answerer(server, api_key="key", extra_body={"return_token_ids": True})
    summary = regenerate(prompts, tmp_path / "out.jsonl", talk, sampling)
    assert server.bodies == [
        {
            "model": "served",
            "messages": rows[0]["messages"],
            "max_tokens": 9,
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "seed": 7,
            "chat_template_kwargs": {"enable_thinking": False},
            "return_token_ids": True,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer key"
    (record,) = lines_of(tmp_path / "out.jsonl")
    assert record["messages"] == [*rows[0]["messages"], {"role": "assistant", "content": "ONE"}]
    assert record["id"] == "a"
    assert record["response_ids"] == [3]
    assert record["finished"] is True
    assert record["chat_template_kwargs"] == {"enable_thinking": False}
    assert record["generation"]["target"] == "served"
    assert summary.num_new_tokens == 3


def test_turns_follow_each_other_and_stop_behind_a_cut_answer(stub, tmp_path):
    rows = [{"turns": ["one", "two"]}, {"turns": ["too long", "two"]}]
    regenerate(read_prompts(rows), tmp_path / "out.jsonl", answerer(stub()), Sampling())
    records = lines_of(tmp_path / "out.jsonl")
    assert [message["content"] for message in records[0]["messages"]] == ["one", "ONE", "two", "TWO"]
    assert [message["content"] for message in records[1]["messages"]] == ["too long", "TOO LONG"]
    assert [record["finished"] for record in records] == [True, False]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_server_that_fails_now_and_then(stub, tmp_path, concurrency):
    """Every third request fails, each time in another way; all rows are answered once."""
    faults = [503, "drop", 429, "garbage", 500]
    server = stub(lambda number: faults[number // 3 % len(faults)] if number % 3 == 1 else 200)
    summary = regenerate(read_prompts(ROWS), tmp_path / "out.jsonl", answerer(server, concurrency, 8), Sampling())
    records = lines_of(tmp_path / "out.jsonl")
    assert [record["messages"][-1]["content"] for record in records] == [f"PROMPT {row}" for row in range(12)]
    assert summary.num_written == 12
    assert len(server.bodies) > 12


def test_requests_run_at_the_same_time(stub, tmp_path):
    server = stub(lambda number: "wait")
    regenerate(read_prompts(ROWS[:2]), tmp_path / "out.jsonl", answerer(server, 2), Sampling())
    assert server.most_busy == 2


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_goes_away_loses_nothing(stub, tmp_path, concurrency):
    server = stub(lambda number: 200 if number < 5 else 503)
    output = tmp_path / "out.jsonl"
    with pytest.raises(ServerError, match=r"row \d+: http.*HTTP 503.*5 of 12 answers are kept in .*out\.jsonl"):
        regenerate(read_prompts(ROWS), output, answerer(server, concurrency, 2), Sampling())
    assert len(lines_of(output)) == 5
    summary = regenerate(read_prompts(ROWS), output, answerer(stub(), concurrency), Sampling())
    assert summary.num_written == 7
    assert len(lines_of(output)) == 12


def test_no_server_at_all(stub, tmp_path):
    server = stub()
    away = answerer(server)
    server.close()
    with pytest.raises(ServerError, match=r"no answer in 4 tries \(.*refused.*\)\. 0 of 12 answers are kept"):
        regenerate(read_prompts(ROWS), tmp_path / "out.jsonl", away, Sampling())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (400, r"row 0: .* refuses the request \(HTTP 400: .*the stub refuses"),
        (404, r"Does `base_url` end in /v1\?"),
        ("empty", "row 0: .* sent no chat completion"),
    ],
)
def test_refusals_are_not_tried_again(stub, tmp_path, what, words):
    server = stub(lambda number: what)
    with pytest.raises(ServerError, match=words):
        regenerate(read_prompts(ROWS), tmp_path / "out.jsonl", answerer(server), Sampling())
    assert len(server.bodies) == 1


def test_delays_grow(stub, tmp_path, monkeypatch):
    server = stub(lambda number: 503)
    talk = answerer(server, retries=4)
    delays = []
    monkeypatch.setattr(talk.server.stopped, "wait", lambda delay: delays.append(delay))
    with pytest.raises(ServerError, match="5 tries"):
        talk.server.complete({"messages": [{"content": "one"}]})
    assert delays == pytest.approx([0.01, 0.02, 0.04, 0.08])


def test_the_command(stub, tmp_path, monkeypatch):
    server = stub()
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["regenerate", "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    words += ["--target", "served", "--limit", "3", "--max-new-tokens", "5", "--json"]
    outcome = CliRunner().invoke(cli.app, [*words, "--base-url", server.url])
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert (figures["num_rows"], figures["num_written"], figures["num_new_tokens"]) == (3, 3, 9)
    assert len(lines_of(tmp_path / "out.jsonl")) == 3
    with pytest.raises(ValueError, match="`base_url` must start with http"):
        Server("localhost:8000", "served")
    with pytest.raises(ValueError, match="concurrency"):
        ServerAnswerer(Server(server.url, "served"), 0)
