"""Examples for fine-tuning: common formats, chat templates, and which tokens of a chat are trained. No torch.

Formats of an example (a JSON object), by its keys:

    messages         [{"role", "content", ...}]          OpenAI; `conversations` and from/value (ShareGPT) are read as well
    prompt           with `completion` or `answer`: both text, or both lists of messages
    instruction      with `output`, and optionally `input`, `system` or `history`, earlier [question, answer] pairs (Alpaca)
    chosen           with `rejected`, and `prompt` unless both are chats: a preference pair, for DPO
    text             plain text, trained as a whole

A chat is rendered to text by the model's chat template (jinja2), which is untrusted code: it runs in jinja's immutable
sandbox, with plain JSON values and limits on its time, memory and output size.

[Note: which characters are trained]
By default only the assistant's turns contribute to the loss. Three methods locate them in the rendered text, tried in this order:

1. The template marks them itself (`{% generation %}`).
2. Two private-use characters are put around the content of each turn before rendering, and removed from the result. This is
   accepted only if the remaining text equals the plain rendering.
3. The chat is rendered again with the content of one turn replaced; the range where the two texts differ is the turn. Two
   replacements without common characters at their ends are used, and the union is taken.

If none of them finds every turn, the example is refused. With methods 2 and 3 the token that ends the turn is also trained: the
first special token among the three tokens that follow.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import re
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import DataError

__all__ = ["Chat", "ChatTemplate", "PlainExample", "clock", "parse_example", "parse_examples", "time_limit"]

START, END = "\ue000", "\ue001"
"""Mark the trained characters of a rendered chat; both are private-use code points."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""ShareGPT's names of roles."""
LONGEST = 1 << 26
"""Maximum number of characters that a template may write for one chat."""
SECONDS = 10.0
"""Maximum seconds that a template may take for one chat."""
MEMORY = 1 << 30
"""Maximum bytes that a template may allocate for one chat."""
LARGEST_POWER = 1024
"""Maximum bits of a power that a template computes."""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
"""`data.template = "plain"`: `role: content` and a newline for each message."""


@dataclass(frozen=True)
class PlainExample:
    """Text to train on, after a prompt that is not trained."""

    text: str
    prompt: str = ""
    side: str = ""
    """Of a preference pair: chosen or rejected."""


@dataclass(frozen=True)
class Chat:
    """Messages of plain JSON values; `trained` are the indices of the assistant turns that the loss counts."""

    messages: tuple[dict[str, Any], ...]
    trained: tuple[int, ...]
    tools: Any = None
    side: str = ""
    """Of a preference pair: chosen or rejected."""

    @property
    def empty(self) -> bool:
        """Whether a trained turn is empty."""
        return any(not self.messages[i].get("content") and not self.messages[i].get("tool_calls") for i in self.trained)


# ---- formats ----


def parse_examples(item: Any, where: str) -> list[PlainExample | Chat]:
    """The examples of a JSON object: one, or the two of a preference pair, the chosen one first."""
    if not isinstance(item, Mapping) or not {"chosen", "rejected"} & item.keys():
        return [parse_example(item, where)]
    item = {key: value for key, value in item.items() if value is not None}
    if missing := [side for side in ("chosen", "rejected") if side not in item]:
        other = "rejected" if missing[0] == "chosen" else "chosen"
        raise DataError(
            f"{where}: has '{other}' without '{missing[0]}'" if len(missing) == 1 else f"{where}: an empty pair"
        )
    return [_answered(item, side, where) for side in ("chosen", "rejected")]


