"""Do chat templates give what transformers gives, safely, and are their refusals the request's errors? (C17)"""

from datetime import datetime
from typing import Any

import pytest

from engine.text.chat_template import MAX_DEPTH, ChatTemplate
from ipc.errors import RequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße,\n  日本"},
    {"role": "assistant", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [True, None]}}}]},
    {"role": "user", "content": "bye"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<f> & é", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] + ': ' + m.content + eos_token }}\n{% endfor %}",
    "blocks and blanks": """
{%- for message in messages %}
    {% if message.role == 'system' %}
        [{{ message.content | trim }}]
    {% else %}
    {{ bos_token }}{{ message.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}""",
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[2].tool_calls | tojson(sort_keys=true) }}{{ messages[0] | tojson }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "missing": "{{ messages[0].nothing }}|{{ tools is none }}|{{ documents is defined }}|{{ custom }}|{{ pad_token is defined }}|{{ messages[0].get('x', 'y') }}",
    "slices": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% endif %}{{ rest | length }}{{ rest[0].content.split('\n')[0] | upper }}",
    "llama 2": "{% for message in messages %}{% if (message['role'] == 'user') %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equal_to_transformers(name: str, add_generation_prompt: bool, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    [expected], _ = render_jinja_template([TALK], chat_template=TEMPLATES[name], custom="c", **arguments, **SPECIAL)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(TALK, custom="c", **arguments) == expected


def test_keys_that_are_none_are_left_out_as_in_transformers() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", {})
    assert template.render([{"role": "assistant", "content": None, "name": None}]) == '{"role": "assistant"}'


def test_reasoning_is_found_under_each_of_its_names() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", {})
    for name in ("reasoning", "thinking", "reasoning_content"):
        assert template.render([{"role": "assistant", name: "hm"}]) == "hmhm"


def test_the_date_of_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TALK) == str(datetime.now().year)


def test_variables_win_over_special_tokens_but_not_over_the_messages() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", SPECIAL)
    assert template.render(TALK, bos_token="X") == "X4"


# -------------------------------------------------------------------------------------------------------- refusals


def refused(template: str | None, messages: Any = TALK, **variables: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(template, SPECIAL).render(messages, **variables)
    return caught.value


def test_a_missing_template_is_explained() -> None:
    error = refused(None)
    assert (error.field, error.code) == ("messages", "bad_request")
    assert "no chat template" in error.reason and "generate" in error.reason


def test_a_broken_template_is_not_the_clients_fault() -> None:
    error = refused("{% for m in %}")
    assert error.code == "internal" and "broken" in error.reason


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content + 1 }}", "refused"),
        ("{{ messages.nothing.more }}", "no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ {}['a'].b }}", "no attribute 'a'"),
    ],
)
def test_what_a_template_refuses_is_the_requests_error(template: str, words: str) -> None:
    error = refused(template)
    assert error.field == "messages" and words in error.reason


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ''.format.__self__.x }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(message) for message in TALK]
    assert "refused" in refused(template, messages).reason
    assert messages == TALK


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message, got none"),
        ("hi", "must be a list of at least one message, got str"),
        (None, "got NoneType"),
        (["hi"], r"messages[0] must be a map with role and content, got str"),
        ([{"content": "x"}], "messages[0].role=None must be a text"),
        ([TALK[0], {"role": 3}], "messages[1].role=3 must be a text"),
        ([{"role": "user", "content": b"x"}], "messages[0].content must be text, number, list or map, got bytes"),
        ([{"role": "user", "content": [{"a": object()}]}], "messages[0].content[0].a must be"),
        ([{"role": "user", 3: 4}], "messages[0] has the key 3"),
    ],
)
def test_messages_of_the_wrong_form_are_named(messages: Any, words: str) -> None:
    error = refused("x", messages)
    assert error.field == "messages" and words in error.reason


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    assert "nested more than" in refused("x", [{"role": "user", "content": deep}]).reason
