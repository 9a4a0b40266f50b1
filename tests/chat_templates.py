"""Chat templates in the formats of five model families, and a tokenizer with their tokens."""

from functools import cache

from transformers import PreTrainedTokenizerFast

CHATML = r"""
{%- for m in messages -%}
{{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""
# As Qwen2.5: a default system message, tools in it, and tool results as messages of the user.
CHATML_TOOLS = r"""
{%- set first = messages[0].content if messages[0].role == "system" else "You are helpful." -%}
{{- "<|im_start|>system\n" + first -}}
{%- for tool in tools or [] -%}{{- "\n" + (tool | tojson) -}}{%- endfor -%}
{{- "<|im_end|>\n" -}}
{%- for m in messages if m.role != "system" -%}
{%- if m.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
{{- "\n<tool_response>\n" + m.content + "\n</tool_response>" -}}
{%- if loop.last or loop.nextitem.role != "tool" -%}{{- "<|im_end|>\n" -}}{%- endif -%}
{%- else -%}
{{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""
LLAMA3 = r"""
{{- bos_token -}}
{%- for m in messages -%}
{%- set role = "ipython" if m.role == "tool" else m.role -%}
{{- "<|start_header_id|>" + role + "<|end_header_id|>\n\n" + m.content + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" -}}
{%- endif -%}
"""
MISTRAL = r"""
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == "assistant" -%}{{- " " + m.content + "</s>" -}}
{%- elif m.role == "tool" -%}{{- "[TOOL_RESULTS] " + m.content + "[/TOOL_RESULTS]" -}}
{%- else -%}{{- "[INST] " + m.content + "[/INST]" -}}
{%- endif -%}
{%- endfor -%}
"""
# Removes the reasoning of turns before the last user message.
THINKING = r"""
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}
{%- set last.user = loop.index0 -%}
{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set kept = m.content -%}
{%- if m.role == "assistant" and loop.index0 < last.user -%}
{%- set kept = m.content.split("</think>")[-1].lstrip("\n") -%}
{%- endif -%}
{{- "<|im_start|>" + m.role + "\n" + kept + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "chatml with tools": CHATML_TOOLS,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "thinking": THINKING,
}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")
SPECIAL += ("<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
END = {"llama 3": "<|eot_id|>", "mistral": "</s>"}  # of a turn; "<|im_end|>" in the others


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, in which a text has many tokenizations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["the answer is 42 because six times seven", "hello there, what is it? \n\n  ok"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token=END.get(template, "<|im_end|>"),
        chat_template=TEMPLATES[template],
    )


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer that tests share and must not change."""
    return chat_tokenizer(template)
