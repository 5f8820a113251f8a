"""Models that answer: `LLM` for programs, `AsyncLLM` for coroutines.

>>> with LLM("smollm2", nodes=2) as llm:                             # doctest: +SKIP
...     print(llm.chat("Why is the sky blue?", max_tokens=40).text)

An `LLM` starts a node of its own, from the `paceline` program of this wheel, or talks to one that
runs (`LLM.connect`). It needs no library but Python's own. Answers do not depend on the number of
nodes, on the split or on what else is answered at the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ._server import Server
from .errors import ServerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
    from types import TracebackType

__all__ = ["LLM", "Answer", "AsyncLLM"]

#: Requests of a batch that are sent at the same time; the node computes as many as it has room for.
_AT_ONCE = 16

#: Longest text of a refusal that is kept.
_REFUSAL_MAX = 2000


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said.

    Attributes:
        text: the answer.
        finish_reason: `stop` (the model or a stop string ended it), `length` or `tool_calls`.
        prompt_tokens: tokens that were read.
        completion_tokens: tokens that were generated.
        raw: the whole object of the HTTP API.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    raw: dict[str, Any] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


class LLM:
    """A model over nodes that this process starts.

    Args:
        model: an alias (`smollm2`), a usual name (`qwen3:8b`), a GGUF file, a folder of
            safetensors or a hub id; fetched if it is not here.
        nodes: processes to split the model over, 1 to 64.
        split: `auto`, `tensor`, `pipeline`, `experts` or `TxP` such as `2x3`.
        threads: threads of each node, or as many as there are cores.
        context: most tokens of a conversation and its answer.
        parallel: answers that are computed at the same time; more wait.
        engine: `cpu` or `mlx`, or what `paceline up` chooses.
        options: further arguments of `paceline up`.
        start_deadline: seconds until the node answers, with the download of the model.
        deadline: seconds for a request.

    The node ends with `close`, with the `with` block, with the last reference and with this
    process, however that ends. Threads may share an `LLM`.

    Raises:
        ServerError: the node does not start; its last words are in the text.
    """

    def __init__(self, model: str, *, nodes: int = 1, split: str = "auto",
                 threads: int | None = None, context: int | None = None, parallel: int = 4,
                 engine: str | None = None, options: Sequence[str] = (),
                 start_deadline: float = 3600.0, deadline: float = 600.0) -> None:
        arguments = ["--model", str(model), "--nodes", str(nodes), "--split", split,
                     "--parallel", str(parallel), "--request-timeout",
                     str(min(86_400, max(1, round(deadline))))]
        for name, value in {"--threads": threads, "--context": context, "--engine": engine}.items():
            if value is not None:
                arguments += [name, str(value)]
        self._server: Server | None = Server([*arguments, *options], start_deadline)
        self._open(self._server.url, self._server.key, None, deadline)

    @classmethod
    def connect(cls, url: str = "http://127.0.0.1:52415", model: str | None = None, *,
                key: str | None = None, deadline: float = 600.0) -> LLM:
        """A model of a node that runs already, on any machine of a cluster.

        Args:
            url: where the node listens; `https://HOST:PORT` on another machine, whose certificate is
                trusted by `SSL_CERT_FILE` in the environment.
            model: its name there; the first that the node lists where it is not given.
            key: an API key, where the node asks for one (`paceline key api new`).
            deadline: seconds for a request.
        """
        llm = cls.__new__(cls)
        llm._server = None
        llm._open(url, key, model, deadline)
        return llm

    def _open(self, url: str, key: str | None, model: str | None, deadline: float) -> None:
        self._http = _Http(url, key, deadline)
        self.model = model or self._first()

    def _first(self) -> str:
        listed = self._http.call("GET", "/v1/models")["data"]
        if not listed:
            raise ServerError(f"{self.url} has no model; `paceline load MODEL` brings one")
        return listed[0]["id"]

    @property
    def url(self) -> str:
        """Where the node listens."""
        return self._http.url

    @property
    def key(self) -> str | None:
        """The key that the node asks for, to give it to other clients of its API."""
        return self._http.key

    def generate(self, prompt: str, **options: Any) -> Answer:
        """Continues `prompt`, without a chat template.

        `options` are fields of `/v1/completions`: `max_tokens`, `temperature`, `top_p`, `top_k`,
        `min_p`, `seed`, `stop`, `logprobs`, ...

        Raises:
            ServerError: the node refuses, is gone, or does not answer in time.
        """
        return _completion(self._http.call("POST", "/v1/completions",
                                           self._body(options, prompt=prompt)))

    def chat(self, messages: str | Sequence[dict[str, Any]], **options: Any) -> Answer:
        """Answers a conversation: a text of the user, or messages with `role` and `content`.

        `options` are fields of `/v1/chat/completions`: those of `generate`, `tools`,
        `response_format`, ...

        Raises:
            ServerError: as of `generate`.
        """
        return _chat(self._http.call("POST", "/v1/chat/completions", self._talk(messages, options)))

    def stream(self, messages: str | Sequence[dict[str, Any]],
               **options: Any) -> Generator[str, None, None]:
        """As `chat`, piece by piece as it comes. Leaving the loop early ends the answer.

        The pieces joined are the text of `chat` with the same options and seed.
        """
        body = self._talk(messages, {**options, "stream": True})
        for event in self._http.events("/v1/chat/completions", body):
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    yield piece

    def batch(self, prompts: Iterable[str | Sequence[dict[str, Any]]],
              **options: Any) -> list[Answer]:
        """`chat` for each of `prompts`, together; answers in their order, each as if alone."""
        with ThreadPoolExecutor(_AT_ONCE, "paceline-batch") as pool:
            return list(pool.map(lambda prompt: self.chat(prompt, **options), prompts))

    def embed(self, texts: str | Sequence[str], **options: Any) -> list[list[float]]:
        """A vector for each text, of unit length, from an encoder or an embedding model.

        `options` are fields of `/v1/embeddings`, such as `dimensions`.

        Returns:
            `(n, d)` as lists, in the order of `texts`; of a single text `(1, d)`.

        Raises:
            ServerError: as of `generate`, and where the model makes no vectors.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        said = self._http.call("POST", "/v1/embeddings", self._body(options, input=texts))
        rows = sorted(said["data"], key=lambda row: row["index"])
        return [row["embedding"] for row in rows]

    def _body(self, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"model": self.model, **fields, **options}

    def _talk(self, messages: str | Sequence[dict[str, Any]],
              options: dict[str, Any]) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._body(options, messages=list(messages))

    def close(self) -> None:
        """Ends the node, if it is this object's own."""
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}, url={self.url!r})"