def _answered(item: Mapping[str, Any], side: str, where: str) -> PlainExample | Chat:
    """One side of a preference pair; in a chat, the turns after the common prefix of both sides are trained."""
    prompt, answer = item.get("prompt"), item[side]
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise DataError(f"{where}: '{side}' is empty")
        return PlainExample(answer, prompt, side)
    if isinstance(answer, str):
        raise DataError(f"{where}: '{side}' is text, but 'prompt' is {_kind(prompt)}; use text or messages for both")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt is None:
        both = [item[s] for s in ("chosen", "rejected")]
        if not all(isinstance(messages, list) for messages in both):
            raise DataError(f"{where}: without 'prompt', 'chosen' and 'rejected' must be lists of messages")
        same = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        prompt, answer = answer[:same], answer[same:]
    before = _messages(prompt, f"{where}: prompt") if prompt else []
    before = _with_system(item, before)
    found = _chat([*before, *_messages(answer, f"{where}: {side}")], where, item.get("tools"))
    trained = tuple(i for i in found.trained if i >= len(before))
    if not trained:
        raise DataError(f"{where}: '{side}' has no assistant turn that the other side lacks")
    chat = Chat(found.messages, trained, found.tools, side)
    if chat.empty:
        raise DataError(f"{where}: '{side}' has an empty assistant turn")
    return chat


