"""Chat templates that show each trait seen in published ones, in our own words, and conversations to put through them.

The traits: tools inside the system block; tool results gathered into one user turn; thoughts dropped from earlier answers,
so that text changes when a message follows; the bos token written by the template; roles that must alternate, so that most
prefixes are refused; a system message written into the last user's; trimmed contents; today's date; a generation prompt that
opens a thought.
"""

from __future__ import annotations

from typing import Any

_CALLS = """
{%- for call in m.tool_calls or [] %}
<call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</call>
{%- endfor %}"""

TURNS = (
    """{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are a helper.' }}
{%- if tools %}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{%- endif %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content if loop.index0 > last.user else m.content.split('</think>')[-1].lstrip('\\n') }}"""
    + _CALLS
    + """<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<result>
{{ m.content }}
</result>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
)

HEADERS = (
    """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

Today: {{ strftime_now('%d %b %Y') }}

{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>
{%- for m in messages %}{% if m.role != 'system' %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools %}Given these functions: {{ tools | tojson(indent=2) }}

{% endif %}{{ m.content | trim }}"""
    + _CALLS
    + """<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
)

ALTERNATING = """{{ bos_token }}
{%- set seen = namespace(user=true, start=0) %}
{%- if messages[0].role == 'system' %}{% set seen.start = 1 %}{% endif %}
{%- for m in messages[seen.start:] %}
{%- if m.role in ('user', 'tool') %}
{%- if m.role == 'user' and not seen.user %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set seen.user = false %}[INST] {% if loop.last and seen.start %}{{ messages[0].content }}

{% endif %}{{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{% set seen.user = true %} {{ m.content | trim }}</s>
{%- else %}{{ raise_exception('only one system message') }}{% endif %}
{%- endfor %}
{%- if seen.start == messages | length %}{{ raise_exception('a user must speak') }}{% endif %}"""

NAMED = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

BARE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

STYLES = {"turns": TURNS, "headers": HEADERS, "alternating": ALTERNATING, "named": NAMED, "bare": BARE}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a städtchen.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def _call(place: str, number: int) -> dict[str, Any]:
    function = {"name": "weather", "arguments": f'{{"place": "{place}"}}'}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


PLAIN = [
    {"role": "user", "content": "Who wrote “Эта книга”?\n"},
    {"role": "assistant", "content": "<think>\nA book in Russian.\n</think>\n\nI can't tell:   there are many. 🙂"},
    {"role": "user", "content": "  def f(x):\n\treturn x  # 世界"},
    {"role": "assistant", "content": "x is returned unchanged."},
    {"role": "user", "content": "Thanks!\n\n"},
]
SYSTEM = [{"role": "system", "content": "Answer briefly.\n"}, *PLAIN]
CALLING = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "Weather in Köln and Łódź?"},
    {"role": "assistant", "content": "", "tool_calls": [_call("Köln", 1), _call("Łódź", 2)]},
    {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "grey"}'},
    {"role": "tool", "tool_call_id": "call00002", "content": "rain\n"},
    {"role": "assistant", "content": "Grey in Köln; rain in Łódź."},
    {"role": "user", "content": "And tomorrow?"},
]
TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": (PLAIN, None),
    "system": (SYSTEM, None),
    "tools": (CALLING, TOOLS),
    "tools without a system message": (CALLING[1:], TOOLS),
}
