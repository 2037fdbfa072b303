"""A language model behind an OpenAI-compatible endpoint.

The `openai` client does transport, backoff and `Retry-After`. What it lets through is checked
here: a reply counts only if it is JSON with a choice that holds text. Everything else is an error
that names no secret, and never an empty or an unchanged text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from dcl.errors import ConfigError
from dcl.files import whole
from injection.errors import BudgetError, ModelError
from injection.session import Call, Cost, Message, Reply


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where the model is, and how it may be used."""

    base_url: str = "http://127.0.0.1:8765/v1"
    """Address of the API, up to `/v1`."""
    model: str = ""
    """Name of the model there."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is in no file of ours."""
    temperature: float = 0.0
    """Of the agents; >= 0."""
    rewrite_temperature: float = 0.7
    """Of the manipulator; >= 0."""
    seed: int = 1
    """Sent with every request."""
    max_tokens: int = 1024
    """Most tokens of a reply; > 0."""
    timeout: float = 120.0
    """Seconds for one request from its start to the last byte; > 0."""
    retries: int = 4
    """Further tries after a passing error; >= 0."""
    requests_per_minute: float = 0.0
    """Most requests a minute; 0 sets no limit."""
    concurrency: int = 4
    """Most requests at the same time; > 0."""
    budget_calls: int = 0
    """Most requests of this process; 0 sets no limit. Replies from the cache cost nothing."""
    budget_tokens: int = 0
    """Most tokens, read and written, of this process; 0 sets no limit."""
    cache: str = ""
    """Folder that keeps replies by the whole request; empty keeps them in memory only."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("max_tokens", "timeout", "concurrency"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"endpoint.{name}: expected above 0, got {getattr(self, name)}")
        for name in (
            "temperature",
            "rewrite_temperature",
            "retries",
            "requests_per_minute",
            "budget_calls",
            "budget_tokens",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"endpoint.{name}: expected >= 0, got {getattr(self, name)}")
        if not re.match(r"https?://[^/\s]", self.base_url):
            raise ConfigError(
                "endpoint.base_url: expected an address such as http://127.0.0.1:8765/v1, got "
                f"{redact(self.base_url)!r}"
            )


class _GaveUpError(ModelError):
    """The client tried as often as it may; trying again here would multiply the tries."""


def redact(text: str, *secrets: str) -> str:
    """A text without keys: the ones given, bearer tokens, and whatever looks like a key."""
    for secret in secrets:
        if len(secret) >= 6:
            text = text.replace(secret, "[key]")
    text = re.sub(r"(?i)(bearer\s+)\S+", r"\1[key]", text)
    text = re.sub(r"(?<=://)[^/@\s]+@", "[key]@", text)
    text = re.sub(r"(?i)([?&][^=&\s]*(?:key|token|secret|sig)[^=&\s]*=)[^&\s]+", r"\1[key]", text)
    return re.sub(r"\b(?:sk|pk|hf|gsk)[-_][A-Za-z0-9_-]{8,}", "[key]", text)


@dataclass
class Endpoint:
    """The model; safe to share between threads.

    Args:
        config: Where it is and how it may be used.
        sleep: Waits between tries; another clock in tests.

    Raises:
        ConfigError: If no model is named, the key cannot be sent, or the cache cannot be kept.
    """

    config: EndpointConfig
    sleep: Callable[[float], None] = time.sleep
    spent: Cost = field(default_factory=Cost)
    _client: Any = field(init=False)
    _key: str = field(init=False, repr=False)
    _known: dict[str, Reply] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)
    _slots: BoundedSemaphore = field(init=False)
    _next: float = field(default=0.0, init=False)
    _answered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Open the client."""
        from openai import OpenAI

        if not self.config.model:
            raise ConfigError("endpoint.model: expected the name of a model, got nothing")
        self._key = os.environ.get(self.config.key_variable, "").strip() or "none"
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(
                f"{self.config.key_variable}: expected a key of printable ASCII, got something else"
            )
        if self.config.cache:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"endpoint.cache: expected a folder {self._folder}, got: {error.strerror}"
                ) from None
        self._slots = BoundedSemaphore(self.config.concurrency)
        self._client = OpenAI(
            base_url=self.config.base_url,
            api_key=self._key,
            timeout=self.config.timeout,
            max_retries=self.config.retries,
        )
        weakref.finalize(self, self._client.close)  # connections end with the endpoint

    @property
    def _folder(self) -> Path:
        """Where replies are kept."""
        return Path(self.config.cache).expanduser()

    @property
    def name(self) -> str:
        """What records call it."""
        return self.config.model.rstrip("/").rpartition("/")[2]

    def __call__(self, call: Call) -> Reply:
        """Answer a call of an agent."""
        return self.complete(call.messages, temperature=self.config.temperature)

    def complete(
        self, messages: Sequence[Message], *, temperature: float, seed: int | None = None
    ) -> Reply:
        """A reply, from the cache if the whole request is known.

        Args:
            messages: The request.
            temperature: Of the sampling.
            seed: Of the sampling; None takes that of the configuration.

        Raises:
            ModelError: If there is no usable reply after all tries.
            BudgetError: If the budget is used up.
            ConfigError: If there is no server at the address.
        """
        request = {
            "model": self.config.model,
            "messages": [message._asdict() for message in messages],
            "temperature": temperature,
            "seed": self.config.seed if seed is None else seed,
            "max_tokens": self.config.max_tokens,
        }
        text = json.dumps([redact(self.config.base_url), request], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        known = self._recall(key)
        if known is not None:
            return known
        with self._slots:
            reply = self._try(request)
        self._remember(key, reply)
        return reply

    def _try(self, request: dict[str, Any]) -> Reply:
        """A request with further tries for what the client does not try again."""
        problem = ""
        for number in range(self.config.retries + 1):
            if number:
                self.sleep(min(2.0**number / 8, 8.0))
            self._admit()
            try:
                return self._send(request)
            except _GaveUpError as error:
                raise ModelError(str(error)) from None
            except ModelError as error:
                problem = str(error)
        raise ModelError(problem)

    def _admit(self) -> None:
        """Wait for the turn of a request, and count it.

        Raises:
            BudgetError: If no more are allowed.
        """
        with self._lock:
            limits = ((self.spent.calls, self.config.budget_calls, "calls"),)
            tokens = self.spent.prompt_tokens + self.spent.completion_tokens
            for used, most, what in (*limits, (tokens, self.config.budget_tokens, "tokens")):
                if 0 < most <= used:
                    raise BudgetError(
                        f"the budget of {most} {what} is used up; raise endpoint.budget_{what} and "
                        "start again to go on"
                    )
            self.spent += Cost(calls=1)
            wait = 0.0
            if self.config.requests_per_minute > 0:
                now = time.monotonic()
                wait = max(0.0, self._next - now)
                self._next = max(self._next, now) + 60 / self.config.requests_per_minute
        if wait:
            self.sleep(wait)

    def _send(self, request: dict[str, Any]) -> Reply:
        """One request.

        Raises:
            ModelError: If it fails, or the reply is not usable.
            ConfigError: If there never was a server at the address.
        """
        from openai import APIStatusError, OpenAIError

        completions = self._client.chat.completions.with_streaming_response
        end = time.monotonic() + self.config.timeout
        body = bytearray()
        try:
            with completions.create(**request) as response:
                self._answered = True
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > end:
                        raise ModelError(f"no whole reply within {self.config.timeout} s")
        except APIStatusError as error:
            self._answered = True
            problem = f"status {error.status_code}: {error.message}"
            raise _GaveUpError(str(self._fail(problem))) from None
        except OpenAIError as error:
            problem = f"{type(error).__name__}: {error}"
            if type(error.__cause__).__name__ == "ConnectError" and not self._answered:
                raise ConfigError(
                    f"endpoint.base_url: expected a server at {redact(self.config.base_url)}, got "
                    f"{redact(problem, self._key)} Start it, or correct the address."
                ) from None
            raise _GaveUpError(str(self._fail(problem))) from None
        except OSError as error:
            raise self._fail(f"the connection broke: {error}") from None
        except Exception as error:
            if isinstance(error, ModelError):
                raise
            # What breaks while bytes are read comes from the transport under the client.
            raise self._fail(f"the connection broke: {type(error).__name__}") from None
        return self._read(bytes(body))

    def _read(self, body: bytes) -> Reply:
        """The text of a reply.

        Raises:
            ModelError: If it holds none.
        """
        try:
            row = json.loads(body)
            text = row["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            shown = body[:80].decode("utf-8", "replace")
            raise self._fail(
                f"expected JSON with choices[0].message.content, got {shown!r}"
            ) from None
        if not isinstance(text, str) or not text.strip():
            raise self._fail("expected text in choices[0].message.content, got none")
        usage = row.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        tokens = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        counts = [value if isinstance(value, int) and value > 0 else 0 for value in tokens]
        with self._lock:
            self.spent += Cost(0, *counts)
        return Reply(redact(text, self._key), *counts)

    def _fail(self, problem: str) -> ModelError:
        """An error without secrets."""
        place = redact(self.config.base_url, self._key)
        return ModelError(f"{place}: {redact(problem, self._key)}")

    def _recall(self, key: str) -> Reply | None:
        """A reply that was given before; a damaged file of the cache counts as none."""
        if key in self._known:
            return self._known[key]
        if not self.config.cache:
            return None
        try:
            row = json.loads(self._file(key).read_text(encoding="utf-8"))
            reply = Reply(
                str(row["text"]), int(row["prompt_tokens"]), int(row["completion_tokens"])
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        self._known[key] = reply
        return reply

    def _remember(self, key: str, reply: Reply) -> None:
        """Keep a reply; the file appears only when it is whole."""
        self._known[key] = reply
        if not self.config.cache:
            return
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {
            "text": reply.text,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
        }
        with whole(file) as part:
            part.write_text(json.dumps(row), encoding="utf-8")

    def _file(self, key: str) -> Path:
        """Where a reply is kept."""
        return self._folder / key[:2] / f"{key}.json"


@dataclass(frozen=True, slots=True)
class Seeded:
    """An endpoint with another seed of the sampling; cache, limits and budget are shared.

    Args:
        endpoint: The model.
        seed: Sent with every request.
    """

    endpoint: Endpoint
    seed: int

    @property
    def name(self) -> str:
        """What records call it."""
        return self.endpoint.name

    def __call__(self, call: Call) -> Reply:
        """Answer a call of an agent."""
        config = self.endpoint.config
        return self.endpoint.complete(call.messages, temperature=config.temperature, seed=self.seed)
