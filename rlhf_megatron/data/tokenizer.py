"""From a data-set row to prompt ids: the chat template exactly once, special tokens exactly once.

| prompt                | how it becomes ids                                                                     |
|-----------------------|----------------------------------------------------------------------------------------|
| string, chat = true   | [system message,] [shots,] user message -> chat template -> WITHOUT added specials     |
| messages, chat = true | as they are, without system and shots -> chat template -> WITHOUT added specials       |
| string, chat = false  | encoded WITH the tokenizer's special tokens (BOS where the model has one)              |

What stands in a prompt is text, whatever it looks like: a literal "<s>" or "<|im_start|>" in a message or a raw string
is encoded as characters and never becomes a control token. So a prompt that has already been through a template must
not be given as a string; give the messages. `RLHFDataset.counts["control_strings"]` says how many prompts hold such
text. Tokens that a tokenizer adds but does not mark as special (as "<think>" in some families) stay tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Tokenizer = Any  # transformers' PreTrainedTokenizerBase; the library is imported only to load one


class TokenizerError(ValueError):
    """A directory's tokenizer cannot be used; the message says why and what to do."""

    explains_itself = True


class PromptError(ValueError):
    """A prompt cannot be encoded; the message says why. The caller adds file and row."""


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a local HF directory. Nothing is downloaded and no code from the directory runs.

    Raises:
        TokenizerError: there is no such directory, or it holds no tokenizer that transformers itself knows.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TokenizerError(f"tokenizer: {directory} is not a directory; name a local HF model directory")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything from KeyError to OSError for a damaged directory
        raise TokenizerError(f"tokenizer: {directory} cannot be loaded without running code from it or downloading: "
                             f"{type(error).__name__}: {error}") from error


def encode_prompt(tokenizer: Tokenizer, row: Mapping[str, Any], chat: bool, system: str | None = None,
                  prompt_key: str = "prompt", shots: Sequence[str] = ()) -> list[int]:
    """Prompt ids of one row (see the table above). Raises PromptError when the prompt is not usable."""
    return PromptEncoder(tokenizer, chat, system, prompt_key, shots)(row)


class PromptEncoder:
    """`encode_prompt` for many rows.

    Args:
        shots: texts of worked examples, question and answer in turn; they become user and assistant messages.

    Raises:
        TokenizerError: chat is wanted and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool, system: str | None = None, prompt_key: str = "prompt",
                 shots: Sequence[str] = ()) -> None:
        if chat and not getattr(tokenizer, "chat_template", None):
            raise TokenizerError("data.chat is true, but the tokenizer has no chat template: set data.chat=false for "
                                 "raw strings, or add chat_template to the model directory")
        self.tokenizer, self.chat, self.prompt_key = tokenizer, chat, prompt_key
        self.before = [] if system is None else [{"role": "system", "content": system}]
        self.before += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(shots)]
        self.control = control_strings(tokenizer)
        self._control = re.compile("|".join(map(re.escape, self.control)) or r"(?!)")

    def __call__(self, row: Mapping[str, Any]) -> list[int]:
        prompt = checked_prompt(row, self.prompt_key, self.chat)
        if not isinstance(prompt, str):
            ids = self._encode_messages(prompt)
        elif not self.chat:
            ids = self._as_text(prompt, add_special_tokens=True)
        else:
            ids = self._encode_messages([*self.before, {"role": "user", "content": prompt}])
        if not ids:
            raise PromptError("the prompt encodes to no tokens")
        return list(ids)

    def holds_control_strings(self, row: Mapping[str, Any]) -> bool:
        """True when the row's prompt holds the text of a control token."""
        found = False

        def look(text: str) -> str:
            nonlocal found
            found = found or self._control.search(text) is not None
            return text

        _map_strings(row.get(self.prompt_key), look)
        return found

    def _as_text(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True,
                              return_attention_mask=False)["input_ids"]

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: they raise whatever they like
            raise PromptError(f"the chat template fails: {type(error).__name__}: {error}") from error

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        """One template, one encoding. Only when a message holds the text of a control token: in pieces.

        Then each such text is hidden behind a placeholder while the template runs, so that what is left of control
        strings is the template's own. Those become ids; the pieces between them are encoded as text. A tokenizer cuts
        at control tokens before anything else, so that the ids are those of one call, but for the hidden texts.
        """
        hidden: list[str] = []
        opening, closing = _placeholder_marks(messages)

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{opening}{len(hidden) - 1}{closing}"

        safe = _map_strings(messages, lambda text: self._control.sub(hide, text))
        rendered = self._render(safe)
        if not hidden:
            return self.tokenizer(rendered, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        ids: list[int] = []
        for piece in re.split(f"({self._control.pattern})", rendered):
            if piece in self.control:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                text = re.sub(f"{opening}([0-9]+){closing}", lambda m: hidden[int(m.group(1))], piece)
                ids += self._as_text(text, add_special_tokens=False)
        return ids


def control_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokenizer's special tokens, longest first."""
    texts = {str(token) for token in tokenizer.all_special_tokens}
    texts |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(texts - {""}, key=lambda text: (-len(text), text))


def checked_prompt(row: Mapping[str, Any], prompt_key: str, chat: bool) -> str | list[dict[str, Any]]:
    """The row's prompt if it is a usable string or (with chat) list of messages. Raises PromptError otherwise."""
    if prompt_key not in row:
        raise PromptError(f"no column {prompt_key!r} (data.prompt_key); the row has {sorted(map(str, row))}")
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError(f"{prompt_key!r} is empty")
    elif not chat:
        raise PromptError(f"{prompt_key!r} is {_said(prompt)}; with data.chat=false it must be a string")
    elif not isinstance(prompt, list):
        raise PromptError(f"{prompt_key!r} is {_said(prompt)}; it must be a string or a list of messages")
    elif not prompt:
        raise PromptError(f"{prompt_key!r} is an empty list of messages")
    else:
        for i, message in enumerate(prompt):
            _check_message(f"message {i} of {prompt_key!r}", message)
    _map_strings(prompt, _no_surrogates)
    return prompt


def _check_message(what: str, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise PromptError(f"{what} must be a dict with a role and a content, not {_said(message)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        raise PromptError(f"{what} (role {message['role']!r}) has {_said(content)} as content; it must be a string")


def _said(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def _no_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise PromptError(f"lone surrogate {text[at]!r} at character {at}: not Unicode text") from error
    return text


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure of lists and dicts with every string value changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    return value


def _placeholder_marks(messages: Any) -> tuple[str, str]:
    """Two private-use characters that no message holds."""
    used: set[str] = set()

    def look(text: str) -> str:
        used.update(set(text))
        return text

    _map_strings(messages, look)
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise PromptError("the prompt uses every private-use character: no placeholder is left") from None
