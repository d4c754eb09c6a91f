"""A byte-level tokenizer with real control tokens and a chat template, made in memory: no files, no network."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, TURN = 0, 1, 2, 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ m['role'][0] | upper }}: {{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %} {{ call['name'] }}({{ call['arguments'] | tojson }}){% endfor %}"
    "<|turn|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def toy_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 3 for <pad>, <s>, </s>, <|turn|>; plain encoding puts <s> in front."""
    specials = ["<pad>", "<s>", "</s>", "<|turn|>"]
    vocab = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<|turn|>"], chat_template=chat_template,
    )