def parse_example(item: Any, where: str) -> PlainExample | Chat:
    """An example in any of the formats above; `where` names file and line in errors."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where}: expected a JSON object, found {_kind(item)}")
    item = {key: value for key, value in item.items() if value is not None}  # parquet adds absent keys as null
    kinds = [kind for kind in ("messages", "conversations", "instruction", "prompt", "text") if kind in item]
    if len(kinds) > 1 and kinds != ["instruction", "prompt"]:
        raise DataError(f"{where}: has both '{kinds[0]}' and '{kinds[1]}'; keep the one to train on")
    match kinds[:1]:
        case ["messages" | "conversations" as key]:
            messages = _messages(item[key], f"{where}: {key}")
            return _chat(_with_system(item, messages), where, item.get("tools"))
        case ["instruction"]:
            asked = [_text(item, key, where) for key in ("instruction", "input") if item.get(key)]
            last = ("\n".join(asked), _text(item, "output", where))
            turns = [*_history(item.get("history") or [], where), last]
            messages = [
                {"role": r, "content": c} for turn in turns for r, c in zip(("user", "assistant"), turn, strict=True)
            ]
            return _chat(_with_system(item, messages), where)
        case ["prompt"]:
            return _prompted(item, where)
        case ["text"]:
            return PlainExample(_text(item, "text", where))
    found = ", ".join(f"'{_shown(key)}'" for key in list(item)[:6]) or "nothing"
    raise DataError(
        f"{where}: not an example: has {found}; expected 'messages', 'conversations', 'prompt' with 'completion' or 'answer', "
        "'instruction' with 'output', or 'text'"
    )


def _history(pairs: Any, where: str) -> list[tuple[str, str]]:
    """Earlier questions and answers of an Alpaca example."""
    right = isinstance(pairs, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    if not right:
        raise DataError(f"{where}: 'history' must be a list of [question, answer], each text")
    return [(question, answer) for question, answer in pairs]


def _prompted(item: Mapping[str, Any], where: str) -> PlainExample | Chat:
    key = next((k for k in ("completion", "answer") if k in item), None)
    if key is None:
        raise DataError(f"{where}: has 'prompt' without 'completion' or 'answer'")
    prompt, answer = item["prompt"], item[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        return PlainExample(answer, prompt)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise DataError(
            f"{where}: 'prompt' is {_kind(prompt)} and '{key}' is {_kind(answer)}; use text or messages for both"
        )
    before, after = _messages(prompt, f"{where}: prompt"), _messages(answer, f"{where}: {key}")
    chat = _chat([*before, *after], where, item.get("tools"))
    return Chat(chat.messages, tuple(i for i in chat.trained if i >= len(before)), chat.tools)


def _with_system(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A `system` column becomes the first message, unless the chat begins with one."""
    system = item.get("system")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _chat(messages: list[dict[str, Any]], where: str, tools: Any = None) -> Chat:
    if isinstance(tools, str):
        tools = files.parse_json(tools, f"{where}: tools", DataError)
    trained, plain = [], []
    for i, message in enumerate(messages):
        weights = [message.pop(key) for key in ("weight", "train", "training") if key in message]
        if any(w not in (0, 1) for w in weights):
            raise DataError(
                f"{where}: message {i + 1} has weight {_shown(weights[0])}; a turn is trained (1) or not (0)"
            )
        if message["role"] == "assistant" and all(weights):
            trained.append(i)
        plain.append(message)
    if not trained:
        raise DataError(f"{where}: no assistant turn to train on")
    return Chat(tuple(plain), tuple(trained), tools or None)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a list of messages, found {_kind(value)}")
    found = []
    for number, message in enumerate(value, start=1):
        at = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise DataError(f"{at}: expected an object with 'role' and 'content', found {_kind(message)}")
        plain = {key: field for key, field in message.items() if field is not None}
        role, content = (
            plain.pop("role", None) or plain.pop("from", None),
            plain.pop("content", plain.pop("value", None)),
        )
        if not isinstance(role, str):
            raise DataError(f"{at}: has no 'role' (or 'from')")
        if content is None and not plain.get("tool_calls"):
            raise DataError(f"{at}: has no 'content' (or 'value')")
        plain = {"role": ROLES.get(role, role), "content": _joined(content, at), **plain}
        for call in plain.get("tool_calls", ()) if isinstance(plain.get("tool_calls"), list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = files.parse_json(function["arguments"], f"{at}: arguments", DataError)
        found.append(plain)
    return found


def _joined(content: Any, where: str) -> str:
    """Content as text: a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type", "text") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
                raise DataError(f"{where}: a content part of type '{_shown(kind)}'; only text is supported")
        return "".join(part["text"] for part in content)
    raise DataError(f"{where}: 'content' is {_kind(content)}; expected text")


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: '{key}' is {_kind(value)}; expected text")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return "an empty list" if value == [] else names.get(type(value), "a number")


def _shown(value: Any) -> str:
    return ascii(value).strip("'")[:40]


# ---- templates ----


@dataclass
class ChatTemplate:
    """A chat template, compiled in a sandbox. `tokens` are the special tokens it may use (`bos_token`, `eos_token` …)."""

    source: str
    name: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    date: datetime.date = datetime.date(2024, 7, 26)
    """The date that `strftime_now` returns, so that data does not depend on the day it is encoded."""

    def __post_init__(self) -> None:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Name, Output
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`: its body, between START and END if these are given."""

            tags = {"generation"}  # noqa: RUF012  # as jinja declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                start, end = (Output([Name(n, "load")], lineno=line) for n in ("generation_start", "generation_end"))
                return [start, *body, end]

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def strftime_now(form: str) -> str:
            return self.date.strftime(form)

        def tojson(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        class Sandbox(ImmutableSandboxedEnvironment):
            """A power of large numbers cannot be interrupted, so it is refused."""

            intercepted_binops = frozenset(["**"])

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                if max(1, int(left).bit_length()) * abs(right) > LARGEST_POWER:
                    raise jinja2.TemplateError(f"{left} ** {right} is too large")
                return super().call_binop(context, operator, left, right)

        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        try:
            with _memory_limit(self.name):  # expressions of constants are evaluated here
                self._compiled = environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError, ValueError) as e:
            raise DataError(f"{self.name}: not a chat template: {_short(e)}") from None
        self._written: set[str] = (
            set()
        )  # roles, other than the assistant's, whose messages were seen in a rendered chat
        self._marks = re.search(r"{%[-+]?\s*generation\b", self.source) is not None

    @classmethod
    def load(cls, folder: Path, **options: Any) -> ChatTemplate | None:
        """The template of a Hugging Face folder: `chat_template.jinja`, or in `tokenizer_config.json`; None without one."""
        config, tokens = _table(folder / "tokenizer_config.json"), cls.tokens_in(folder)
        if (path := folder / "chat_template.jinja").exists():
            return cls(files.read_text(path, error=DataError), str(path), tokens, **options)
        found, name = config.get("chat_template"), f"{folder / 'tokenizer_config.json'}: chat_template"
        if isinstance(found, list):  # several templates with names
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = named.get("default")
            if found is None:
                raise DataError(f"{name}: has {', '.join(map(_shown, named))}, but none named 'default'")
        if found is None:
            return None
        if not isinstance(found, str):
            raise DataError(f"{name} is {_kind(found)}; expected text")
        return cls(found, name, tokens, **options)

    @classmethod
    def tokens_in(cls, folder: Path) -> dict[str, str]:
        """The special tokens of a Hugging Face folder by name; older ones have them in a file of their own."""
        older = cls.special_tokens(_table(folder / "special_tokens_map.json"))
        return older | cls.special_tokens(_table(folder / "tokenizer_config.json"))

    @staticmethod
    def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like of a tokenizer_config.json."""
        return {key: _token(config[key]) for key in config if key.endswith("_token") and _token(config[key])}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        """The text of a chat; raises DataError with the template's own message if it raises one."""
        import jinja2

        given = {"messages": list(messages), "tools": tools, "add_generation_prompt": add_generation_prompt}
        parts, size = [], 0
        try:
            with _memory_limit(self.name):
                for part in self._compiled.generate(**{**self.tokens, **given, **more}):
                    parts.append(part)
                    size += len(part)
                    if size > LONGEST:
                        raise DataError(f"{self.name}: writes more than {LONGEST:,} characters for one chat")
        except DataError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as e:
            raise DataError(f"{self.name}: refuses the chat: {_short(e)}") from None
        except (ArithmeticError, IndexError) as e:
            raise DataError(f"{self.name}: fails: {_short(e)}") from None
        return "".join(parts)

    def render_chat(self, chat: Chat) -> str:
        """The text of a whole chat; raises DataError if the template leaves a message out, whose role it may not know."""
        text = self.render(chat.messages, tools=chat.tools)
        for i, message in enumerate(chat.messages):
            content, role = message["content"].strip(), message["role"]
            if role == "assistant" or not content or (role in self._written and content in text):
                continue
            other = [*chat.messages[:i], {**message, "content": "q7Z"}, *chat.messages[i + 1 :]]
            try:
                left_out = self.render(other, tools=chat.tools) == text
            except DataError:  # the template reads the content
                continue
            if left_out:
                raise DataError(
                    f"{self.name}: leaves out message {i + 1}, whose role is '{_shown(role)}'; give it a role that the template "
                    "writes, or remove it"
                )
            self._written.add(role)
        return text

    def render_trained(self, chat: Chat) -> tuple[str, list[tuple[int, int]], bool]:
        """The text, the trained ranges of characters, and whether the token that ends a turn must still be added."""
        text = self.render_chat(chat)
        if START in text or END in text:
            raise DataError("the text holds the private-use characters U+E000 or U+E001")
        if self._marks:
            return text, self._marked_by_template(chat, text), False
        found = self._marked_content(chat, text, trim=False) or self._marked_content(chat, text, trim=True)
        found = found or self._compared(chat, text)
        if found is None:
            raise DataError(
                f"{self.name}: the assistant's turns cannot be found in the rendered chat; put {{% generation %}} … "
                "{% endgeneration %} around them in a copy of the template, or use data.loss_on = 'all'"
            )
        return text, found, True

    def _marked_by_template(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        marked = self.render(chat.messages, tools=chat.tools, generation_start=START, generation_end=END)
        rest, spans = _unmark(marked)
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if rest == text and spans and set(turns) == set(chat.trained):  # a turn may be marked in several blocks
            return [span for span in spans if span[0] < span[1]]
        if rest != text or len(spans) != len(turns):
            raise DataError(
                f"{self.name}: marks {len(spans)} turns with generation blocks, but the chat has {len(turns)}"
            )
        return [span for i, span in zip(turns, spans, strict=True) if i in chat.trained and span[0] < span[1]]

    def _marked_content(self, chat: Chat, text: str, *, trim: bool) -> list[tuple[int, int]] | None:
        """[Note: which characters are trained], 2; with `trim`, without surrounding white space, which many templates strip."""
        messages = list(chat.messages)
        for i in chat.trained:
            content = messages[i]["content"]
            core = content.strip() if trim else content
            if not core:
                return None
            at = content.index(core)
            messages[i] = {**messages[i], "content": content[:at] + START + core + END + content[at + len(core) :]}
        try:
            rest, spans = _unmark(self.render(messages, tools=chat.tools))
        except DataError:
            return None
        return spans if rest == text and len(spans) == len(chat.trained) else None

    def _compared(self, chat: Chat, text: str) -> list[tuple[int, int]] | None:
        """[Note: which characters are trained], 3."""
        spans = []
        for i in chat.trained:
            found = []
            for other in ("q7Z", "x4W"):
                messages = [*chat.messages[:i], {**chat.messages[i], "content": other}, *chat.messages[i + 1 :]]
                changed = self.render(messages, tools=chat.tools)
                first = next((k for k, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), None)
                if first is None or other not in changed:
                    return None
                most = min(len(text), len(changed)) - first
                last = next((k for k in range(most) if text[-1 - k] != changed[-1 - k]), most)
                found.append((first, len(text) - last))
            spans.append((min(a for a, _ in found), max(b for _, b in found)))
        disjoint = all(a[1] <= b[0] for a, b in pairwise(spans))
        return spans if disjoint and all(a < b for a, b in spans) else None


def _unmark(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without START and END, and the ranges that were between them; no ranges if the marks do not alternate."""
    rest, spans, start, size = [], [], None, 0
    for part in re.split(f"([{START}{END}])", text):
        if part == START and start is None:
            start = size
        elif part == END and start is not None:
            spans.append((start, size))
            start = None
        elif part in (START, END):
            return text, []
        else:
            rest.append(part)
            size += len(part)
    return "".join(rest), spans if start is None else []


def _table(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table; empty without the file."""
    found = files.read_json(path, error=DataError) if path.exists() else {}
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a table, found {_kind(found)}")
    return found


def _token(value: Any) -> str:
    """A special token of tokenizer_config.json: text, or an object with `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _short(e: BaseException) -> str:
    return " ".join(str(e).split())[:200] or type(e).__name__


# ---- limits on time and memory ----


class _Timeout(BaseException):
    """Raised in a thread that takes too long; not an Exception, so that no `except Exception` catches it."""


PROCESSOR_TIME = hasattr(time, "pthread_getcpuclockid")  # not on macOS
clock = time.thread_time if PROCESSOR_TIME else time.monotonic


@dataclass
class TimeLimit:
    """When the chat that is being rendered began, and where it is from; the caller updates both."""

    since: float
    where: str


@contextmanager
def time_limit(where: str, seconds: float = SECONDS) -> Iterator[TimeLimit]:
    """Raise DataError when more than `seconds` pass after the yielded time, which the caller sets to `clock()`.

    A template may loop; Python code can only be interrupted from another thread. Processor time of the caller's thread counts:
    on a busy machine any text takes long.
    """
    limit, thread, over = TimeLimit(clock(), where), threading.get_ident(), threading.Event()
    now = (
        functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread)) if PROCESSOR_TIME else time.monotonic
    )

    def watch() -> None:
        while not over.wait(0.25):
            if now() - limit.since > seconds:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Timeout))
                return

    watcher = threading.Thread(target=watch, name="template time limit", daemon=True)
    watcher.start()
    try:
        yield limit
    except _Timeout:
        raise DataError(
            f"{limit.where}: its chat template takes longer than {seconds:g} s for this chat: does it loop?"
        ) from None
    finally:
        over.set()
        watcher.join()


@contextmanager
def _memory_limit(template: str) -> Iterator[None]:
    """Let the process allocate at most MEMORY more bytes inside; more raises DataError. (Linux only.)"""
    try:
        with open("/proc/self/statm", "rb") as f:
            mapped = int(f.read().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lower = mapped + MEMORY
    if any(limit != resource.RLIM_INFINITY and limit <= lower for limit in (soft, hard)):
        yield  # a limit of the system's, as low as ours
        return
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        yield
    except MemoryError:
        raise DataError(f"{template}: needs more than {MEMORY >> 20:,} MiB of memory for one chat") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