class AsyncLLM:
    """An `LLM` for coroutines: the same methods, awaited.

    >>> async with AsyncLLM(LLM.connect()) as llm:                   # doctest: +SKIP
    ...     answers = await asyncio.gather(llm.chat("Hi"), llm.chat("Ho"))

    Requests wait in threads of the running loop's default executor.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    async def start(cls, model: str, **arguments: Any) -> AsyncLLM:
        """Starts a node without holding up the loop; arguments as of `LLM`."""
        return cls(await asyncio.to_thread(LLM, model, **arguments))

    async def generate(self, prompt: str, **options: Any) -> Answer:
        """`LLM.generate`."""
        return await asyncio.to_thread(self.llm.generate, prompt, **options)

    async def chat(self, messages: str | Sequence[dict[str, Any]], **options: Any) -> Answer:
        """`LLM.chat`."""
        return await asyncio.to_thread(self.llm.chat, messages, **options)

    async def stream(self, messages: str | Sequence[dict[str, Any]],
                     **options: Any) -> AsyncIterator[str]:
        """`LLM.stream`."""
        pieces = self.llm.stream(messages, **options)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            with contextlib.suppress(ValueError):  # a thread still waits for the next piece
                pieces.close()

    async def batch(self, prompts: Iterable[str | Sequence[dict[str, Any]]],
                    **options: Any) -> list[Answer]:
        """`LLM.batch`."""
        return await asyncio.to_thread(self.llm.batch, prompts, **options)

    async def embed(self, texts: str | Sequence[str], **options: Any) -> list[list[float]]:
        """`LLM.embed`."""
        return await asyncio.to_thread(self.llm.embed, texts, **options)

    async def close(self) -> None:
        """`LLM.close`."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()


def _completion(answer: dict[str, Any]) -> Answer:
    choice = answer["choices"][0]
    return _answer(answer, choice, choice["text"])


def _chat(answer: dict[str, Any]) -> Answer:
    choice = answer["choices"][0]
    return _answer(answer, choice, choice["message"].get("content") or "")


def _answer(answer: dict[str, Any], choice: dict[str, Any], text: str) -> Answer:
    usage = answer.get("usage") or {}
    return Answer(text, choice["finish_reason"], usage.get("prompt_tokens", 0),
                  usage.get("completion_tokens", 0), answer)


class _Http:
    """One server; a connection for each request, so that threads need no turns."""

    def __init__(self, url: str, key: str | None, deadline: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"the URL is {url!r}, expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self.key = key
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._deadline = deadline

    def _ask(self, method: str, path: str,
             body: dict[str, Any] | None) -> tuple[http.client.HTTPConnection, Any]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._deadline)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read(_REFUSAL_MAX))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"{self.url}{path}: {error or type(error).__name__}") from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that answers."""
        connection, response = self._ask(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: the answer breaks off: {error}") from error
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream of server-sent events, up to `[DONE]`."""
        connection, response = self._ask("POST", path, body)
        try:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(str(event["error"].get("message", event["error"])))
                    yield event
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: the answer breaks off: {error}") from error
        finally:
            connection.close()
        raise ServerError(f"{self.url}{path}: the answer breaks off")


def _refusal(status: int, body: bytes) -> ServerError:
    text = body.decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.strip()
    return ServerError(f"{status}: {text}", status)
